"""Uncertain labels go to a finer stage first, and are audited, bounded and never lost there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.small_networks import labels_of, make_classifier, photos
from patchcleanser import DoubleMasking, Threat, TorchClassifier
from patchcleanser.engine.fast.backends import AutocastBackend, Backend
from patchcleanser.engine.fast.calibration import ErrorBounds
from patchcleanser.engine.fast.cascade import FastEngine, Pending


class Lying(Backend):
    """Right during calibration, and then wrong with large margins."""

    resolution = 1e-6
    lies = False

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        return -100 * logits if self.lies else logits


class Fine(Backend):
    """Nearly float32."""

    resolution = 1e-6

    def logits(self, inputs: Tensor) -> Tensor:
        return self.classifier.checked_logits(inputs) * (1 + 1e-7)


class Coarse(AutocastBackend):
    """Half precision as far as labels can tell, without the time that a CPU may take for it."""

    def logits(self, inputs: Tensor) -> Tensor:
        self._check_unchanged()
        exact = self.classifier.checked_logits(inputs)
        return exact + 0.02 * torch.sin(1000 * exact)


def defense_with(finer: type[Backend], monkeypatch: pytest.MonkeyPatch) -> tuple[DoubleMasking, TorchClassifier]:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.FEW_LABELS", 4)
    classifier = make_classifier()
    defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision="fast")
    backend = Coarse(classifier, torch.bfloat16)
    defense.engine.candidates = [[backend, finer(classifier)]]  # type: ignore[attr-defined, call-arg]
    return defense, classifier


def calibrate_once(defense: DoubleMasking, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The refining backend, after the only calibration."""
    defense.calibrate(images)
    assert defense.engine.calibration.stages[1:]
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)
    return defense.engine.candidates[0][1]


def exact_defense(classifier: TorchClassifier) -> DoubleMasking:
    return DoubleMasking(classifier, Threat.square(5), masks=3)


def test_most_uncertain_labels_are_settled_by_the_next_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(60)
    defense, classifier = defense_with(Fine, monkeypatch)
    before, after = [], []
    refine = FastEngine._refine

    def counted(self: FastEngine, rows: Pending, number: int, clean: bool) -> Pending:
        refined = refine(self, rows, number, clean)
        before.append(int(rows.uncertain.sum()))
        after.append(int(refined.uncertain.sum()))
        return refined

    monkeypatch.setattr(FastEngine, "_refine", counted)
    labels = labels_of(defense, images)
    assert (labels == labels_of(exact_defense(classifier), images)).all()
    assert sum(before) > 20
    assert sum(after) < sum(before) / 10
    assert defense.engine.stats.settled.total() == sum(before) - sum(after)
    assert defense.engine.stats.rechecked < sum(before)  # in float32


def test_a_wrong_refining_stage_is_caught_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    images = photos(24)
    defense, classifier = defense_with(Lying, monkeypatch)
    calibrate_once(defense, images, monkeypatch).lies = True
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exact_defense(classifier), images)).all()


def surprising(self: Coarse, inputs: Tensor) -> Tensor:
    """Close calls move much further than during calibration."""
    exact = self.classifier.checked_logits(inputs)
    first, second = exact.topk(2).values.T
    moved = torch.where(first - second < 0.45, 0.5, 0.0)
    return exact.scatter_add(1, exact.topk(2).indices[:, 1:], moved[:, None])


@pytest.mark.parametrize("watched", [True, False])
def test_uncertain_labels_that_move_too_far_widen_the_bounds(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)
    images = photos(60)
    defense, classifier = defense_with(Fine, monkeypatch)
    calibrate_once(defense, images, monkeypatch)
    monkeypatch.setattr(Coarse, "logits", surprising)
    if not watched:
        monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.zeros(len(fast), dtype=torch.bool))
    same = labels_of(defense, images) == labels_of(exact_defense(classifier), images)
    assert same.all() == watched
    assert not defense.engine.calibration.given_up


def test_labels_that_move_too_far_again_and_again_are_computed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, classifier = defense_with(Fine, monkeypatch)
    calibrate_once(defense, images, monkeypatch)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.ones(len(fast), dtype=torch.bool))
    monkeypatch.setattr(ErrorBounds, "widen", lambda self, fast, finer: 0.0)
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exact_defense(classifier), images)).all()


class Slight(Lying):
    """Off by a tenth of what the coarse backend is."""

    def logits(self, inputs: Tensor) -> Tensor:
        exact = self.classifier.checked_logits(inputs)
        return exact + 0.002 * torch.sin(3000 * exact)


def test_only_the_bounds_of_the_stage_that_moved_too_far_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    images = photos(60)
    defense, classifier = defense_with(Slight, monkeypatch)
    calibrate_once(defense, images, monkeypatch)
    (stage,) = defense.engine.calibration.stages[1:]
    widened: list[ErrorBounds] = []
    widen = ErrorBounds.widen
    monkeypatch.setattr(
        ErrorBounds, "widen", lambda self, fast, finer: (widened.append(self), widen(self, fast, finer))[1]
    )
    narrow = {(label, torch.device("cpu")): torch.full((10,), 1e-4) for label in range(10)}
    monkeypatch.setattr(stage.bounds, "_by_label", narrow)
    labels = labels_of(defense, images)
    assert widened
    assert all(bounds is stage.bounds for bounds in widened)
    assert (labels == labels_of(exact_defense(classifier), images)).all()


def test_nothing_is_learnt_from_images_that_may_be_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, _ = defense_with(Fine, monkeypatch)
    calibrate_once(defense, images, monkeypatch)
    monkeypatch.setattr(Coarse, "logits", surprising)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: pytest.fail("used"))
    defense.predict(images)
    assert defense.engine.stats.rechecked + defense.engine.stats.settled.total() > 0  # some were uncertain


def test_cached_logits_are_probed_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(Fine, monkeypatch)
    logits = Coarse.logits
    learning = [True]

    def worse(self: Coarse, inputs: Tensor) -> Tensor:
        outputs = logits(self, inputs)
        return outputs if learning else outputs.roll(1, 1)

    monkeypatch.setattr(Coarse, "logits", worse)
    calibrate = type(defense.engine).calibrate
    monkeypatch.setattr(
        type(defense.engine), "calibrate", lambda self, states: (calibrate(self, states), learning.clear())[0]
    )
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    assert (labels == labels_of(exact_defense(classifier), images)).all()


def test_logits_computed_for_the_calibration_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, _ = defense_with(Fine, monkeypatch)
    monkeypatch.setattr(FastEngine, "_probe_sometimes", lambda self, pairs, logits, backend: None)
    sizes: list[int] = []
    logits = Coarse.logits
    monkeypatch.setattr(Coarse, "logits", lambda self, inputs: (sizes.append(len(inputs)), logits(self, inputs))[1])
    examined = defense.examine(images, [0] * len(images), maps=True)
    every, closest = sum(len(e.table.labels) for e in examined), 120 // 4
    # Close calls are computed to be chosen, and to be compared.
    assert every < sum(sizes) <= every + closest


class Careless(Backend):
    """Off by little during calibration, then wrong by no more than that, or NaN."""

    resolution = 1e-6
    number: float | None = None

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        second = logits.argsort(1)[:, -2:-1]
        if self.number is None:  # alternately, so that every class moves
            return logits + 0.05 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(logits)))
        near = logits.amax(1, keepdim=True) + 0.01
        return torch.full_like(logits, self.number) if self.number else logits.scatter(1, second, near)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_labels_that_stay_uncertain_are_computed_in_float32(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)
    images = photos(24)
    defense, classifier = defense_with(Careless, monkeypatch)
    calibrate_once(defense, images, monkeypatch).number = number
    assert (labels_of(defense, images) == labels_of(exact_defense(classifier), images)).all()
    assert defense.engine.stats.rechecked > 0


def test_an_interrupted_calibration_leaves_no_stage_that_was_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defense, _ = defense_with(Fine, monkeypatch)

    def interrupted(self: Fine, inputs: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Fine, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        defense.calibrate(photos(24))
    assert defense.engine.runner.sizes == {(32, 32)}
    assert not defense.engine.calibration.stages[1:]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_pending_labels_are_never_lost_whatever_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(20)
    defense, classifier = defense_with(Fine, monkeypatch)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)
    defense.engine.runner.chunk, defense.engine.runner.fixed_chunk = chunk, True
    examined = defense.examine(images, [0] * len(images), maps=True)
    labels = np.stack([e.table.labels for e in examined])
    assert (labels == labels_of(exact_defense(classifier), images)).all()
    stats = defense.engine.stats
    assert sum(e.table.rechecked for e in examined) == stats.rechecked > 0
    assert sum(e.table.audited for e in examined) == stats.audited
    assert stats.labels == labels.size  # each was judged, and drawn for the audit, once
