"""Label-free hardening of a real, finished classifier."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Threat, TorchClassifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.registry import load_classifier
from patchcleanser.classifiers.wrappers import inpainting
from patchcleanser.cli.harden import HardenOptions
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Grid
from patchcleanser.data import in_memory, load_dataset, together
from patchcleanser.data.dataset import Subset
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.builders import resnet
from patchcleanser.networks.inpainting import Inpainting
from patchcleanser.training import Recipe, artifacts, fit
from patchcleanser.training.cutout import masked_inputs
from patchcleanser.training.harden import HardeningStudent, _freeze, _hold_out, harden
from patchcleanser.training.recipes import HardenSettings
from patchcleanser.training.selection import Check, choose, eligible

THREAT = Threat.square(5)


class SmallPhotos(Subset):
    """Photos with too few pixels for the network's input."""

    def image(self, index: int) -> Tensor:
        return super().image(index)[:, :8, :8]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> TorchClassifier:
    """A finished classifier that never saw a mask: trained on the sample, and not well."""
    torch.manual_seed(0)
    recipe = Recipe(20, 50, "sgd", 0.1, schedule="onecycle", warmup=0.2, shift=2, holdout=0.0, precision="no")
    images = in_memory(load_dataset("sample"), (32, 32))
    preprocessing = Preprocessing((32, 32), mean=(0.49, 0.48, 0.45), std=(0.25, 0.25, 0.26))
    network = resnet(layers=(1, 1, 1, 1), channels=(16, 24, 32, 48), stem_stride=2)
    fitted = fit(network, images, recipe, preprocessing=preprocessing, out=tmp_path_factory.mktemp("fit"))
    return TorchClassifier(fitted.module, preprocessing, classes=10)


def test_the_copy_says_of_masked_photos_what_the_original_says_of_whole_ones(classifier: TorchClassifier) -> None:
    before = copy.deepcopy(classifier.module.state_dict())
    photos = together([load_dataset("sample")])  # without labels
    epochs: list[float] = []
    settings = HardenSettings(epochs=5, batch=25, rate=1e-3, tries=1, holdout=0.3, smallest_crop=0.8, every=2)
    done = harden(
        classifier, photos, THREAT, settings=settings, on_progress=lambda done, total, text: epochs.append(done)
    )
    assert done.checks[0].agreement == 1.0  # the copy starts as the original
    assert done.best.invariance > done.checks[0].invariance
    assert done.best.agreement > 0.7
    assert epochs == [2, 4, 5, 5, 5, 5]  # every second epoch, the last, and thrice on the way back
    # The original is untouched, and so are the batch-norm statistics of the copy.
    for name, tensor in classifier.module.state_dict().items():
        assert torch.equal(tensor, before[name])
        if "running" in name:
            assert torch.equal(done.classifier.module.state_dict()[name], tensor)
    assert done.classifier.fingerprint != classifier.fingerprint
    assert not any(m.training for m in done.classifier.module.modules())


def _check(epoch: int, agreement: float, *survivors: tuple[int, int], photos: int) -> Check:
    """Photos from one number to the next survive, for each pair of numbers."""
    survived = tuple(any(first <= n < last for first, last in survivors) for n in range(photos))
    return Check(epoch, 0.5, agreement, survived, 1.0)


@pytest.mark.parametrize(
    ("copies", "photos", "epoch"),
    [
        # 25 of the best one's photos are lost and 20 others won: a difference of 5, and the root of 45 is 6.7.
        ([(1.0, (0, 10)), (0.6, (0, 200)), (0.7, (25, 220))], 400, 2),
        # 40 lost, 25 won: 15 is more than the root of 65, if less than that of 400, and less than twice as much.
        ([(1.0, (0, 10)), (0.6, (0, 200)), (0.7, (40, 225))], 400, 1),
        # Of few photos anything may be chance.
        ([(1.0, (0, 1)), (0.6, (0, 20)), (0.7, (2, 21))], 40, 1),
        # Within chance of the best, but less than the original.
        ([(1.0, (0, 100)), (0.9, (0, 101)), (0.95, (5, 104))], 200, 1),
        ([(1.0, (0, 100)), (0.9, (100, 200))], 200, 0),
        # Of equals the last.
        ([(1.0, (0, 10)), (0.8, (0, 100)), (0.8, (10, 110))], 200, 2),
        # One that agrees more outlives a later one that is more invariant, but not clearly.
        ([(1.0, (0, 10)), (0.9, (0, 100)), (0.6, (5, 108))], 200, 1),
        # The first is clearly worse than the second and thrown away, and stays so when a third comes that it is not.
        ([(1.0, (0, 10)), (0.7, (0, 90)), (0.6, (0, 100)), (0.5, (0, 20), (100, 182))], 200, 2),
    ],
)
def test_of_the_most_invariant_copies_the_one_most_like_the_original_is_kept(
    copies: list[tuple[Any, ...]], photos: int, epoch: int
) -> None:
    untouched, *trained = [_check(n, agreement, *rest, photos=photos) for n, (agreement, *rest) in enumerate(copies)]
    left: list[Check] = []
    for check in trained:  # weights that are not eligible are thrown away as checks come in
        left = eligible([untouched, *left, check])
        assert max(left, key=lambda c: c.invariance, default=untouched).invariance == max(
            c.invariance for c in [untouched, *trained[: trained.index(check) + 1]]
        )
    assert choose([untouched, *left]).epoch == epoch


def test_copies_that_a_later_one_beats_in_both_measures_are_thrown_away() -> None:
    """Or there would be a set of weights in memory for every check."""
    checks = [_check(n, 0.5 + 0.01 * n, (0, 100 + n), photos=200) for n in range(5)]
    assert [check.epoch for check in eligible(checks)] == [4]


def test_copies_part_of_the_way_back_to_the_original_are_looked_at_too(
    classifier: TorchClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.training.harden.eligible", lambda checks: checks[1:])  # all may be chosen
    settings = HardenSettings(epochs=2, batch=25, rate=1e-3, tries=1, holdout=0.4, every=1)
    work = HardeningStudent(classifier, together([load_dataset("sample")]), THREAT, settings, seed=0)
    work.check(None, way=0.0)
    work.train_epoch()
    work.train_epoch()
    epoch = choose(work.candidates).epoch
    work.check_interpolations()
    assert [check.key for check in work.checks[3:]] == [(epoch, 0.75), (epoch, 0.5), (epoch, 0.25)]
    trained, half = work.weights[epoch, 1.0], work.weights[epoch, 0.5]
    for name, tensor in classifier.module.state_dict().items():
        want = torch.lerp(tensor, trained[name], 0.5) if tensor.is_floating_point() else tensor
        assert torch.allclose(half[name], want, atol=1e-6), name
    assert any(not torch.equal(trained[name], half[name]) for name in half)


@pytest.mark.parametrize(("grid", "own"), [("input", True), ("source", False)])
@pytest.mark.parametrize("masks", [3, 6])
def test_on_the_input_grid_the_copy_learns_with_the_very_masks_of_the_defense(
    grid: Grid, own: bool, masks: int, classifier: TorchClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the source grid they fall elsewhere in every image."""
    threat, hidden = Threat.square(5, grid=grid), []

    def watch(module: nn.Module, inputs: Tensor, chosen: Tensor | None = None) -> Tensor:
        hidden.extend([] if chosen is None else [h for h in chosen if h.any()])
        return masked_inputs(module, inputs, chosen)

    monkeypatch.setattr("patchcleanser.training.harden.masked_inputs", watch)
    photos = together([load_dataset("sample")], limit=60)
    harden(classifier, photos, threat, settings=HardenSettings(epochs=2, batch=20, every=2, masks=masks))
    visible = torch.from_numpy(MaskSet.build(threat, image=(32, 32), masks=masks).visible())
    unions = {(~(a & b)).numpy().tobytes() for a in visible for b in visible}
    right = [h.numpy().tobytes() in unions for h in hidden]
    assert len(right) > 50
    assert all(right) if own else not all(right)


def test_it_stops_by_itself_when_nothing_improves(classifier: TorchClassifier) -> None:
    photos = together([load_dataset("sample")], limit=60)
    settings = HardenSettings(epochs=30, batch=16, rate=1e-12, tries=1, patience=2, every=1)
    done = harden(classifier, photos, THREAT, settings=settings)
    assert len(done.checks) == 1 + 2
    assert done.best.epoch == 0


class StoppedError(Exception):
    """Somebody pulled the plug."""


def test_a_run_that_was_stopped_ends_as_an_unbroken_one(
    classifier: TorchClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = together([load_dataset("sample")], limit=60)
    settings = HardenSettings(epochs=4, batch=16, rate=1e-3, tries=1, holdout=0.3, every=2)
    unbroken = harden(classifier, photos, THREAT, settings=settings)
    monkeypatch.setattr(artifacts, "SAVE_SECONDS", 0)
    monkeypatch.setattr(artifacts, "SAVE_SHARE", 1e9)
    monkeypatch.setattr("patchcleanser.training.harden.PROGRESS_SECONDS", 0)
    times: list[float] = []

    def stop(done: float, total: int, text: str) -> None:
        times.append(done)
        if done > 2.5:
            raise StoppedError

    with pytest.raises(StoppedError):
        harden(classifier, photos, THREAT, settings=settings, out=tmp_path, on_progress=stop)
    assert times == sorted(times)
    assert sum(0 < done < 1 for done in times) >= 1  # told within an epoch too
    with pytest.raises(TrainingError, match=r"another run \(other seed\)"):
        harden(classifier, photos, THREAT, settings=settings, seed=1, out=tmp_path)
    times.clear()
    resumed = harden(
        classifier,
        photos,
        THREAT,
        settings=settings,
        out=tmp_path,
        on_progress=lambda done, total, text: times.append(done),
    )
    assert min(times) > 2  # the first two epochs were not repeated
    assert [asdict(c) | {"seconds": 0} for c in resumed.checks] == [asdict(c) | {"seconds": 0} for c in unbroken.checks]
    weights = resumed.classifier.module.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in unbroken.classifier.module.state_dict().items())


def test_the_original_is_asked_about_the_very_pictures_that_are_then_masked(classifier: TorchClassifier) -> None:
    settings = HardenSettings(batch=20, unmasked=0.25, greedy=1.0)
    work = HardeningStudent(classifier, together([load_dataset("sample")], limit=30), THREAT, settings, seed=0)
    teacher_inputs: list[Tensor] = []
    student_inputs: list[Tensor] = []
    work.teacher = lambda inputs: (teacher_inputs.append(inputs), classifier.module(inputs))[1]  # type: ignore[func-returns-value]
    work.student = lambda inputs: (student_inputs.append(inputs), work.module(inputs))[1]  # type: ignore[func-returns-value]
    work.train_epoch()
    assert len(teacher_inputs) == 1
    assert len(student_inputs) == 2 * settings.tries + 1  # places tried for two masks, then the training step
    assert torch.equal(teacher_inputs[0][:5], student_inputs[-1][:5])  # a quarter of the batch stays whole
    hidden = (student_inputs[-1][5:] == 0).all(1)
    assert hidden.flatten(1).any(1).all()
    assert torch.equal(student_inputs[-1][5:], teacher_inputs[0][5:].masked_fill(hidden[:, None], 0.0))


def test_a_network_that_fills_in_what_is_hidden_is_told_so_while_it_learns() -> None:
    filling = load_classifier("inpaint:zoo:tiny", device="cpu")
    assert isinstance(filling, TorchClassifier)
    photos = together([load_dataset("sample")], limit=30)
    work = HardeningStudent(filling, photos, THREAT, HardenSettings(batch=20, unmasked=0.25), seed=0)
    teacher_inputs: list[Tensor] = []
    student_inputs: list[Tensor] = []
    work.teacher = lambda inputs: (teacher_inputs.append(inputs), filling.module(inputs))[1]  # type: ignore[func-returns-value]
    work.student = lambda inputs: (student_inputs.append(inputs), work.module(inputs))[1]  # type: ignore[func-returns-value]
    work.train_epoch()
    assert (teacher_inputs[0][:, 3] == 0).all()
    assert (student_inputs[-1][:5, 3] == 0).all()
    assert student_inputs[-1][5:, 3].flatten(1).any(1).all()
    settings = HardenSettings(epochs=1, batch=16, rate=1e-6, tries=1, every=1)
    done = harden(filling, photos, THREAT, settings=settings)
    assert done.classifier.mask_aware
    assert done.checks[0].agreement == 1.0


def test_sharp_photos_are_seen_more_often_than_blurred_ones(classifier: TorchClassifier) -> None:
    sharp, blurred = load_dataset("sample"), SmallPhotos(load_dataset("sample"), np.arange(100))
    settings = HardenSettings(epochs=1, batch=8, tries=1, holdout=0.1, sharp=3)
    work = HardeningStudent(classifier, together([sharp, blurred]), THREAT, settings, 0)
    times = np.bincount(work.pool, minlength=400)  # 300 sharp ones, 100 blurred
    wide = (work.photos.sizes.amin(1) >= 16).numpy()
    assert (times[(times > 0) & wide] == 3).all()
    assert (times[(times > 0) & ~wide] == 1).all()
    # None of those held out is learnt from, and sharp ones among them are nearly as frequent as among those shown.
    assert len(work.selector.inputs) == int((times == 0).sum()) == 40
    assert [int((times[kind] == 0).sum()) for kind in (wide, ~wide)] == [30, 10]


@pytest.mark.parametrize(
    ("sharp", "blurred", "held"),
    [(2000, 100_000, (114, 286)), (30, 970, (3, 97)), (0, 1000, (0, 100)), (1000, 0, (100, 0)), (5, 5, (0, 4))],
)
def test_few_sharp_photos_are_not_all_held_out(sharp: int, blurred: int, held: tuple[int, int]) -> None:
    often = np.repeat([20, 1], [sharp, blurred]) if sharp and blurred else np.ones(sharp + blurred, int)
    apart = _hold_out(often, 0.1, np.random.default_rng(0))
    assert len(set(apart.tolist())) == len(apart)
    assert (int((apart < sharp).sum()), int((apart >= sharp).sum())) == held


def test_half_of_the_photos_are_blended_with_another(classifier: TorchClassifier) -> None:
    photos = together([load_dataset("sample")], limit=100)
    pure, mixed = (
        HardeningStudent(classifier, photos, THREAT, HardenSettings(mix=mix), seed=0)._crops(np.arange(64))
        for mix in (0.0, 0.5)
    )
    changed = (pure - mixed).abs().flatten(1).amax(1) > 1e-4
    assert 20 <= int(changed.sum()) <= 44
    half = 0.5 * (pure + pure.roll(1, 0))
    assert ((mixed - half).abs().flatten(1).sum(1) <= (pure - half).abs().flatten(1).sum(1) + 1e-3).all()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"every": 0}, "every is at least 1, got 0"),
        ({"unmasked": 1.0}, "unmasked is at least 0 and below 1, got 1.0"),
        ({"mix": 1.5}, "mix is a number from 0 to 1, got 1.5"),
        ({"greedy": -0.1}, "greedy is a number from 0 to 1, got -0.1"),
        ({"average": 1.0}, "average is at least 0 and below 1"),
        ({"frozen": "layer4"}, r"frozen is a tuple of names of layers, got 'layer4'"),
        ({"features": -1.0}, "features is a weight of at least 0, got -1.0"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        HardenSettings(**setting)


def test_the_command_has_the_defaults_of_the_settings() -> None:
    """They stand in both places: asking for the settings would import torch before any help is shown."""
    options = asdict(HardenOptions())
    settings = asdict(HardenSettings())
    shared = options.keys() & settings.keys()
    assert {"epochs", "rate", "greedy", "features", "frozen"} <= shared
    assert {name: options[name] or 0 for name in shared} == {name: settings[name] or 0 for name in shared}


def test_too_few_photos_and_open_sizes_are_refused(classifier: TorchClassifier) -> None:
    with pytest.raises(InputError, match="at least 10 photos, got 5"):
        harden(classifier, together([load_dataset("sample")], limit=5), THREAT)
    loose = TorchClassifier(resnet(channels=(8, 8, 8, 8)).eval(), Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3))
    with pytest.raises(InputError, match=r"needs a fixed input size.*\?resize=32x32"):
        harden(loose, together([load_dataset("sample")], limit=20), THREAT)


def test_the_original_can_be_asked_about_mirror_images_too(classifier: TorchClassifier) -> None:
    """What the copy is to say of a picture then does not depend on which way round it is."""
    photos = together([load_dataset("sample")])
    inputs = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for mirror in (False, True):
        work = HardeningStudent(classifier, photos, THREAT, HardenSettings(mirror=mirror), seed=0)
        with torch.inference_mode():
            same = torch.allclose(work.teacher(inputs), work.teacher(inputs.flip(-1)), atol=1e-4)
            logits = work.original(inputs) + work.original(inputs.flip(-1)) if mirror else 2 * work.original(inputs)
            assert torch.allclose(work.teacher(inputs), logits / 2, atol=1e-4)
        assert same == mirror


def test_features_are_kept_where_that_is_asked_for(classifier: TorchClassifier) -> None:
    """Of masked photos the last layer is given more nearly what it is given of whole ones."""
    photos = together([load_dataset("sample")], limit=200)

    def last(module: nn.Module) -> nn.Linear:
        return [m for m in module.modules() if isinstance(m, nn.Linear)][-1]

    head = last(classifier.module)
    inputs = torch.stack([classifier.prepare(photos.image(i)[None])[0] for i in range(64)])
    hidden = inputs.clone()
    hidden[:, :, 8:20, 8:20] = 0
    features: list[Tensor] = []
    apart = []
    for weight in (0.0, 20.0):
        settings = HardenSettings(epochs=4, batch=25, rate=1e-3, tries=1, every=4, features=weight)
        work = HardeningStudent(classifier, photos, THREAT, settings, seed=0)
        work.check(None, way=0.0)
        while not work.finished:
            work.train_epoch()
        done = work.averaged
        assert done(inputs).shape == (64, 10)
        hardened = last(done)
        assert torch.equal(hardened.weight, head.weight) == (weight > 0)  # the last layer stays as it is
        handles = [m.register_forward_pre_hook(lambda m, given: features.append(given[0])) for m in (head, hardened)]
        with torch.inference_mode():
            classifier.module(inputs)
            done(hidden)
        for handle in handles:
            handle.remove()
        unmasked, masked = features[-2:]
        apart.append(float(((unmasked - masked).square().sum(1) / unmasked.square().sum(1)).mean()))
    assert apart[1] < 0.95 * apart[0], apart


def test_frozen_layers_stay_as_they_are_whatever_is_around_the_network(classifier: TorchClassifier) -> None:
    around = inpainting(classifier)
    layers = list(dict.fromkeys(name.partition(".")[0] for name, _ in classifier.module.named_parameters()))
    photos, settings = together([load_dataset("sample")], limit=60), HardenSettings(epochs=1, batch=25, rate=1e-3)
    work = HardeningStudent(around, photos, THREAT, replace(settings, frozen=(layers[-1],)), seed=0)
    work.check(None, way=0.0)
    work.train_epoch()
    moved = {
        name.split(".")[1]
        for name, weights in work.module.named_parameters()
        if not torch.equal(weights, around.module.state_dict()[name])
    }
    assert moved == set(layers[:-1])
    with pytest.raises(InputError, match=f"no layer 'layer9' to freeze; the network has .*{layers[-1]}"):
        harden(around, photos, THREAT, settings=replace(settings, frozen=("layer9",)))
    for frozen, features in ((layers, 0.0), (layers[:-1], 1.0)):
        with pytest.raises(InputError, match=f"no layer is left to train with .*{frozen[-1]}.* frozen"):
            harden(around, photos, THREAT, settings=replace(settings, frozen=tuple(frozen), features=features))


def test_frozen_layers_have_the_names_that_the_network_gives_them() -> None:
    """One of its own may be called network, and two may share their weights."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.stem = nn.Linear(3, 3), nn.Linear(3, 3)
            self.tied = nn.Linear(3, 3, bias=False)
            self.tied.weight = self.stem.weight

    network = Nested()
    for frozen, left in (("network", ["stem.weight", "stem.bias"]), ("tied", ["stem.bias"])):
        _freeze(Inpainting(network), (frozen,))
        assert [name for name, weights in network.named_parameters() if weights.requires_grad] == left


def test_a_network_without_a_last_linear_layer_has_no_features_to_keep() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(inputs.mean((2, 3))).log_softmax(1)  # which features behind the logits would change

    photos, settings = together([load_dataset("sample")], limit=30), HardenSettings(epochs=1, features=1.0)
    for network in (Shares(), nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())):
        classifier = TorchClassifier(network.eval(), Preprocessing((32, 32), mean=(0.5,) * 3, std=(0.5,) * 3))
        with pytest.raises(InputError, match="does not end in a linear layer of 10 classes"):
            harden(classifier, photos, THREAT, settings=settings)
