"""Double-masking for classifiers whose classes may hold together, class by class on one table of scores.

A class is present if its score is at least its threshold. What a patch can change is bounded for each class, each
placement and all thresholds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.results import Case, Result
from patchcleanser.core.threats import Threat

Bools = NDArray[np.bool_]
Scores = NDArray[np.float32]


class ScoreTable(LabelTable):
    """The scores of one image by union of two masks and class; a label of 0 says that a union's scores are there."""

    def __init__(self, mask_set: MaskSet, thresholds: Scores) -> None:
        super().__init__(mask_set)
        self.thresholds = thresholds
        self._scores: Scores | None = None

    def anew(self) -> ScoreTable:
        return ScoreTable(self.mask_set, self.thresholds)

    @property
    def scores(self) -> Scores:
        """[unions + 1, classes]; the last entry is that of the unmasked image."""
        return np.empty((len(self.labels), 0), dtype=np.float32) if self._scores is None else self._scores

    def write(self, unions: NDArray[np.intp], scores: Scores) -> None:
        """Keep the scores [unions, classes] of some unions."""
        if self._scores is None:
            self._scores = np.full((len(self.labels), scores.shape[1]), np.nan, dtype=np.float32)
        self._scores[unions] = scores
        self.labels[unions] = 0
        self.margins[unions] = np.abs(scores - self.thresholds).min(axis=1)

    @property
    def decisions(self) -> Bools:
        """[unions + 1, classes]: whether the class is present; False where nothing is known yet."""
        present: Bools = self.scores >= self.thresholds
        return present


@dataclass(frozen=True)
class ClassAnswers:
    """What Algorithm 1 answers for each class."""

    present: Bools
    """[classes]."""
    cases: tuple[Case, ...]


def disagreeing(ones: Bools) -> Bools:
    """[masks, classes]: the masks whose decision is not the majority's; of two that are as many, presence."""
    disagrees: Bools = ones != _majority(ones)
    return disagrees


def _majority(ones: Bools) -> Bools:
    majority: Bools = 2 * ones.sum(axis=0) >= len(ones)
    return majority


def double_masking_of_classes(decisions: Bools, index: NDArray[np.int32]) -> ClassAnswers:
    """Algorithm 1 for every class, from the decisions [unions, classes]; `index` is that of the unions.

    Only one-mask decisions and the rows of masks that disagree for some class are read.

    >>> decisions = np.array([[1, 1], [1, 0], [1, 0]], dtype=bool)  # two masks, and the union of both
    >>> answers = double_masking_of_classes(decisions, np.array([[0, 2], [2, 1]]))
    >>> answers.present.tolist(), [case.value for case in answers.cases]
    ([True, False], ['agreed', 'disagreer'])
    """
    ones = decisions[: len(index)]
    majority, disagrees = _majority(ones), disagreeing(ones)
    wins = np.zeros(decisions.shape[1], dtype=bool)
    for mask in np.flatnonzero(disagrees.any(axis=1)):
        wins |= disagrees[mask] & (decisions[index[mask]] == ones[mask]).all(axis=0)
    undecided: Bools = np.any(disagrees, axis=0)
    cases = [
        Case.DISAGREER if win else Case.MAJORITY if some else Case.AGREED
        for win, some in zip(wins, undecided, strict=True)
    ]
    return ClassAnswers(majority ^ wins, tuple(cases))


@dataclass(frozen=True, eq=False)
class ScoreBounds:
    """What all scores under two masks say of an image: the defended score of each class, and what bounds it.

    *A class is in the answer of Algorithm 1 at threshold t just if t is at most its defended score.* Let s(i, j) be
    the scores of the class under masks i and j, low(i) the least of s(i, j) over all j, high(i) the largest, A the
    largest low(i) and B the smallest high(i). Then A ≤ B, since low(i) ≤ s(i, j) ≤ high(j). Let m be the largest
    threshold at which the majority of the s(i, i) is presence. The defended score is m, moved into [A, B].
    Proof. Row i is presence throughout just if t ≤ low(i), and absence throughout just if t > high(i). If t ≤ m, the
    majority is presence and disagreers with a unanimous row are the i with t > high(i); so the answer is presence just
    if t ≤ B. If t > m, it is presence just if some row is presence throughout, so just if t ≤ A. Together: t ≤ m and
    t ≤ B, or t ≤ A. As A ≤ B, this is t ≤ max(A, min(m, B)).
    """

    low: Scores
    """[masks, classes]: the least score in a mask's row."""
    high: Scores
    """[masks, classes]: the largest."""
    ones: Scores
    """[masks, classes]: the one-mask scores."""

    @classmethod
    def of(cls, scores: Scores, index: NDArray[np.int32]) -> ScoreBounds:
        """From the scores [unions, classes] under all unions of two masks; NaN counts as -inf."""
        scores = np.where(np.isnan(scores), -np.inf, scores).astype(np.float32)
        rows = [scores[row] for row in index]
        low, high = np.stack([row.min(axis=0) for row in rows]), np.stack([row.max(axis=0) for row in rows])
        return cls(low, high, scores[: len(index)])

    @property
    def defended(self) -> Scores:
        """[classes]: the defended scores."""
        half = len(self.ones) // 2  # of an even number of masks, half suffice for presence
        median = np.sort(self.ones, axis=0)[half]
        defended: Scores = np.maximum(self.low.max(axis=0), np.minimum(median, self.high.min(axis=0)))
        return defended

    def placed(self, hides: Bools) -> PlacedBounds:
        """The bounds at placements, from which masks hide each [placements, masks].

        *If an image differs from this one only where the patch is, its defended scores are within the bounds.*
        Proof. Let mask i hide the placement. Under i and any j both images look alike, and a score is a function of
        what is visible. So low(i) and high(i) are the same for both. The defended score of the attacked image is at
        least its A, so at least low(i); and at most its B, so at most high(i). This holds for every mask that hides the
        placement: so for the largest low and the smallest high of these.

        At one threshold this is the row certificate of core.algorithms.certification_flow for the two labels of one
        class, where the threat is this placement alone (proofs/DoubleMasking.v: double_masking_keeps_the_label,
        proofs/MultiLabel.v: a_guaranteed_class_keeps_its_answer).
        """
        low = np.full((len(hides), self.low.shape[1]), -np.inf, dtype=np.float32)
        high = np.full_like(low, np.inf)
        for place, masks in enumerate(hides):
            if masks.any():
                low[place], high[place] = self.low[masks].max(axis=0), self.high[masks].min(axis=0)
        return PlacedBounds(low, high)

    def each_mask(self) -> PlacedBounds:
        """The bounds that each mask gives by itself, as if a placement were hidden by one mask only.

        The worst of them, as PatchDEMUX (2025) counts, is at most as tight as the worst placement, since every
        placement is hidden by some mask. Both are equal if each mask hides some placement alone, as the paper's do.
        """
        return PlacedBounds(self.low, self.high)


@dataclass(frozen=True, eq=False)
class PlacedBounds:
    """Between which scores the defended scores of an attacked image lie, [placements, classes]."""

    low: Scores
    high: Scores

    def right(self, truth: Bools, thresholds: Scores) -> Bools:
        """[placements, classes]: whether no patch at the placement makes the answer for the class wrong."""
        right: Bools = np.where(truth, self.low >= thresholds, self.high < thresholds)
        return right

    def each_class(self) -> PlacedBounds:
        """The bounds of each class at its own worst placement: what holds without looking at classes together."""
        return PlacedBounds(self.low.min(axis=0)[None], self.high.max(axis=0)[None])

    def counts(self, truth: Bools, thresholds: Scores) -> Counts:
        """At least so many true positives and at most so many false ones, at thresholds [n, classes or 1].

        At a placement every true class that is bound to be present is a true positive, and only absent classes that are
        not bound to be absent can be false positives. The fewest and the most over all placements hold for every
        attack, each by itself: the placement of the fewest true positives need not be that of the most false ones.

        Summed over images they bound precision and recall. Recall is TP / positives. Precision TP / (TP + FP) grows
        with TP and falls with FP, so its value at the bounds is the least that any attack leaves
        (proofs/MultiLabel.v: the_worst_placement_bounds_true_positives,
        proofs/MultiLabel.v: the_worst_placement_bounds_false_positives, proofs/MultiLabel.v: precision_is_monotone).
        """
        right = [self.right(truth, each) for each in np.asarray(thresholds)]
        present = [int((each & truth).sum(axis=1).min()) for each in right]
        false = [int((~each & ~truth).sum(axis=1).max()) for each in right]
        return Counts(np.array(present), np.array(false))


@dataclass(frozen=True, eq=False)
class Counts:
    """True and false positives of one image, [thresholds]."""

    true: NDArray[np.int64]
    false: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Scores, truth: Bools, thresholds: Scores) -> Counts:
        """Those of scores [classes] at thresholds [n, classes or 1]."""
        present = scores >= thresholds
        return cls((present & truth).sum(axis=1), (present & ~truth).sum(axis=1))


@dataclass(frozen=True, repr=False)
class MultiLabelVerdict(Result):
    """The classes that are present in one image, which may carry a patch. It is never a certificate."""

    present: tuple[int, ...]
    cases: tuple[Case, ...] = field(repr=False)
    """How each class was decided, present or not."""
    classifications: int


@dataclass(frozen=True, repr=False)
class MultiLabelCertificate(Result):
    """What no patch of the threat can change in the answer for a clean image with its true classes."""

    present: tuple[int, ...]
    """The true classes."""
    certified: tuple[int, ...]
    """Those of them that stay in the answer, wherever the patch is and whatever it shows."""
    possible: tuple[int, ...] = field(repr=False)
    """Absent classes that some patch may bring into the answer: it is not proved that none does."""
    true_positives: int
    """At least so many true classes are in the answer at once."""
    false_positives: int
    """At most so many absent classes are in the answer at once."""
    failing_placement: tuple[Window, ...] | None
    """Where the most classes are not proved right; None if all are, everywhere."""
    margin: float
    """The smallest distance of a score from its threshold, among all that were looked at."""
    classifications: int
    weak: dict[Size, NDArray[np.int64]] | None = field(default=None, repr=False, hash=False, compare=False)
    """Per patch shape and top-left corner [rows, columns] the number of classes not proved right; None if not asked."""

    @property
    def false_negatives(self) -> int:
        """At most so many true classes are missing at once."""
        return len(self.present) - self.true_positives


def certify_classes(table: ScoreTable, threat: Threat, truth: Bools, *, maps: bool = False) -> MultiLabelCertificate:
    """The certificate of a clean image, from the scores under all unions of two masks.

    Of the placements that the mask set's cover lists, one is at least as hard as any other: every mask that hides the
    listed one hides that one, too, so there the bounds are as tight or tighter (core/cover.py). With several patches
    the listed placements are those of all patches at once (proofs/MultiLabel.v:
    a_class_right_everywhere_keeps_its_answer).
    """
    masks = table.mask_set
    masks.require_cover(threat)
    bounds = ScoreBounds.of(table.scores[:UNMASKED], masks.unions.index)
    cover = masks.cover(threat)
    placed = bounds.placed(cover.hides)
    right, counts = placed.right(truth, table.thresholds), placed.counts(truth, table.thresholds[None])
    everywhere, worst = right.all(axis=0), int(right.sum(axis=1).argmin())
    return MultiLabelCertificate(
        present=_numbers(truth),
        certified=_numbers(truth & everywhere),
        possible=_numbers(~truth & ~everywhere),
        true_positives=int(counts.true[0]),
        false_positives=int(counts.false[0]),
        failing_placement=None if everywhere.all() else cover.placements[worst],
        margin=table.margin,
        classifications=table.spent,
        weak=weak_places(masks, threat, bounds.each_mask().right(truth, table.thresholds)) if maps else None,
    )


def weak_places(masks: MaskSet, threat: Threat, right: Bools) -> dict[Size, NDArray[np.int64]]:
    """Per patch shape and corner the number of classes that no mask proves there; `right` is [masks, classes].

    Classes that the same masks prove are weak at the same places.
    """
    patterns, counts = np.unique(right, axis=1, return_counts=True)
    weak: dict[Size, NDArray[np.int64]] = {}
    for pattern, count in zip(patterns.T, counts, strict=True):
        for shape, safe in masks.hidden_positions(threat, pattern).items():
            weak[shape] = weak.get(shape, 0) + count * ~safe
    return weak


def _numbers(classes: Bools) -> tuple[int, ...]:
    return tuple(int(number) for number in np.flatnonzero(classes))


def thresholds_of(shares: Sequence[float] | NDArray[np.float64], *, logits: bool) -> Scores:
    """Thresholds of scores from probabilities; the probability of a logit z is 1 / (1 + exp(-z)).

    >>> thresholds_of([0.5, 0.9], logits=True).round(2).tolist()
    [0.0, 2.200000047683716]
    """
    values = np.asarray(shares, dtype=np.float64)
    return (np.log(values) - np.log1p(-values) if logits else values).astype(np.float32)
