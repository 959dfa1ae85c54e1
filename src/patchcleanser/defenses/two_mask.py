"""The certificate of both double-masking and challenger masking: two-mask and row correctness."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.tables import Indices, LabelTable
from patchcleanser.core.threats import Threat
from patchcleanser.core.verdicts import Certificate
from patchcleanser.defenses.base import Game


def certification(table: LabelTable, label: int, threat: Threat, *, maps: bool) -> Game[Certificate]:
    """Algorithm 2 and the row certificate, for a clean image with its true label.

    *Two-mask correctness*: every two-mask label is the true label y. *Row certificate*: call
    mask i good if its whole row of two-mask labels (i with every j, and i alone) is y; the
    image is row-certified if the good masks alone still cover the threat. The first implies
    the second, since then every mask is good and the mask set covers.

    Proof that a row-certified image keeps its label. Let the attacker place patches P. Some
    good mask i hides all of P, so under i and any j the attacked image looks like the clean
    one and the label is y. Write l(j) for the one-mask labels of the attacked image, so l(i) = y.

    - Double-masking, all one-mask labels agree: they agree with l(i), so the answer is y.
      Otherwise a disagreer j with l(j) ≠ y is never returned, since its row contains i and
      that label is y, so the row is not unanimous for l(j). If y is the majority, the answer
      is a disagreer's label y or the majority y. If not, i is a disagreer with a unanimous
      row, so some disagreer is returned, and its label is y.
    - Challenger masking: i never loses. As candidate it meets only challengers j with
      l(j) ≠ y, and the two-mask label is y ≠ l(j). As challenger it wins, since the two-mask
      label is y = l(i). So i stays until one label is left, and that label is y.

    Hardest pairs are looked at first, and only those that can still change the answer; if
    `maps` is asked for, all of them.
    """
    masks, unions = table.mask_set, table.mask_set.unions
    masks.require_cover(threat)  # without it the proof has no good mask to start from
    cover = masks.cover(threat)
    yield table.masks()
    queue = _hardest_first(table)
    step = len(masks) * max(1, 64 // len(masks))
    while len(queue):
        good = _good_masks(table, label)
        if not maps and not good.all():
            if cover.hole(good) is not None:
                break  # neither certificate can hold any more
            # Not two-mask correct: only the rows that can still prove positions matter now.
            queue = queue[np.isin(queue, unions.index[good])]
        yield queue[:step]
        queue, step = queue[step:], 2 * step
    good = _good_masks(table, label)
    hole = cover.hole(good)
    return Certificate(
        label=label,
        certified=bool(good.all()),
        row_certified=hole is None,
        failing_pair=_failing_pair(table, label),
        failing_placement=hole,
        margin=table.margin,
        classifications=table.spent,
        positions=masks.hidden_positions(threat, good) if maps else None,
        unconfirmed=table.unconfirmed,
    )


def _good_masks(table: LabelTable, label: int) -> NDArray[np.bool_]:
    """Masks with no wrong label in their row, among the labels known."""
    labels = table.labels[:-1]
    wrong = (labels >= 0) & (labels != label)
    good: NDArray[np.bool_] = ~wrong[table.mask_set.unions.index].any(axis=1)
    return good


def _failing_pair(table: LabelTable, label: int) -> tuple[int, int] | None:
    labels = table.labels[:-1]
    wrong = ((labels >= 0) & (labels != label))[table.mask_set.unions.index]
    failing = np.argwhere(wrong)
    return (int(failing[0, 0]), int(failing[0, 1])) if len(failing) else None


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
