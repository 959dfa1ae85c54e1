"""Which placements of a patch could hide an object from a detector, over the object, near it and far from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.cover import positions
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.masks import MaskSet, PerAxis
from patchcleanser.core.results import Result
from patchcleanser.core.threats import Threat
from patchcleanser.errors import MaskError, ThreatError

Place = Literal["over", "near", "far"]
PLACES: tuple[Place, ...] = ("over", "near", "far")
"""The patch shares a pixel with the object; shares none, but is less than a gap away; is at least the gap away."""

NEAR = 0.1
"""The gap, as a share of the image's longer side. A distance is the larger one of rows and columns."""


@dataclass(frozen=True, repr=False)
class ObjectCertificate(Result):
    """How much of one object the defended detector covers by a box of its class, whatever a patch shows.

    One number for each class of placements: at least this share, wherever in the class the patch is. None if no
    placement of the patch is in the class.
    """

    label: int
    over: float | None
    near: float | None
    far: float | None
    weakest: dict[Place, Window] = field(repr=False, hash=False)
    """For each class of placements, one where the promise is smallest."""

    def certified(self, place: Place, overlap: float) -> bool:
        """Whether at least this share is promised; of nothing (0.0) more than nothing is wanted."""
        promise = getattr(self, place)
        return promise is not None and promise >= overlap and promise > 0


def object_masks(
    threat: Threat,
    image: Size,
    *,
    masks: PerAxis = None,
    stride: PerAxis = None,
    lines: int = 0,
) -> MaskSet:
    """Windows for the threat, and both sides of `lines` rows and columns; CoverError if they do not cover it.

    A patch as large as the image is covered by no masks that leave anything in sight. Then there are half-planes only,
    and certificates speak of placements beside an object.
    """
    planes = MaskSet.half_planes(image=image, lines=lines).masks if lines else ()
    if image in threat.shapes(image):
        if not lines:
            size = f"{image[0]}×{image[1]} px"
            raise MaskError(f"no window hides a patch as large as the image ({size}) and leaves something; give lines")
        return MaskSet(image, planes)
    chosen = MaskSet(image, MaskSet.build(threat, image=image, masks=masks, stride=stride).masks + planes)
    chosen.require_cover(threat)
    return chosen


def placements(threat: Threat, box: Window, image: Size, gap: int) -> Iterator[tuple[Place, Size, Window]]:
    """Shapes and rooms: the patches of a class are those of some shape inside some room, and what fits into these.

    Over: a patch of height h and width w shares a pixel with the object just if it lies inside the object grown by
    h - 1 rows and w - 1 columns on each side. Far: a rectangle misses another just if it is above, below, left or
    right of it, so far patches lie in one of the four parts of the image beside the object grown by the gap. Near:
    they lie in one of the four parts beside the object, and share a pixel with the grown object.

    The threat's shapes are computed for each room. So of all rectangles of an area also those count that are maximal
    only because the object is in the way. A patch that is smaller than the threat's shape belongs to the class of the
    placement that it is a part of.
    """
    room, grown = threat.room(image), _grown(box, gap, gap)
    for place, part, center in [
        ("over", room, box),
        *(("near", part, grown) for part in _beside(box, room)),
        *(("far", part, None) for part in _beside(grown, room)),
    ]:
        for shape in threat.shape.shapes(image, (part.height, part.width)):
            inside = part if center is None else _shared(part, _grown(center, shape[0] - 1, shape[1] - 1))
            if inside is not None and shape[0] <= inside.height and shape[1] <= inside.width:
                yield place, shape, inside  # type: ignore[misc]


def near_gap(image: Size) -> int:
    """The gap in pixels, at least 1."""
    return max(1, math.ceil(NEAR * max(image)))


def certify_object(
    masks: MaskSet, threat: Threat, box: Window, label: int, promises: NDArray[np.float64]
) -> ObjectCertificate:
    """The certificate of an object, from the share [masks] that the clean image under each mask promises.

    *Wherever in a class the patch is, and whatever it shows, the result of `merge` covers at least the promised share.*
    Proof. Let x be the clean image, P a placement and x' an image that differs from x inside P only. Let mask m hide
    all of P. Then x' under m equals x under m, pixel by pixel, and the detector is a function: it gives the same
    masked detections, the boxes that promise `promises[m]` (`promised_coverage`). They are among the masked boxes that
    are merged for x', whatever the other masks and the unmasked image show there. So the result covers at least
    max over masks m that hide P of promises[m]; where no mask hides P, nothing is promised. The minimum over all
    placements of the class holds for each of them. `positions` has one placement of every kind, and the rooms of
    `placements` hold all of them. Coq has checked this, the rooms being given (proofs/Objects.v:
    a_certified_object_keeps_a_box).

    Only masked detections of the clean image count. A box that the detector shows without masks proves nothing.
    """
    if threat.count > 1:
        raise ThreatError(f"an object is certified against 1 patch at once, got {threat.count}; use --patches 1")
    lowest: dict[Place, tuple[float, Window]] = {}
    for place, shape, room in placements(threat, box, masks.image, near_gap(masks.image)):
        tops, lefts, hides = positions(masks.masks, shape, room)
        best = np.where(hides, promises, 0.0).max(axis=2)
        row, column = np.unravel_index(best.argmin(), best.shape)
        value = float(best[row, column])
        if place not in lowest or value < lowest[place][0]:
            lowest[place] = value, Window(int(tops[row]), int(lefts[column]), *shape)
    shares = {place: lowest[place][0] if place in lowest else None for place in PLACES}
    return ObjectCertificate(label, **shares, weakest={place: window for place, (_, window) in lowest.items()})


def _beside(box: Window, room: Window) -> list[Window]:
    """The parts of a room above, below, left and right of a box, without those that are empty."""
    sides = [
        (room.top, room.left, min(box.top, room.bottom), room.right),
        (max(box.bottom, room.top), room.left, room.bottom, room.right),
        (room.top, room.left, room.bottom, min(box.left, room.right)),
        (room.top, max(box.right, room.left), room.bottom, room.right),
    ]
    return [window for side in sides if (window := _window(*side)) is not None]


def _grown(box: Window, rows: int, columns: int) -> Window:
    """A box with more rows and columns on each side; rows and columns above or left of the image are left out."""
    top, left = max(0, box.top - rows), max(0, box.left - columns)
    return Window(top, left, box.bottom + rows - top, box.right + columns - left)


def _shared(first: Window, second: Window) -> Window | None:
    """The pixels of both windows."""
    top, left = max(first.top, second.top), max(first.left, second.left)
    return _window(top, left, min(first.bottom, second.bottom), min(first.right, second.right))


def _window(top: int, left: int, bottom: int, right: int) -> Window | None:
    return Window(top, left, bottom - top, right - left) if bottom > top and right > left else None
