"""Algorithms 1 to 3, the row certificate and Minority Reports, with their proofs: pure functions, and flows.

A flow is a generator that works on one image's LabelTable. It yields a table and the unions of masks whose labels it
needs there, and reads them from the table when it goes on. The caller computes the labels, for many images at once if
it likes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNMASKED, Indices, LabelTable
from patchcleanser.core.results import Case, Certificate, DetectionCertificate, DetectionVerdict, Verdict
from patchcleanser.core.threats import Threat

R = TypeVar("R")
AHEAD = 8
"""By how much challenger masking's requests for one candidate grow. With 2, 5% fewer labels and 24% more batches."""

LabelFlow = Generator[tuple[LabelTable, Indices], None, R]
"""Yields tables with the unions whose labels it needs, and returns its result."""


def majority_label(labels: Sequence[int]) -> int:
    """The most frequent label; of several, the largest.

    The authors' code sorts label counts with an unstable sort, so that it may choose another of several. No
    certificate depends on the choice: the theorem holds for every rule (proofs/DoubleMasking.v:
    double_masking_keeps_the_label).

    >>> majority_label([3, 1, 1, 3, 2])
    3
    """
    counts = Counter(labels)
    return max(counts, key=lambda label: (counts[label], label))


def double_masking(labels: Sequence[int], row: Callable[[int], Sequence[int]]) -> Verdict:
    """Algorithm 1: `labels[i]` is the label under mask i, `row(i)[j]` under masks i and j.

    `row` is called for disagreers only, in order, until a row is unanimous. The proof that a
    certified image keeps its label stands in certification_flow.

    >>> double_masking([7, 7, 4], lambda i: [4, 4, 4]).case
    <Case.DISAGREER: 'disagreer'>
    """
    majority = majority_label(labels)
    disagreers = tuple(i for i, label in enumerate(labels) if label != majority)
    deciding, rows = None, 0
    for i in disagreers:
        rows += 1
        if all(label == labels[i] for label in row(i)):
            deciding = i
            break
    return Verdict(
        label=majority if deciding is None else labels[deciding],
        case=Case.DISAGREER if deciding is not None else Case.MAJORITY if disagreers else Case.AGREED,
        one_mask_labels=tuple(labels),
        disagreers=disagreers,
        deciding_mask=deciding,
        # The diagonal of a row is a one-mask label, and two masks commute: rows share a label.
        classifications=len(labels) + rows * (len(labels) - 1) - rows * (rows - 1) // 2,
    )


def double_masking_flow(table: LabelTable) -> LabelFlow[Verdict]:
    """Algorithm 1 on a table; all second rounds are requested at once, to be batched across masks and images."""
    yield table, table.masks()
    labels = table.one_mask_labels()
    majority = majority_label(labels)
    yield table, table.rows([i for i, label in enumerate(labels) if label != majority])
    return _with_table(double_masking(labels, table.row_labels), table)


def _with_table(verdict: Verdict, table: LabelTable) -> Verdict:
    """The verdict with what only the table knows: the labels it cost, and where its deciding mask lies."""
    windows = () if verdict.deciding_mask is None else table.mask_set.masks[verdict.deciding_mask]
    return replace(verdict, classifications=table.spent, suspected=windows)


def challenger_rounds(labels: Sequence[int], seed: int | None = None) -> Generator[tuple[list[int], int], int, Verdict]:
    """Algorithm 3, one two-mask label at a time: yields (challengers, candidate), is sent the label of the first.

    Without a seed, mask 0 is the first candidate and the lowest-numbered challenger is next, as in the authors' code;
    a seed gives the paper's random order. There is at most one round for each mask (proofs/ChallengerMasking.v:
    at_most_one_round_for_each_mask). The proof that a certified image keeps its label is in certification_flow.
    """
    order = list(range(len(labels)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    candidate, remaining, rounds = order[0], order[1:], 0
    while challengers := [mask for mask in remaining if labels[mask] != labels[candidate]]:
        challenger = challengers[0]
        rounds += 1
        remaining.remove(challenger)
        if (yield challengers, candidate) == labels[challenger]:
            candidate = challenger
    majority = majority_label(labels)
    case = Case.AGREED if not rounds else Case.MAJORITY if labels[candidate] == majority else Case.DISAGREER
    return Verdict(
        label=labels[candidate],
        case=case,
        one_mask_labels=tuple(labels),
        disagreers=tuple(i for i, label in enumerate(labels) if label != majority),
        deciding_mask=candidate if case is Case.DISAGREER else None,
        classifications=len(labels) + rounds,
    )


def challenger_masking(labels: Sequence[int], pair: Callable[[int, int], int], *, seed: int | None = None) -> Verdict:
    """Algorithm 3: `labels[i]` is the label under mask i, `pair(i, j)` under masks i and j.

    >>> challenger_masking([7, 7, 4], lambda i, j: 4).label
    4
    """
    rounds = challenger_rounds(labels, seed)
    try:
        challengers, candidate = next(rounds)
        while True:
            challengers, candidate = rounds.send(pair(challengers[0], candidate))
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def challenger_flow(table: LabelTable, seed: int | None = None) -> LabelFlow[Verdict]:
    """Algorithm 3 on a table.

    Most candidates lose at once or win to the end. So a candidate's first label is requested alone, and after each
    request that it survives AHEAD times as many: few labels are computed in vain, in few batches.
    """
    yield table, table.masks()
    labels, index = table.one_mask_labels(), table.mask_set.unions.index
    rounds, champion, ahead = challenger_rounds(labels, seed), None, 1
    try:
        challengers, candidate = next(rounds)
        while True:
            if candidate != champion:
                champion, ahead = candidate, 1
            if table.labels[index[candidate, challengers[0]]] < 0:
                yield table, index[candidate, challengers[:ahead]].astype(np.intp)
                ahead *= AHEAD
            challengers, candidate = rounds.send(table.pair_label(challengers[0], candidate))
    except StopIteration as end:
        verdict: Verdict = end.value
        return _with_table(verdict, table)


def coarse_answer(labels: Sequence[int]) -> int | None:
    """The label on which all coarse labels agree; None if they do not.

    >>> coarse_answer([7, 7, 7]), coarse_answer([7, 7, 4])
    (7, None)
    """
    return labels[0] if all(label == labels[0] for label in labels) else None


def coarse_first_flow(table: LabelTable, fine: Callable[[LabelTable], LabelFlow[Verdict]]) -> LabelFlow[Verdict]:
    """Ask a few larger masks first, if the table has such; only if their labels differ, run the `fine` algorithm.

    The proof that a certified image keeps its label stands in certification_flow.
    """
    coarse = table.coarse
    if coarse is not None:
        yield coarse, coarse.masks()
        labels = coarse.one_mask_labels()
        answer = coarse_answer(labels)
        if answer is not None:
            return Verdict(answer, Case.COARSE, tuple(labels), (), None, table.spent)
    return (yield from fine(table))


def certification_flow(table: LabelTable, label: int, threat: Threat, *, maps: bool) -> LabelFlow[Certificate]:
    """Algorithm 2 and the row certificate, for a clean image with its true label.

    *Two-mask correctness*: every two-mask label is the true label y. *Row certificate*: call mask i good if its whole
    row of two-mask labels (i with every j, and i alone) is y; the image is row-certified if the good masks alone still
    cover the threat. The first implies the second, since then every mask is good and the mask set covers
    (proofs/RowCertificate.v: two_mask_correctness_implies_the_row_certificate).

    Proof that a row-certified image keeps its label. Let the attacker place patches P. Some good mask i hides all of
    P, so under i and any j the attacked image looks like the clean one and the label is y. Write l(j) for the one-mask
    labels of the attacked image, so l(i) = y.

    - Double-masking, all one-mask labels agree: they agree with l(i), so the answer is y. Otherwise a disagreer j with
      l(j) ≠ y is never returned, since its row contains i and that label is y, so the row is not unanimous for l(j).
      If y is the majority, the answer is a disagreer's label y or the majority y. If not, i is a disagreer with a
      unanimous row, so some disagreer is returned, and its label is y.
    - Challenger masking: i never loses. As candidate it meets only challengers j with l(j) ≠ y, and the two-mask label
      is y ≠ l(j). As challenger it wins, since the two-mask label is y = l(i). So i stays until one label is left, and
      that label is y.

    Coq has checked both halves (proofs/DoubleMasking.v: double_masking_keeps_the_label, proofs/ChallengerMasking.v:
    challenger_masking_keeps_the_label), with the cover check (proofs/Certificate.v: a_certified_image_keeps_its_label,
    proofs/Certificate.v: the_certificate_means_row_certified).

    *Coarse first.* If coarse masks are tried first, two-mask correctness also demands that all their labels are y, and
    the row certificate that those with label y cover the threat. One of them hides P, so its label is y on the
    attacked image as well. If all coarse labels agree, they are y; if not, the proof above applies
    (proofs/CoarseFirst.v: coarse_first_and_row_certified_keeps_the_label).

    Hardest pairs are looked at first, and only those that can still change the answer; if `maps` is asked for, all of
    them.
    """
    masks, unions = table.mask_set, table.mask_set.unions
    masks.require_cover(threat)  # without it the proof has no good mask to start from
    cover = masks.cover(threat)
    yield table, table.masks()
    coarse, coarse_right, coarse_hole = table.coarse, np.ones(0, dtype=bool), None
    if coarse is not None:
        coarse.mask_set.require_cover(threat)
        yield coarse, coarse.masks()
        coarse_right = np.array(coarse.one_mask_labels()) == label
        coarse_hole = coarse.mask_set.cover(threat).hole(coarse_right)
    queue = _hardest_first(table)
    step = len(masks) * max(1, 64 // len(masks))
    while len(queue) and (maps or coarse_hole is None):
        good = ~np.any(_wrong_pairs(table, label), axis=1)
        if not maps and not good.all():
            if cover.hole(good) is not None:
                break  # neither certificate can hold any more
            # Not two-mask correct: only the rows that can still prove positions matter now.
            queue = queue[np.isin(queue, unions.index[good])]
        yield table, queue[:step]
        queue, step = queue[step:], 2 * step
    wrong = _wrong_pairs(table, label)
    good = ~np.any(wrong, axis=1)
    hole, failing = coarse_hole or cover.hole(good), np.argwhere(wrong)
    return Certificate(
        label=label,
        certified=bool(good.all() and coarse_right.all()),
        row_certified=hole is None,
        failing_pair=(int(failing[0, 0]), int(failing[0, 1])) if len(failing) else None,
        failing_placement=hole,
        margin=table.margin,
        classifications=table.spent,
        positions=_safe_positions(table, threat, good, coarse_right) if maps else None,
        unconfirmed=table.total("unconfirmed"),
        region=threat.region,
    )


def _safe_positions(
    table: LabelTable, threat: Threat, good: NDArray[np.bool_], coarse_right: NDArray[np.bool_]
) -> dict[Size, NDArray[np.bool_]]:
    """The positions that a good mask hides, and a coarse mask of the right label, if there are coarse masks."""
    positions = table.mask_set.hidden_positions(threat, good)
    if table.coarse is None:
        return positions
    coarse = table.coarse.mask_set.hidden_positions(threat, coarse_right)
    return {shape: safe & coarse[shape] for shape, safe in positions.items()}


def _wrong_pairs(table: LabelTable, label: int) -> NDArray[np.bool_]:
    """[masks, masks]: True where the two-mask label is known and wrong, or rounding may make it so."""
    labels = table.certain_labels
    wrong: NDArray[np.bool_] = ((labels >= 0) & (labels != label))[table.mask_set.unions.index]
    return wrong


def _hardest_first(table: LabelTable) -> Indices:
    """Unions of two masks by the smaller of the two one-mask margins: likely failures first.

    Lanes take turns, the hardest union of each first: so many unions at a time fill whole batches.
    """
    index = table.mask_set.unions.index
    margins = table.margins[: len(table.mask_set)]
    hardness = np.full(len(table.mask_set.unions), np.inf, dtype=np.float32)
    first, second = np.triu_indices(len(margins))
    np.minimum.at(hardness, index[first, second], np.minimum(margins[first], margins[second]))
    order = np.argsort(hardness, kind="stable")
    lanes = table.mask_set.unions.lanes[order]
    by_lane = np.argsort(lanes, kind="stable")
    turn = np.empty_like(by_lane)
    turn[by_lane] = np.arange(len(lanes)) - np.searchsorted(lanes[by_lane], lanes[by_lane])
    return order[np.argsort(turn, kind="stable")]


def reporters(
    undefended: int, labels: Sequence[int], confidences: Sequence[float], threshold: float
) -> tuple[int, ...]:
    """Masks whose label contradicts the undefended one with confidence above the threshold.

    >>> reporters(3, [3, 5, 5], [0.9, 0.4, 0.8], threshold=0.5)
    (2,)
    """
    masks = enumerate(zip(labels, confidences, strict=True))
    return tuple(i for i, (label, confidence) in masks if label != undefended and confidence > threshold)


def first_failure(label: int, labels: Sequence[int], confidences: Sequence[float], threshold: float) -> int | None:
    """The first mask whose label is wrong or not confident enough, if any.

    Proof of the certificate: let all one-mask labels of a clean image be y with confidence above the threshold. A
    patch is hidden by some mask, under which the attacked image looks like the clean one: label y, with the same
    confidence. If the attacked image's undefended label is not y, that mask contradicts it confidently, and the alert
    fires. Both sides use >, so equality cannot slip between them, and the confidence under a mask has the same bits in
    both, whatever the batch (engine/exact.py). Checked by Coq: proofs/MinorityReports.v: never_silently_wrong.
    """
    for i, (mask_label, confidence) in enumerate(zip(labels, confidences, strict=True)):
        if mask_label != label or not confidence > threshold:
            return i
    return None


def detection_flow(table: LabelTable, threshold: float) -> LabelFlow[DetectionVerdict]:
    """The undefended label, and an alert if some mask contradicts it confidently."""
    yield table, np.array([*table.masks(), UNMASKED])
    undefended, labels = int(table.labels[UNMASKED]), table.one_mask_labels()
    reports = reporters(undefended, labels, _confidences(table), threshold)
    windows = tuple(window for mask in reports for window in table.mask_set.masks[mask])
    return DetectionVerdict(undefended, bool(reports), tuple(labels), reports, table.spent, windows)


def detection_certification_flow(table: LabelTable, label: int, threshold: float) -> LabelFlow[DetectionCertificate]:
    """Whether no patch can change the answer of a clean image with its true label without an alert."""
    yield table, np.array([*table.masks(), UNMASKED])
    failing = first_failure(label, table.one_mask_labels(), _confidences(table), threshold)
    right = int(table.labels[UNMASKED]) == label
    windows = () if failing is None else table.mask_set.masks[failing]
    return DetectionCertificate(label, failing is None and right, failing, table.margin, table.spent, windows)


def _confidences(table: LabelTable) -> list[float]:
    return [float(confidence) for confidence in table.confidences[: len(table.mask_set)]]
