"""Boxes of a detector, how much of one another covers, and the merging of boxes that masked images show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.errors import InputError

Boxes = NDArray[np.float64]
"""[N, (left, top, right, bottom)] in pixels; 0 is the image's left or upper edge."""

ROUNDING = 1e-9
"""What floating point may add to or take from a share of a box; a promised share is smaller by it."""


@dataclass(frozen=True, eq=False)
class Detections:
    """What a detector sees in one image: boxes [N, 4], class numbers [N] and scores [N].

    >>> len(Detections([[0, 0, 9, 9], [2, 2, 2, 5]], [0, 1], [0.9, 0.8]).clipped((8, 8)))
    1
    """

    boxes: Boxes
    classes: NDArray[np.int64]
    scores: NDArray[np.float64]

    def __init__(self, boxes: Any, classes: Any, scores: Any) -> None:
        object.__setattr__(self, "boxes", np.asarray(boxes, dtype=np.float64).reshape(-1, 4))
        object.__setattr__(self, "classes", np.asarray(classes, dtype=np.int64).reshape(-1))
        object.__setattr__(self, "scores", np.asarray(scores, dtype=np.float64).reshape(-1))
        if not len(self.boxes) == len(self.classes) == len(self.scores):
            counts = f"{len(self.boxes)}, {len(self.classes)} and {len(self.scores)}"
            raise InputError(f"boxes, classes and scores must be one for each detection, got {counts}")

    def __len__(self) -> int:
        return len(self.boxes)

    def __repr__(self) -> str:
        return f"Detections({len(self)} boxes)"

    def pick(self, rows: Any) -> Detections:
        """The detections of these numbers, or where a flag is True."""
        return Detections(self.boxes[rows], self.classes[rows], self.scores[rows])

    def above(self, score: float) -> Detections:
        """The detections with at least this score; NaN is below every score."""
        return self.pick(self.scores >= score)

    def clipped(self, size: Size) -> Detections:
        """Boxes clipped to an image (height, width), without those that hold NaN or are empty.

        A patch may drive a network into NaN. With this rule every detector is a total function into finite boxes.
        """
        height, width = size
        boxes = np.clip(self.boxes, 0, [width, height, width, height])  # NaN stays NaN
        return Detections(boxes, self.classes, self.scores).pick(areas(boxes) > 0)

    @classmethod
    def concat(cls, parts: Sequence[Detections]) -> Detections:
        """All detections of several images in one list."""
        columns = ("boxes", "classes", "scores")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def areas(boxes: Boxes) -> NDArray[np.float64]:
    """The area of each box; 0 if a side is not positive, NaN if a corner is NaN."""
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area: NDArray[np.float64] = np.maximum(width, 0) * np.maximum(height, 0)
    return area


def shared_areas(first: Boxes, second: Boxes) -> NDArray[np.float64]:
    """[N, M]: the area that each first box shares with each second one."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared: NDArray[np.float64] = np.maximum(high - low, 0).prod(axis=2)
    return shared


def coverage(boxes: Boxes, by: Boxes) -> NDArray[np.float64]:
    """[N, M]: the share of each box that lies inside each box of `by`.

    >>> coverage(np.array([[0.0, 0.0, 4.0, 2.0]]), by=np.array([[0.0, 0.0, 3.0, 9.0]])).tolist()
    [[0.75]]
    """
    return shared_areas(boxes, by) / areas(boxes)[:, None]


def merge(base: Detections, masked: Sequence[Detections], *, prune: float) -> Detections:
    """The boxes of the unmasked image, and the masked boxes that no box of the result covers.

    `masked` holds the detections under each mask. They are tried from the largest to the smallest. One is left out if
    a box of its class that is in the result already covers at least a share `prune` of it.

    *For each masked box b, the result has a box c of its class with coverage(b, by=c) ≥ prune.* Proof: b is either in
    the result, and c = b covers all of b, or it was left out because such a c was in the result; and no box is ever
    taken out again. This holds for every `base`, every other masked box and every order, so an attacker who chooses
    them cannot break it (proofs/Objects.v: every_masked_box_is_covered).

    >>> seen = Detections([[0, 0, 8, 8]], [3], [0.9])
    >>> half, another = Detections([[0, 0, 8, 4]], [3], [0.7]), Detections([[6, 6, 9, 9]], [3], [0.6])
    >>> merge(seen, [half, another], prune=0.8).boxes.tolist()
    [[0.0, 0.0, 8.0, 8.0], [6.0, 6.0, 9.0, 9.0]]
    """
    candidates = Detections.concat([base, *masked])
    first, boxes, classes = len(base), candidates.boxes, candidates.classes
    present = np.arange(len(candidates)) < first
    # One box at a time: an attacker who makes a detector see thousands of boxes must not fill the memory.
    for b in first + np.argsort(-areas(boxes[first:]), kind="stable"):
        covering = boxes[present & (classes == classes[b])]
        present[b] = not (coverage(boxes[b : b + 1], by=covering) >= prune - ROUNDING).any()
    return candidates.pick(present)


def promised_coverage(masked: Detections, box: Boxes, label: int, *, prune: float) -> float:
    """How much of an object every result of `merge` covers, if these are among its masked detections; from 0 to 1.

    Proof. Let g be the object, and b a masked box of its class. By `merge` the result has a box c of this class with
    |b ∩ c| ≥ prune·|b|. All of b outside c is at most (1 - prune)·|b|, so

        |c ∩ g| ≥ |b ∩ c ∩ g| ≥ |b ∩ g| - (1 - prune)·|b|.

    Divided by |g| this is the promise, for the best b. It does not use the base boxes: under attack they are the
    attacker's. Checked by Coq for areas in whole pixels (proofs/Objects.v: a_covered_box_keeps_its_promise).

    >>> seen = Detections([[0, 0, 10, 10]], [3], [0.9])
    >>> round(promised_coverage(seen, np.array([0.0, 0.0, 10.0, 10.0]), 3, prune=0.8), 6)
    0.8
    """
    boxes = masked.boxes[masked.classes == label]
    if not len(boxes):
        return 0.0
    shared = shared_areas(boxes, box.reshape(1, 4))[:, 0]
    promises = (shared - (1 - prune + ROUNDING) * areas(boxes)) / areas(box.reshape(1, 4))
    return max(0.0, float(promises.max()) - ROUNDING)


def pixel_window(box: Boxes, size: Size) -> Window:
    """The pixels that a box [4] touches, at least one, inside an image (height, width).

    >>> pixel_window(np.array([1.2, 0.0, 3.0, 2.5]), (8, 8))
    Window(top=0, left=1, height=3, width=2)
    """
    left, top = (min(max(0, int(np.floor(v))), side - 1) for v, side in zip(box[:2], size[::-1], strict=True))
    right, bottom = (
        min(max(int(np.ceil(v)), start + 1), side)
        for v, start, side in zip(box[2:], (left, top), size[::-1], strict=True)
    )
    return Window(top, left, bottom - top, right - left)
