"""Double-masking class by class: against Algorithm 1 on each class, and bounds against counting by hand."""

import numpy as np
import pytest

from patchcleanser import MaskSet, Threat, Window
from patchcleanser.core.algorithms import double_masking
from patchcleanser.core.geometry import Size
from patchcleanser.core.multilabel import (
    Counts,
    ScoreBounds,
    ScoreTable,
    certify_classes,
    double_masking_of_classes,
    thresholds_of,
)

THREATS = ["2", "1x3", "any:4", "any:2"]
SIZE: Size = (6, 7)


def mask_set(threat: Threat, masks: int = 3) -> MaskSet:
    return MaskSet.build(threat, image=SIZE, masks=masks)


def random_scores(masks: MaskSet, seed: int, classes: int = 20) -> np.ndarray:
    """Scores by union; each class is nearly always above 0, nearly always below it, or anything."""
    random = np.random.default_rng(seed)
    centers = random.choice([-1.5, 0.0, 1.5], size=classes)
    scores = centers + random.normal(0, 0.7, (len(masks.unions), classes))
    scores[random.random(scores.shape) < 0.02] = np.nan
    return np.asarray(np.round(scores, 1), dtype=np.float32)  # so that some are equal, also to thresholds


def answer_by_algorithm_1(scores: np.ndarray, index: np.ndarray, threshold: float) -> tuple[int, str]:
    """For one class."""
    labels = (scores >= threshold).astype(int)
    verdict = double_masking(list(labels[: len(index)]), lambda i: list(labels[index[i]]))
    return verdict.label, verdict.case.value


@pytest.mark.parametrize("seed", range(8))
def test_all_classes_at_once_are_answered_as_each_class_by_algorithm_1(seed: int) -> None:
    masks = mask_set(Threat.parse(THREATS[seed % 4]), masks=2 + seed % 2)
    scores, index = random_scores(masks, seed), masks.unions.index
    answers = double_masking_of_classes(scores >= 0.1, index)
    expected = [answer_by_algorithm_1(column, index, 0.1) for column in scores.T]
    assert [(int(p), c.value) for p, c in zip(answers.present, answers.cases, strict=True)] == expected


def test_every_case_occurs_on_random_tables() -> None:
    masks = mask_set(Threat.square(2))
    tables = [random_scores(masks, seed) >= 0.1 for seed in range(40)]
    cases = {case.value for each in tables for case in double_masking_of_classes(each, masks.unions.index).cases}
    assert cases == {"agreed", "disagreer", "majority"}


@pytest.mark.parametrize("seed", range(8))
def test_a_class_is_answered_just_if_its_defended_score_reaches_the_threshold(seed: int) -> None:
    masks = mask_set(Threat.parse(THREATS[seed % 4]), masks=2 + seed % 2)
    scores, index = random_scores(masks, seed), masks.unions.index
    defended = ScoreBounds.of(scores, index).defended
    for threshold in np.unique(np.append(scores[np.isfinite(scores)], [-9, 9])).astype(np.float32):
        answers = double_masking_of_classes(scores >= threshold, index).present
        assert (answers == (defended >= threshold)).all()


def every_placement(threat: Threat) -> list[Window]:
    room = threat.room(SIZE)
    return [
        Window(top, left, h, w)
        for h, w in threat.shapes(SIZE)
        for top in range(room.top, room.bottom - h + 1)
        for left in range(room.left, room.right - w + 1)
    ]


def guaranteed(scores: np.ndarray, masks: MaskSet, patch: Window, threshold: float, value: bool) -> bool:
    """Whether some mask that hides the patch has a row of one class that is the value throughout, by definition."""
    hiding = [i for i, mask in enumerate(masks.masks) if any(window.contains(patch) for window in mask)]
    return any(all((scores[u] >= threshold) == value for u in masks.unions.index[i]) for i in hiding)


@pytest.mark.parametrize("text", THREATS)
def test_certificates_count_what_is_guaranteed_at_the_worst_placement(text: str) -> None:
    threat = Threat.parse(text)
    masks = mask_set(threat)
    for seed in range(5):
        table = ScoreTable(masks, np.full(20, 0.1, dtype=np.float32))
        table.write(np.arange(len(masks.unions)), np.nan_to_num(random_scores(masks, seed), nan=-np.inf))
        truth = np.random.default_rng(seed).random(20) < 0.4
        right = np.array(
            [
                [guaranteed(table.scores[:, c], masks, patch, 0.1, bool(truth[c])) for c in range(20)]
                for patch in every_placement(threat)
            ]
        )
        certificate = certify_classes(table, threat, truth, maps=True)
        assert certificate.true_positives == (right & truth).sum(axis=1).min()
        assert certificate.false_positives == (~right & ~truth).sum(axis=1).max()
        assert certificate.certified == tuple(np.flatnonzero(truth & right.all(axis=0)))
        assert certificate.possible == tuple(np.flatnonzero(~truth & ~right.all(axis=0)))
        weak = np.concatenate([each.ravel() for each in (certificate.weak or {}).values()])
        assert weak.tolist() == (~right).sum(axis=1).tolist()
        assert certificate.failing_placement is not None  # random tables are weak somewhere


def bounds_of(scores: np.ndarray, masks: MaskSet, threat: Threat, truth: np.ndarray) -> tuple[Counts, Counts]:
    bounds, thresholds = ScoreBounds.of(scores, masks.unions.index), np.array([[-0.5], [0.1], [0.9]], dtype=np.float32)
    placed = bounds.placed(masks.cover(threat).hides)
    return placed.counts(truth, thresholds), bounds.each_mask().counts(truth, thresholds)


def with_larger_masks(threat: Threat) -> MaskSet:
    """The masks of two grids: most placements are hidden by several of them."""
    return MaskSet(SIZE, mask_set(threat, masks=3).masks + mask_set(threat, masks=2).masks)


@pytest.mark.parametrize("text", THREATS)
def test_the_bound_by_placements_is_at_least_as_tight_as_the_one_that_fixes_a_mask(text: str) -> None:
    threat, tighter = Threat.parse(text), 0
    masks = with_larger_masks(threat)
    for seed in range(25):
        truth = np.random.default_rng(seed).random(20) < 0.4
        here, one_mask = bounds_of(random_scores(masks, seed), masks, threat, truth)
        assert (here.true >= one_mask.true).all()
        assert (here.false <= one_mask.false).all()
        tighter += int((here.true > one_mask.true).any() or (here.false < one_mask.false).any())
    assert tighter >= 5


@pytest.mark.parametrize("text", ["2", "1x3"])
def test_both_bounds_are_equal_where_each_mask_hides_some_placement_alone(text: str) -> None:
    """So it is with the paper's masks: none of them can be left out."""
    threat = Threat.parse(text)
    masks = mask_set(threat)
    assert (masks.cover(threat).hides.sum(axis=1) == 1).all()
    for seed in range(10):
        truth = np.random.default_rng(seed).random(20) < 0.4
        here, one_mask = bounds_of(random_scores(masks, seed), masks, threat, truth)
        assert (here.true.tolist(), here.false.tolist()) == (one_mask.true.tolist(), one_mask.false.tolist())


def test_a_mask_that_loses_a_class_costs_nothing_where_another_one_hides_all_that_it_hides() -> None:
    masks = MaskSet((1, 3), ((Window(0, 0, 1, 1),), (Window(0, 0, 1, 2),), (Window(0, 2, 1, 1),)))
    scores = np.full((len(masks.unions), 1), 1.0, dtype=np.float32)
    scores[0] = -1.0  # under the first mask alone
    here, one_mask = bounds_of(scores, masks, Threat.square(1), np.array([True]))
    assert (here.true.tolist(), one_mask.true.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_classes_counted_together_are_bounded_tighter_than_each_at_its_own_worst_placement() -> None:
    threat, tighter = Threat.square(2), 0
    masks, thresholds = mask_set(threat), np.array([[0.1]], dtype=np.float32)
    for seed in range(25):
        truth = np.random.default_rng(seed).random(20) < 0.4
        placed = ScoreBounds.of(random_scores(masks, seed), masks.unions.index).placed(masks.cover(threat).hides)
        together, apart = placed.counts(truth, thresholds), placed.each_class().counts(truth, thresholds)
        assert together.true[0] >= apart.true[0]
        assert together.false[0] <= apart.false[0]
        tighter += int(together.true[0] > apart.true[0])
    assert tighter >= 5


def test_nan_is_never_presence_and_always_may_be_absence() -> None:
    masks = mask_set(Threat.square(2))
    scores = np.full((len(masks.unions), 1), np.nan, dtype=np.float32)
    bounds = ScoreBounds.of(scores, masks.unions.index)
    assert bounds.defended.tolist() == [-np.inf]
    placed = bounds.placed(masks.cover(Threat.square(2)).hides)
    assert placed.right(np.array([False]), thresholds_of([0.5], logits=True)).all()


def test_thresholds_of_logits_are_those_of_their_probabilities() -> None:
    assert thresholds_of([0.1, 0.9], logits=False).tolist() == pytest.approx([0.1, 0.9])
    assert (1 / (1 + np.exp(-thresholds_of([0.1, 0.9], logits=True)))).tolist() == pytest.approx([0.1, 0.9])
