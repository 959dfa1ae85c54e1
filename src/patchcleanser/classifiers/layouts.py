"""Which outputs of a network's first layers are to be computed for which masks, and from which crops of an image."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from patchcleanser.classifiers.fields import Fields
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.windows import Size, Window

LOOKED_AT = 1000
"""Unions by which it is judged what is saved."""

Mask = tuple[Window, ...]


class Patch(NamedTuple):
    """Some of the first layers' outputs [top:bottom, left:right], and the crop of the image that they come from."""

    top: int
    bottom: int
    left: int
    right: int
    crop: Window

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return self.top >= self.bottom or self.left >= self.right


class Layout:
    """Where first layers with these fields and so many outputs, down and across, are to be computed for which masks."""

    def __init__(self, fields: Fields, outputs: Size, image: Size) -> None:
        self.fields, self.outputs, self.image = fields, outputs, image
        self.whole = Patch(0, outputs[0], 0, outputs[1], Window(0, 0, *image))
        self._around: dict[Window, Patch] = {}
        self._between: dict[Mask, list[Patch]] = {}

    def around(self, window: Window) -> Patch:
        """The outputs that see a pixel of a window."""
        if window not in self._around:
            spans = (window.top, window.bottom), (window.left, window.right)
            down, across = (
                field.touched(*span, count) for field, span, count in zip(self.fields, spans, self.outputs, strict=True)
            )
            self._around[window] = self._patch(*down, *across)
        return self._around[window]

    def between(self, mask: Mask) -> list[Patch]:
        """The outputs that see pixels of two windows of a mask or more, as patches that may overlap."""
        if mask not in self._between:
            patches = []
            for one, other in combinations([self.around(window) for window in mask], 2):
                top, bottom = max(one.top, other.top), min(one.bottom, other.bottom)
                left, right = max(one.left, other.left), min(one.right, other.right)
                if top < bottom and left < right:
                    patches.append(self._patch(top, bottom, left, right))
            self._between[mask] = patches
        return self._between[mask]

    def _patch(self, top: int, bottom: int, left: int, right: int) -> Patch:
        if top >= bottom or left >= right:
            return Patch(top, bottom, left, right, Window(0, 0, 1, 1))
        rows = self.fields[0].crop(top, bottom, self.image[0])
        columns = self.fields[1].crop(left, right, self.image[1])
        return Patch(top, bottom, left, right, Window(rows[0], columns[0], rows[1] - rows[0], columns[1] - columns[0]))

    def share(self, masks: MaskSet) -> float:
        """How much of the first layers' work is left, of one image under all unions of a set."""
        unions = masks.unions.masks
        looked_at = unions[:: -(-len(unions) // LOOKED_AT)]
        once = _area([self.whole, *self.once(masks).values()])
        each = sum(_area(self.between(mask)) for mask in looked_at) / len(looked_at)
        return (once / len(unions) + each) / (self.image[0] * self.image[1])

    def once(self, masks: MaskSet) -> dict[Window, Patch]:
        """What is to be computed once for an image: around each window that some output sees."""
        windows = dict.fromkeys(window for mask in masks.masks for window in mask)
        return {window: patch for window in windows if not (patch := self.around(window)).empty}

    def among(self, patch: Patch) -> NDArray[np.int64]:
        """The numbers of a patch's outputs among all, row by row, [rows, columns]."""
        return _numbers(patch, 0, 0, self.outputs[1])

    def within(self, patch: Patch, width: int) -> NDArray[np.int64]:
        """Their numbers among the outputs of its crop, which has so many across."""
        return _numbers(patch, patch.crop.top // self.fields[0].step, patch.crop.left // self.fields[1].step, width)


def _area(patches: Iterable[Patch]) -> int:
    return sum(patch.crop.area for patch in patches)


def _numbers(patch: Patch, top: int, left: int, width: int) -> NDArray[np.int64]:
    rows, columns = np.arange(patch.top, patch.bottom) - top, np.arange(patch.left, patch.right) - left
    return rows[:, None] * width + columns[None]
