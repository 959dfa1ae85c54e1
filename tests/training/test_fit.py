"""The fit loop on real images, small enough for a CPU."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.data import ArrayDataset, in_memory, load_dataset
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.builders import resnet
from patchcleanser.networks.inpainting import Inpainting
from patchcleanser.training import RECIPES, Cutout, GreedyCutout, Recipe, fit
from patchcleanser.training.fit import rate_at
from patchcleanser.training.selection import Selector, within_standard_error

QUICK = Recipe(
    epochs=6,
    batch=50,
    optimizer="sgd",
    rate=0.05,
    ema=0.9,
    shift=2,
    strength=0.2,
    clip=5.0,
    label_smoothing=0.05,
    cutout=GreedyCutout(2, 6, 9, inside=True, tries=2, share=0.5),
    greedy_from=0.5,
    holdout=0.1,
    precision="no",
)
NORM = {"preprocessing": Preprocessing(mean=(0.49, 0.48, 0.45), std=(0.25, 0.25, 0.26))}


@pytest.fixture(scope="module")
def images() -> ArrayDataset:
    return in_memory(load_dataset("sample"), (32, 32))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return resnet(layers=(1, 1, 1, 1), channels=(16, 24, 32, 48), stem_stride=2)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_the_whole_loop_learns_a_few_hundred_real_images(images: ArrayDataset, tmp_path: Path) -> None:
    recipe = replace(QUICK, epochs=40, rate=0.1, ema=0.0, shift=0, strength=0.0, cutout=Cutout(1, 3, 5), holdout=0.0)
    fitted = fit(network(), images, recipe, **NORM, out=tmp_path)
    assert fitted.history[0].accuracy < 0.3
    assert fitted.history[-1].accuracy > 0.9


def test_a_run_is_repeated_by_its_seed_and_changed_by_another(images: ArrayDataset, tmp_path: Path) -> None:
    recipe = replace(QUICK, epochs=2)
    runs = [
        weights(fit(network(), images, recipe, **NORM, out=tmp_path / str(i), seed=seed).module)
        for i, seed in enumerate((1, 1, 2))
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_frozen_norms_keep_the_statistics_that_training_would_change(images: ArrayDataset, tmp_path: Path) -> None:
    before = network().state_dict()
    for frozen in (True, False):
        recipe = replace(QUICK, epochs=1, ema=0.0, greedy_from=0.0, frozen_norms=frozen)
        after = fit(network(), images, recipe, **NORM, out=tmp_path / str(frozen)).module.state_dict()
        means = [name for name in before if name.endswith("running_mean")]
        assert means
        assert all(torch.equal(before[name], after[name]) for name in means) is frozen


def test_a_killed_run_goes_on_and_ends_like_an_unbroken_one(images: ArrayDataset, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def kill(done: float, epochs: int, text: str) -> None:
        if done == 5:
            raise KilledError

    unbroken = fit(network(), images, QUICK, **NORM, out=tmp_path / "a", every=2)
    with pytest.raises(KilledError):
        fit(network(), images, QUICK, **NORM, out=tmp_path / "b", every=2, on_progress=kill)
    epochs: list[float] = []
    resumed = fit(
        network(9),
        images,
        QUICK,
        **NORM,
        out=tmp_path / "b",
        every=2,
        on_progress=lambda done, n, text: epochs.append(done),
    )
    assert epochs == [2, 3, 4, 5, 6]  # quick epochs: the checkpoint was of the first
    assert torch.equal(weights(unbroken.module), weights(resumed.module))
    assert [e.loss for e in unbroken.history] == [e.loss for e in resumed.history]
    # A kill between the last epoch and writing the weights loses nothing either.
    again = fit(
        network(9), images, QUICK, **NORM, out=tmp_path / "b", on_progress=lambda done, n, text: epochs.append(done)
    )
    assert epochs == [2, 3, 4, 5, 6]
    assert torch.equal(weights(again.module), weights(unbroken.module))


def interrupted(images: ArrayDataset, out: Path, recipe: Recipe = QUICK) -> None:
    """Leave a checkpoint behind."""

    def stop(done: float, epochs: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(network(), images, recipe, **NORM, out=out, every=1, on_progress=stop)


def test_checkpoints_of_other_runs_are_refused(images: ArrayDataset, tmp_path: Path) -> None:
    interrupted(images, tmp_path)
    with pytest.raises(TrainingError, match=r"belongs to another run \(other recipe\)"):
        fit(network(), images, replace(QUICK, rate=0.01), **NORM, out=tmp_path)
    with pytest.raises(TrainingError, match=r"belongs to another run \(other seed\)"):
        fit(network(), images, QUICK, **NORM, out=tmp_path, seed=5)
    with pytest.raises(TrainingError, match=r"other data, images"):
        fit(network(), images.subset(np.arange(100)), QUICK, **NORM, out=tmp_path)
    with pytest.raises(TrainingError, match="another architecture"):
        fit(resnet(layers=(1, 1, 1, 1), channels=(8, 8, 8, 8)), images, QUICK, **NORM, out=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(TrainingError, match="is damaged"):
        fit(network(), images, QUICK, **NORM, out=tmp_path)


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_checkpoint(
    images: ArrayDataset, tmp_path: Path
) -> None:
    recipe = replace(QUICK, rate=1e9, clip=0.0)
    with pytest.raises(TrainingError, match=r"the loss became (nan|inf) in epoch \d; lower the rate"):
        fit(network(), images, recipe, **NORM, out=tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_the_log_tells_of_every_epoch_and_tensorboard_has_it_too(images: ArrayDataset, tmp_path: Path) -> None:
    fitted = fit(network(), images, replace(QUICK, epochs=3), **NORM, out=tmp_path, every=1)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert float(rows[2]["loss"]) == fitted.history[2].loss
    assert all(row["survival"] for row in rows)
    assert list((tmp_path / "tensorboard").iterdir())


def scores(*shares: float) -> tuple[Tensor, ...]:
    """What a Selector returns, for shares of 1,000 held-out images."""
    return tuple(torch.arange(1000) < 1000 * share for share in shares)


def test_the_epoch_kept_is_the_last_of_those_that_chance_cannot_tell_from_the_best(
    images: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survival = iter((0.5, 0.9, 0.88, 0.4))
    monkeypatch.setattr(Selector, "__call__", lambda self, model: scores(0.95, next(survival)))
    fitted = fit(network(), images, replace(QUICK, epochs=4, ema=0.0), **NORM, out=tmp_path, every=1)
    assert fitted.best.epoch == 3
    monkeypatch.setattr(Selector, "__call__", lambda self, model: scores(0.9, 0.9))
    third = fit(network(), images, replace(QUICK, epochs=4, ema=0.0), **NORM, out=tmp_path / "again", every=4)
    assert not torch.equal(weights(fitted.module), weights(third.module))  # which are the last epoch's


def test_the_epoch_kept_is_chosen_by_what_survives_masks_on_the_held_out_part(
    images: ArrayDataset, tmp_path: Path
) -> None:
    fitted = fit(network(), images, replace(QUICK, epochs=4, ema=0.0), **NORM, out=tmp_path, every=1)
    survival = [epoch.survival or 0.0 for epoch in fitted.history]
    close = [within_standard_error(share, max(survival), int(QUICK.holdout * len(images))) for share in survival]
    assert fitted.best.epoch == max(n for n, near in enumerate(close, 1) if near)


def test_of_equal_epochs_the_last_is_kept_and_named(
    images: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Selector, "__call__", lambda self, model: scores(0.5, 0.5))
    recipe = replace(QUICK, epochs=3, ema=0.0)
    fitted = fit(network(), images, recipe, **NORM, out=tmp_path, every=1)
    late = fit(network(), images, recipe, **NORM, out=tmp_path / "last", every=3)
    assert fitted.best.epoch == 3
    assert torch.equal(weights(fitted.module), weights(late.module))  # judged only after the last epoch


def test_a_teacher_pulls_the_answers_towards_its_own(images: ArrayDataset, tmp_path: Path) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[9.0] + [0.0] * 9]).repeat(len(x), 1)

    recipe = replace(QUICK, epochs=3, teacher_weight=1.0, ema=0.0)
    fitted = fit(network(), images, recipe, **NORM, out=tmp_path, teacher=TorchClassifier(Constant().eval()))
    pixels = torch.from_numpy(images.images[:50]).permute(0, 3, 1, 2).float() / 255
    assert (fitted.module(pixels).argmax(1) == 0).float().mean() > 0.9


def test_a_teacher_sees_images_at_its_own_size_and_in_its_own_colours(images: ArrayDataset, tmp_path: Path) -> None:
    inputs: list[Tensor] = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x)
            return torch.zeros(len(x), 10)

    own = Preprocessing(28, (24, 24), "bicubic", (0.0, 0.0, 0.0), (0.5, 0.5, 0.5))
    recipe = replace(QUICK, epochs=1, teacher_weight=0.5, strength=0.0)
    large = Preprocessing((48, 48), mean=(0.5, 0.5, 0.5), std=(0.1, 0.1, 0.1))
    teacher = TorchClassifier(Watching().eval(), own)
    fit(network(), images, recipe, preprocessing=large, out=tmp_path, teacher=teacher)
    assert {tuple(x.shape[1:]) for x in inputs} == {(3, 24, 24)}
    mean = torch.from_numpy(images.images).float().mean() / 255
    assert torch.cat(inputs).mean().item() == pytest.approx(
        2 * mean.item(), abs=0.05
    )  # nothing was cropped or taken off


@pytest.mark.parametrize("student", ["plain", "filling in"])
def test_a_network_that_fills_in_learns_with_the_worst_masks_and_may_teach(
    student: str, images: ArrayDataset, tmp_path: Path
) -> None:
    masks: list[Tensor] = []

    class Listening(Inpainting):
        def forward(self, inputs: Tensor) -> Tensor:
            masks.append(inputs[:, -1].detach())
            return super().forward(inputs)  # type: ignore[no-any-return]

    learner = network() if student == "plain" else Inpainting(network())
    cutout = GreedyCutout(2, 4, 8, inside=True, tries=2, share=1.0)
    recipe = replace(QUICK, epochs=1, teacher_weight=0.5, cutout=cutout)
    fitted = fit(learner, images, recipe, **NORM, out=tmp_path, teacher=TorchClassifier(Listening(network(1)).eval()))
    assert masks
    assert not any(hidden.any() for hidden in masks)  # a teacher sees the whole picture
    assert getattr(fitted.module, "mask_aware", False) == (student != "plain")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_data_that_round_trip_through_the_command_line(name: str) -> None:
    recipe = RECIPES[name]
    changed = recipe.changed({"epochs": "3", "cutout.count": "1", "rate": "0.5"})
    assert (changed.epochs, changed.cutout.count, changed.rate) == (3, 1, 0.5)
    for order in (1, -1):  # what belongs together is changed together
        sizes = [("cutout.smallest", "49"), ("cutout.largest", "84")][::order]
        assert recipe.changed(dict(sizes)).cutout.largest == 84
    assert changed.fingerprint != recipe.fingerprint == RECIPES[name].fingerprint
    assert recipe.to_dict()["cutout"]["kind"] == type(recipe.cutout).__name__


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epoch": "3"}, "a recipe has no setting 'epoch'; it has epochs"),
        ({"epochs": "many"}, "epochs takes a whole number, got 'many'"),
        ({"epochs": "0"}, "at least 1"),
        ({"optimizer": "foo"}, "optimizer is one of sgd, adamw, muon, got 'foo'"),
        ({"rate": "0"}, "a learning rate is above 0"),
        ({"guidance": "-1"}, "guidance is at least 0, got -1.0"),
        ({"cutout.size": "3"}, "no setting 'cutout.size'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RECIPES["paper"].changed(settings)


def test_rates_follow_their_schedules() -> None:
    paper = RECIPES["paper"]
    assert [rate_at(p, paper) for p in (0.0, 0.49)] == [1.0, 1.0]
    assert rate_at(0.5, paper) == pytest.approx(0.1)
    cycle = replace(QUICK, schedule="onecycle", warmup=0.2)
    assert rate_at(0.1, cycle) == pytest.approx(0.5)
    assert rate_at(0.2, cycle) == pytest.approx(1.0)
    assert rate_at(1.0, cycle) == pytest.approx(0.0)
