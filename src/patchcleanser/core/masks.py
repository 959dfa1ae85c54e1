"""MaskSet: masks of which one always hides the whole patch, and the proof that it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement
from math import comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.counts import counted
from patchcleanser.core.cover import Cover, Mask, cover_of, positions
from patchcleanser.core.geometry import Size, Window, axis_starts, axis_stride, image_window, is_integer
from patchcleanser.core.mask_families import SLACK, covering_family, near_square
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import AnyRectangle, Threat
from patchcleanser.errors import CoverError, MaskError

PerAxis: TypeAlias = int | tuple[int, int] | None
"""One number for both axes, or one for the rows and one for the columns. None is the default."""

PAIRS = 20_000_000
"""The most pairs of masks a set may have; beyond that the table of unions fills the memory."""


@dataclass(frozen=True)
class Unions:
    """The distinct unions of two masks.

    `masks[u]` are the windows of union u. The masks themselves come first: union i is mask i
    alone, for i below the number of masks. `index[i, j]` is the union of masks i and j.
    """

    masks: tuple[Mask, ...]
    index: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.masks)

    @cached_property
    def lanes(self) -> NDArray[np.intp]:
        """For each union a number below the number of masks; the exact label engine derives a batch row from it.

        Mask i has lane i, and the union of masks i and j has lane (i + j) mod n. So the n single masks have n
        different lanes, and so have the unions of one mask with all others: both fill a batch of n rows.

        >>> MaskSet.build(Threat.square(2), image=(6, 6), masks=2).unions.lanes.tolist()
        [0, 1, 2, 3, 1, 2, 3, 3, 0, 1]
        """
        size = len(self.index)
        first, second = np.triu_indices(size, 1)
        lanes = np.arange(len(self.masks), dtype=np.intp)
        lanes[self.index[first, second][::-1]] = ((first + second) % size)[::-1]  # of equal unions the first pair's
        lanes[:size] = np.arange(size)
        return lanes

    @cached_property
    def boxes(self) -> NDArray[np.int32]:
        """Corners [unions + 1, windows, (top, bottom, left, right)]; the last row hides nothing.

        Rows are filled up with empty boxes, and `boxes[-1]` stands for the unmasked image.
        """
        most = max(len(mask) for mask in self.masks)
        boxes = np.zeros((len(self.masks) + 1, most, 4), dtype=np.int32)
        for u, mask in enumerate(self.masks):
            for k, w in enumerate(mask):
                boxes[u, k] = w.top, w.bottom, w.left, w.right
        return boxes


@dataclass(frozen=True)
class MaskSet:
    """Masks for images of one size. Each mask is a tuple of windows whose union it hides.

    >>> masks = MaskSet.build(Threat.square(32), image=(224, 224), masks=6)
    >>> len(masks), masks.masks[1]
    (36, (Window(top=0, left=33, height=64, width=64),))
    >>> masks.covers(Threat.square(32)), len(masks.unions)
    (True, 666)
    >>> masks.uncovered(Threat.square(33))
    (Window(top=0, left=32, height=33, width=33),)

    Masks of your own are tuples of windows, and DoubleMasking(classifier, threat, mask_set=halves) checks that they
    cover the threat:

    >>> left, right = Window(0, 0, 224, 128), Window(0, 96, 224, 128)
    >>> halves = MaskSet((224, 224), ((left,), (right,)))
    >>> halves, halves.covers(Threat.square(32))
    (MaskSet(2 masks for images of 224×224 px), True)
    """

    image: Size
    masks: tuple[Mask, ...]
    _covers: dict[Threat, Cover] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", per_axis(self.image, "the side of an image"))
        masks = tuple(_canonical(mask) for mask in self.masks)
        object.__setattr__(self, "masks", tuple(dict.fromkeys(masks)))
        if not self.masks:
            raise MaskError("a mask set needs at least 1 mask, got none")
        for mask in self.masks:
            for window in mask:
                if not image_window(self.image).contains(window):
                    raise MaskError(f"mask {window} lies outside the image of {self.image[0]}×{self.image[1]} px")

    @classmethod
    def build(
        cls,
        threat: Threat,
        *,
        image: Size,
        masks: PerAxis = None,
        stride: PerAxis = None,
        fields: ReceptiveFields | None = None,
    ) -> MaskSet:
        """The paper's mask set: at most `masks` per axis (6 by default), or every `stride` px.

        For any rectangle of an area, a family of covering rectangles is computed (mask_families.py).
        For K patches the masks are the distinct unions of K of the masks for one patch. All of these cover
        (proofs/MaskSets.v: grid_covers, proofs/MaskSets.v: unions_cover_several_patches), so they pass the check
        (proofs/Certificate.v: a_built_set_is_accepted, proofs/Certificate.v: a_built_family_is_accepted).

        With `fields`, hiding a pixel hides every score that sees it, and masks are to hide few scores instead of few
        pixels. For every placement a patch listed in the footprints reaches the same scores or more. So masks are
        built for the room of the listed placements. Each is shrunk to those it hides, and enlarged as far as that
        hides no more scores. A patch whose scores are all hidden by a mask then lies inside that mask.
        """
        if fields is not None:
            inner = replace(threat, region=fields.hardest_room(threat))
            built = cls.build(inner, image=image, masks=masks, stride=stride)
            fitted = (tuple(filter(None, (fields.fitted(w, threat) for w in mask))) for mask in built.masks)
            return cls(image, tuple(filter(None, fitted)))
        counts, strides = masks_per_axis(masks, stride)
        room, shapes = threat.room(image), threat.shapes(image)
        size = (room.height, room.width)

        def strides_for(shape: Size) -> Size:
            return strides or (axis_stride(size[0], shape[0], counts[0]), axis_stride(size[1], shape[1], counts[1]))

        chosen = [(shape, strides_for(shape)) for shape in shapes]
        if isinstance(threat.shape, AnyRectangle):
            square = near_square(min(threat.shape.pixels(image), room.area), size)
            largest = SLACK * _grid(room, square, strides_for(square))[0].area
            chosen = [(grid.shape, grid.strides) for grid in covering_family(shapes, size, largest)]
        base = [window for shape, step in chosen for window in _grid(room, shape, step)]
        return cls(image, tuple(_unions_of(base, threat.count)))

    @classmethod
    def half_planes(cls, *, image: Size, lines: int) -> MaskSet:
        """Both sides of `lines` rows and `lines` columns, evenly spaced: masks for patches whose size is not known.

        Let the lines across be at rows t_1 < … < t_k. A patch in rows a to b - 1 is inside the lower side of line i if
        t_i ≤ a, and inside the upper side if b ≤ t_i. So it escapes all of these masks just if a < t_1 and t_k < b:
        it spans every line. The same goes for columns. So the masks cover every rectangle that is at most t_k - t_1
        high, or at most as wide as the columns are apart, and no patch that spans all lines both ways.

        >>> masks = MaskSet.half_planes(image=(30, 40), lines=4)
        >>> len(masks), masks.covers(Threat.rectangle(18, 40)), masks.uncovered(Threat.square(27))
        (16, True, (Window(top=0, left=6, height=27, width=27),))
        """
        if not is_integer(lines) or lines < 1:
            raise MaskError(f"half-planes need at least 1 line, got {lines!r}")
        height, width = image
        rows, columns = ({side * i // (lines + 1) for i in range(1, lines + 1)} - {0} for side in image)
        down = [window for t in sorted(rows) for window in (Window(0, 0, t, width), Window(t, 0, height - t, width))]
        right = [
            window for t in sorted(columns) for window in (Window(0, 0, height, t), Window(0, t, height, width - t))
        ]
        return cls(image, tuple((window,) for window in (*down, *right)))

    def __len__(self) -> int:
        return len(self.masks)

    def __repr__(self) -> str:
        return f"MaskSet({counted(len(self), 'mask')} for images of {self.image[0]}×{self.image[1]} px)"

    def __hash__(self) -> int:
        return hash((self.image, self.masks))

    def cover(self, threat: Threat) -> Cover:
        """Which masks hide which of the threat's hardest placements; computed once per threat."""
        if threat not in self._covers:
            self._covers[threat] = cover_of(self.masks, threat, self.image)
        return self._covers[threat]

    def covers(self, threat: Threat) -> bool:
        """Whether for every placement of the threat's patches some mask hides them all."""
        return self.uncovered(threat) is None

    def uncovered(self, threat: Threat) -> tuple[Window, ...] | None:
        """Patches of the threat that no mask hides, or None if there are none."""
        return self.cover(threat).hole()

    def require_cover(self, threat: Threat) -> None:
        """Raise CoverError, naming a patch, unless the set covers the threat."""
        hole = self.uncovered(threat)
        if hole is not None:
            patch = " and ".join(str(window) for window in hole)
            raise CoverError(
                f"the mask set does not cover the threat ({threat}): no mask hides the patch {patch}; "
                "build one that does with MaskSet.build(threat, image=…)"
            )

    def hidden_positions(self, threat: Threat, chosen: NDArray[np.bool_]) -> dict[Size, NDArray[np.bool_]]:
        """For each patch shape, the top-left corners [rows, columns] that the chosen masks cover.

        Entry [i, j] is for the patch whose corner is i rows and j columns into the region (the whole image by
        default). With K patches: True if some chosen mask hides it wherever the other K - 1 patches are.
        """
        room = threat.room(self.image)
        maps = {}
        for shape in threat.shapes(self.image):
            tops, lefts, hides = positions(self.masks, shape, room)
            flat = (hides & chosen).reshape(-1, len(self))
            if threat.count == 1:
                safe = flat.any(axis=1)
            else:
                rest = self.cover(Threat(threat.shape, threat.count - 1, threat.region, threat.grid))
                kinds, kind = np.unique(flat, axis=0, return_inverse=True)
                safe = np.array([rest.hole(k) is None for k in kinds])[kind.reshape(-1)]
            heights = np.diff([*tops, room.bottom - shape[0] + 1])
            widths = np.diff([*lefts, room.right - shape[1] + 1])
            cells = safe.reshape(len(tops), len(lefts))
            maps[shape] = np.repeat(np.repeat(cells, heights, axis=0), widths, axis=1)
        return maps

    def visible(self) -> NDArray[np.bool_]:
        """[masks, height, width]: True where a pixel is kept, False where it is hidden."""
        visible = np.ones((len(self), *self.image), dtype=bool)
        for pixels, mask in zip(visible, self.masks, strict=True):
            for window in mask:
                pixels[window.slices] = False
        return visible

    @cached_property
    def unions(self) -> Unions:
        """The distinct unions of two masks, computed once.

        Two masks commute, so 36 masks need 666 labels, not 1,296; and with 25 base masks and
        two patches, 15,275 instead of the 195,625 of counting pairs of pairs.
        """
        size = len(self)
        if size * (size + 1) // 2 > PAIRS:
            raise MaskError(
                f"{size:,} masks make {size * (size + 1) // 2:,} pairs, more than {PAIRS:,}; use fewer masks per axis"
            )
        numbers = {mask: i for i, mask in enumerate(self.masks)}
        index = np.zeros((size, size), dtype=np.int32)
        for i, first in enumerate(self.masks):
            for j in range(i, size):
                union = first if i == j else _canonical((*first, *self.masks[j]))
                index[i, j] = index[j, i] = numbers.setdefault(union, len(numbers))
        return Unions(tuple(numbers), index)


def _canonical(mask: Iterable[Window]) -> Mask:
    """The windows of a mask, sorted, without those inside another: equal masks compare equal.

    Leaving windows out changes no pixel (proofs/Geometry.v: canonical_masks_hide_the_same).
    """
    windows = [] if isinstance(mask, Window) else list(mask)
    if isinstance(mask, Window) or not all(isinstance(window, Window) for window in windows):
        raise MaskError(f"a mask is a tuple of windows, as (Window(0, 0, 8, 16),), got {mask!r:.80}")
    windows = sorted(set(windows))
    if not windows:
        raise MaskError("a mask needs at least 1 window, got none")
    return tuple(w for w in windows if not any(o is not w and o.contains(w) for o in windows))


def _unions_of(base: list[Window], count: int) -> list[Mask]:
    total = comb(len(base) + count - 1, count)
    if total * (total + 1) // 2 > PAIRS:
        raise MaskError(
            f"{count} patches with {len(base)} base masks make {total:,} masks and {total * (total + 1) // 2:,} "
            f"pairs, more than {PAIRS:,}; use fewer masks per axis"
        )
    return [_canonical(chosen) for chosen in combinations_with_replacement(base, count)]


def _grid(room: Window, shape: Size, strides: Size) -> list[Window]:
    tops, height = axis_starts(room.height, shape[0], strides[0])
    lefts, width = axis_starts(room.width, shape[1], strides[1])
    return [Window(room.top + top, room.left + left, height, width) for top in tops for left in lefts]


def masks_per_axis(masks: PerAxis, stride: PerAxis) -> tuple[Size, Size | None]:
    """Masks per axis (6 by default), and the strides in pixels, if these are given instead."""
    if masks is not None and stride is not None:
        both = " and ".join("{}×{}".format(*per_axis(value, "a number")) for value in (masks, stride))
        raise MaskError(f"give masks (--masks) or stride (--stride), not both; got {both}")
    return per_axis(6 if masks is None else masks, "masks"), None if stride is None else per_axis(stride, "stride")


def per_axis(value: int | tuple[int, int], name: str) -> Size:
    """One number for both axes, or one for each; whole numbers of at least 1, also as text.

    >>> per_axis((2, 3), "masks"), per_axis("3", "masks")
    ((2, 3), (3, 3))
    """
    value = int(value) if isinstance(value, str) and value.isdecimal() else value
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or any(not is_integer(v) or v < 1 for v in pair):
        raise MaskError(f"{name} is a whole number of at least 1, or one for each axis, got {value!r}")
    return int(pair[0]), int(pair[1])
