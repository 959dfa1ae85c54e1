"""Doubtful labels go by a finer way first: float32's products in pieces."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.engine.fast.backends import AutocastBackend, Backend, UnusableError
from patchcleanser.engine.fast.calibration import SAMPLE, ErrorBounds, closest_calls, draw_sample
from patchcleanser.engine.fast.cascade import FastEngine, Pending
from patchcleanser.engine.fast.split import SplitConv, SplitLinear, TripleTf32Backend, in_tf32, pieces
from patchcleanser.engine.float32 import exclusive_float32, strict_float32, strict_settings
from patchcleanser.engine.numerics import top2_margin


def photos(number: int) -> Tensor:
    sample = load_dataset("sample")
    return torch.stack([sample.image(i) for i in range(number)])


def test_pieces_add_up_and_the_first_is_what_tf32_sees() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    first, rest = pieces(numbers)
    assert torch.equal(first + rest, numbers)
    assert torch.equal(pieces(first)[0], first)
    assert (rest.abs() <= numbers.abs() * 2**-10).all()


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "resnetv2_50x1_bit", "resmlp_12_224"])
def test_a_network_in_pieces_says_what_it_says_in_float32(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.1)
    classifier = TorchClassifier(module, classes=10)
    inputs = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    way = TripleTf32Backend(classifier)
    with torch.inference_mode():
        exact, split = classifier.logits(inputs), way.logits(inputs)
    assert way._copy is not None
    assert any(isinstance(part, (SplitLinear, SplitConv)) for part in way._copy.module.modules())
    assert (split - exact).abs().max() < 1e-4 * exact.abs().max()
    assert not any(isinstance(part, (SplitLinear, SplitConv)) for part in module.modules())


class Lying(Backend):
    """Right while it is learnt from, and then wrong without a doubt."""

    resolution = 1e-6
    lies = False

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        return -100 * logits if self.lies else logits


class Coarse(AutocastBackend):
    """Half precision as far as labels can tell, without the time that a CPU may take for it."""

    def logits(self, inputs: Tensor) -> Tensor:
        self._check_unchanged()
        exact = self.classifier.checked_logits(inputs)
        return exact + 0.02 * torch.sin(1000 * exact)


def sketchy() -> TorchClassifier:
    """A network that takes no time, unsure of some images and sure of others."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()]
    head = nn.Linear(288, 10)
    nn.init.normal_(head.weight, std=1.0)
    module = nn.Sequential(nn.BatchNorm2d(3, affine=False), *layers, head)
    module.train()(photos(100))  # what is usual
    return TorchClassifier(module.eval(), classes=10)


def defense_with(finer: type[Backend], monkeypatch: pytest.MonkeyPatch) -> tuple[DoubleMasking, TorchClassifier]:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.FEW_LABELS", 4)
    classifier = sketchy()
    defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision="fast")
    way = Coarse(classifier, torch.bfloat16)
    defense.engine.candidates = [[way, finer(classifier)]]  # type: ignore[attr-defined, call-arg]
    return defense, classifier


def learnt(defense: DoubleMasking, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The finer way, after what is doubtful was learnt once and for all."""
    defense.calibrate(images)
    assert defense.engine.calibration.stages[1:]
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)
    return defense.engine.candidates[0][1]


def exactly(classifier: TorchClassifier) -> DoubleMasking:
    return DoubleMasking(classifier, Threat.square(5), masks=3)


def labels_of(defense: DoubleMasking, images: Tensor) -> np.ndarray:
    return np.stack([e.table.labels for e in defense.examine(images, [0] * len(images), maps=True)])


def test_what_is_doubtful_is_settled_by_the_finer_way_and_almost_nothing_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(60)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    before, after = [], []
    refine = FastEngine._refine

    def counted(self: FastEngine, rows: Pending, number: int, clean: bool) -> Pending:
        refined = refine(self, rows, number, clean)
        before.append(int(rows.uncertain.sum()))
        after.append(int(refined.uncertain.sum()))
        return refined

    monkeypatch.setattr(FastEngine, "_refine", counted)
    labels = labels_of(defense, images)
    assert (labels == labels_of(exactly(classifier), images)).all()
    assert sum(before) > 20
    assert sum(after) < sum(before) / 10
    assert defense.engine.stats.settled.total() == sum(before) - sum(after)
    assert defense.engine.stats.rechecked < sum(before)  # in float32


def test_a_finer_way_that_is_wrong_is_caught_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    images = photos(24)
    defense, classifier = defense_with(Lying, monkeypatch)
    learnt(defense, images, monkeypatch).lies = True
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exactly(classifier), images)).all()


def surprising(self: Coarse, inputs: Tensor) -> Tensor:
    """Close calls move much further than what was learnt from."""
    exact = self.classifier.checked_logits(inputs)
    first, second = exact.topk(2).values.T
    moved = torch.where(first - second < 0.45, 0.5, 0.0)
    return exact.scatter_add(1, exact.topk(2).indices[:, 1:], moved[:, None])


@pytest.mark.parametrize("watched", [True, False])
def test_doubtful_labels_that_move_too_far_put_more_of_them_in_doubt(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)
    images = photos(60)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    learnt(defense, images, monkeypatch)
    monkeypatch.setattr(Coarse, "logits", surprising)
    if not watched:
        monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.zeros(len(fast), dtype=torch.bool))
    same = labels_of(defense, images) == labels_of(exactly(classifier), images)
    assert same.all() == watched
    assert not defense.engine.calibration.given_up


def test_labels_that_move_too_far_again_and_again_are_computed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    learnt(defense, images, monkeypatch)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.ones(len(fast), dtype=torch.bool))
    monkeypatch.setattr(ErrorBounds, "widen", lambda self, fast, finer: 0.0)
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exactly(classifier), images)).all()


class Slight(Lying):
    """Off by a tenth of what the coarse way is."""

    def logits(self, inputs: Tensor) -> Tensor:
        exact = self.classifier.checked_logits(inputs)
        return exact + 0.002 * torch.sin(3000 * exact)


def test_what_moved_too_far_by_a_finer_way_is_learnt_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    images = photos(60)
    defense, classifier = defense_with(Slight, monkeypatch)
    learnt(defense, images, monkeypatch)
    (step,) = defense.engine.calibration.stages[1:]
    widened: list[ErrorBounds] = []
    widen = ErrorBounds.widen
    monkeypatch.setattr(
        ErrorBounds, "widen", lambda self, fast, finer: (widened.append(self), widen(self, fast, finer))[1]
    )
    narrow = {(label, torch.device("cpu")): torch.full((10,), 1e-4) for label in range(10)}
    monkeypatch.setattr(step.bounds, "_by_label", narrow)
    labels = labels_of(defense, images)
    assert widened
    assert all(bounds is step.bounds for bounds in widened)
    assert (labels == labels_of(exactly(classifier), images)).all()


def test_what_somebody_sends_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, _ = defense_with(TripleTf32Backend, monkeypatch)
    learnt(defense, images, monkeypatch)
    monkeypatch.setattr(Coarse, "logits", surprising)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: pytest.fail("looked at"))
    defense.predict(images)
    assert defense.engine.stats.rechecked + defense.engine.stats.settled.total() > 0  # some were in doubt


def test_close_calls_are_the_closest_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    defense, _ = defense_with(TripleTf32Backend, monkeypatch)
    (group,) = defense._groups(photos(24))
    sample, pool = draw_sample(group, np.random.default_rng(0))
    pairs = [{(s, u) for s, u in zip(piece.which, piece.unions, strict=True)} for piece in (sample, pool)]
    assert not pairs[0] & pairs[1]
    with torch.inference_mode():
        logits = defense.engine.exact.logits(pool)
    margins = top2_margin(logits)
    chosen = closest_calls(pool, [logits])
    told = {(s, u): margin for s, u, margin in zip(pool.which, pool.unions, margins.tolist(), strict=True)}
    most = max(told[pair] for pair in zip(chosen.which, chosen.unions, strict=True))
    assert len(chosen) == len(pool) // 4
    assert sum(margin <= most for margin in told.values()) == len(chosen)


def test_every_size_of_image_is_in_the_sample() -> None:
    defense = DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.square(5), masks=3, precision="fast")
    few, many = torch.rand(3, 40, 40), torch.rand(3, 32, 32)
    subjects = [defense.image_state(image) for image in [few, *[many] * 599]]
    for ordered in (subjects, subjects[::-1]):
        sample, _ = draw_sample(ordered, np.random.default_rng(0))
        assert {tuple(ordered[s].pixels.shape) for s in sample.which} == {(3, 40, 40), (3, 32, 32)}
        assert SAMPLE // 2 <= len(sample) <= SAMPLE // 2 + 2


def test_a_way_that_answers_otherwise_alone_is_found_out_before_what_it_said_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    logits = Coarse.logits
    learning = [True]

    def worse(self: Coarse, inputs: Tensor) -> Tensor:
        found = logits(self, inputs)
        return found if learning else found.roll(1, 1)

    monkeypatch.setattr(Coarse, "logits", worse)
    calibrate = type(defense.engine).calibrate
    monkeypatch.setattr(
        type(defense.engine), "calibrate", lambda self, subjects: (calibrate(self, subjects), learning.clear())[0]
    )
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exactly(classifier), images)).all()


def test_what_was_computed_while_learning_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, _ = defense_with(TripleTf32Backend, monkeypatch)
    monkeypatch.setattr(FastEngine, "_probe_sometimes", lambda self, pairs, logits, backend: None)
    sizes: list[int] = []
    logits = Coarse.logits
    monkeypatch.setattr(Coarse, "logits", lambda self, inputs: (sizes.append(len(inputs)), logits(self, inputs))[1])
    found = defense.examine(images, [0] * len(images), maps=True)
    every, closest = sum(len(e.table.labels) for e in found), 120 // 4
    # Close calls are computed to be chosen, and to be compared.
    assert every < sum(sizes) <= every + closest


class Careless(Backend):
    """Off by little while it is learnt from, then wrong by no more than that, or no number at all."""

    resolution = 1e-6
    number: float | None = None

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        second = logits.argsort(1)[:, -2:-1]
        if self.number is None:  # alternately, so that every class is seen to move
            return logits + 0.05 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(logits)))
        near = logits.amax(1, keepdim=True) + 0.01
        return torch.full_like(logits, self.number) if self.number else logits.scatter(1, second, near)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_what_is_doubtful_for_the_finer_way_too_is_computed_in_float32(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)
    images = photos(24)
    defense, classifier = defense_with(Careless, monkeypatch)
    learnt(defense, images, monkeypatch).number = number
    assert (labels_of(defense, images) == labels_of(exactly(classifier), images)).all()
    assert defense.engine.stats.rechecked > 0


def test_what_overflows_in_half_precision_never_goes_by_the_finer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, classifier = defense_with(Lying, monkeypatch)
    learnt(defense, images, monkeypatch).lies = True
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)
    monkeypatch.setattr(Coarse, "logits", lambda self, inputs: torch.full((len(inputs), 10), torch.inf))
    monkeypatch.setattr(FastEngine, "_probe_sometimes", lambda self, pairs, logits, backend: None)
    assert (labels_of(defense, images) == labels_of(exactly(classifier), images)).all()


def test_while_another_thread_computes_in_float32_doubtful_labels_are_exact_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    learnt(defense, images, monkeypatch)
    with strict_float32(classifier.device):  # as if another thread were there
        labels = labels_of(defense, images)
    assert defense.engine.stats.settled.total() == 0
    assert (labels == labels_of(exactly(classifier), images)).all()
    labels_of(defense, images)
    assert defense.engine.stats.settled.total() > 0


def test_where_there_is_no_room_for_it_labels_are_exact_ones_and_chunks_stay_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)

    def full(self: SplitConv, inputs: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SplitConv, "forward", full)
    labels = labels_of(defense, images)
    assert defense.engine.ready
    assert not defense.engine.calibration.stages[1:]
    assert defense.engine.runner.chunk == 512
    assert (labels == labels_of(exactly(classifier), images)).all()


def test_a_finer_way_that_is_no_faster_than_float32_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    defense.engine._pays[defense.engine.candidates[0][1]] = False
    monkeypatch.setattr(TripleTf32Backend, "refresh", lambda self: False)
    labels = labels_of(defense, images)
    assert not defense.engine.calibration.stages[1:]
    assert defense.engine.stats.settled.total() == 0
    assert defense.engine.stats.rechecked > 0
    assert (labels == labels_of(exactly(classifier), images)).all()


def test_weights_that_change_are_noticed() -> None:
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    way = TripleTf32Backend(classifier)
    way.logits(photos(1))
    with torch.no_grad():
        next(classifier.module.parameters()).mul_(2)
    with pytest.raises(UnusableError, match="changed since it was calibrated"):
        way.logits(photos(1))


def test_a_network_without_products_has_no_finer_way() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(UnusableError, match="no layer whose products could be split"):
        TripleTf32Backend(TorchClassifier(module, classes=3)).logits(photos(1))


def test_an_interruption_while_a_finer_way_is_learnt_leaves_nothing_trusted_that_was_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defense, _ = defense_with(TripleTf32Backend, monkeypatch)

    def interrupted(self: TripleTf32Backend, inputs: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(TripleTf32Backend, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        defense.calibrate(photos(24))
    assert defense.engine.runner.sizes == {(32, 32)}
    assert not defense.engine.calibration.stages[1:]


def test_nobody_else_computes_in_float32_while_products_are_short() -> None:
    device, order = torch.device("cpu"), []

    def other() -> None:
        with strict_float32(device):
            order.append("other")

    with exclusive_float32(device) as granted, in_tf32():
        assert granted
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("alone")
    thread.join(10)
    assert order == ["alone", "other"]


def test_short_products_are_refused_while_somebody_computes_in_float32() -> None:
    device = torch.device("cpu")
    with strict_float32(device), exclusive_float32(device) as granted:
        assert not granted
        with pytest.raises(RuntimeError, match="other threads"), in_tf32():
            pass
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    with strict_float32(device), pytest.raises(UnusableError, match="another thread"):
        TripleTf32Backend(classifier).logits(photos(1))


def test_the_programs_settings_come_back() -> None:
    def settings() -> list[Any]:
        return [getattr(setting.owner, setting.name) for setting in strict_settings()]

    before = settings()
    with exclusive_float32(torch.device("cpu")):
        plain = settings()
        with in_tf32():
            assert settings() != plain
        assert settings() == plain == [setting.value for setting in strict_settings()]
    assert settings() == before


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_what_waits_to_be_computed_again_is_never_lost_whatever_the_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(20)
    defense, classifier = defense_with(TripleTf32Backend, monkeypatch)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)
    defense.engine.runner.chunk, defense.engine.runner.fixed_chunk = chunk, True
    found = defense.examine(images, [0] * len(images), maps=True)
    labels = np.stack([e.table.labels for e in found])
    assert (labels == labels_of(exactly(classifier), images)).all()
    stats = defense.engine.stats
    assert sum(e.table.rechecked for e in found) == stats.rechecked > 0
    assert sum(e.table.audited for e in found) == stats.audited
    assert stats.labels == labels.size  # every one was looked at, and drawn for the audit, once
