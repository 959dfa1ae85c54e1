"""Which pixels each local score sees, and so which scores a patch can reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Footprint:
    """Every placement of one patch shape, by the scores it reaches.

    The patch whose top is tops[a] and whose left is lefts[b] reaches the scores (i, j) with rows[a, i] and
    columns[b, j]. A placement is left out if another one reaches all of its scores: it can do no more.
    """

    shape: Size
    tops: tuple[int, ...]
    lefts: tuple[int, ...]
    rows: Bools
    columns: Bools

    @property
    def max_scores(self) -> int:
        """The most scores one such patch can reach."""
        return int(self.rows.sum(1).max() * self.columns.sum(1).max())

    def window(self, placement: int) -> Window:
        """The patch at a placement, counted row by row."""
        down, across = divmod(placement, len(self.lefts))
        return Window(self.tops[down], self.lefts[across], *self.shape)


@dataclass(frozen=True, eq=False)
class ReceptiveFields:
    """Score (i, j) sees the pixels in rows `down[i]` and columns `across[j]`, and no others.

    `down` is bool [scores down, image height] and `across` bool [scores across, image width].
    """

    down: Bools
    across: Bools

    @classmethod
    def bands(cls, size: Size, width: int, *, columns: bool = True) -> ReceptiveFields:
        """One score for each band of columns (or rows) of this width; bands wrap around the image's border.

        >>> ReceptiveFields.bands((2, 4), 3).across.astype(int).tolist()
        [[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1]]
        """
        all_rows, all_columns = (np.ones((1, side), dtype=bool) for side in size)
        if columns:
            return cls(all_rows, _wrapped_bands(size[1], width))
        return cls(_wrapped_bands(size[0], width), all_columns)

    @classmethod
    def blocks(cls, size: Size, side: int) -> ReceptiveFields:
        """One score for each square block of this side; blocks wrap around the image's border."""
        return cls(_wrapped_bands(size[0], side), _wrapped_bands(size[1], side))

    @classmethod
    def fields(cls, size: Size, field: int, jump: int) -> ReceptiveFields:
        """One score for each receptive field of `field`×`field` px that lies in the image, `jump` px apart.

        >>> ReceptiveFields.fields((3, 5), field=3, jump=2).across.astype(int).tolist()
        [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
        """
        if field > min(size):
            raise InputError(f"a receptive field of {field} px does not fit an image of {size[0]}×{size[1]} px")
        return cls(*(_fields(side, field, jump) for side in size))

    @property
    def size(self) -> Size:
        """Of the images."""
        return self.down.shape[1], self.across.shape[1]

    @property
    def grid(self) -> Size:
        """Number of scores, down and across."""
        return len(self.down), len(self.across)

    def footprints(self, threat: Threat) -> tuple[Footprint, ...]:
        """What one patch of the threat can reach, for each of its shapes.

        A score may change only if it sees a pixel of the patch: a row of it and a column of it (proofs/LocalScores.v:
        a_score_out_of_reach_is_unchanged, proofs/LocalScores.v: reach_is_decided_by_axis).
        """
        room, footprints = threat.room(self.size), []
        for height, width in threat.shapes(self.size):
            tops, rows = _reached(self.down, height, range(room.top, room.bottom - height + 1))
            lefts, columns = _reached(self.across, width, range(room.left, room.right - width + 1))
            footprints.append(Footprint((height, width), tops, lefts, rows, columns))
        return tuple(footprints)


def _wrapped_bands(side: int, width: int) -> Bools:
    if not 1 <= width <= side:
        raise InputError(f"an ablation keeps between 1 and {side} px of a side of {side} px, got {width}")
    starts, pixels = np.arange(side)[:, None], np.arange(side)[None]
    bands: Bools = (pixels - starts) % side < width
    return bands


def _fields(side: int, field: int, jump: int) -> Bools:
    starts, pixels = np.arange(0, side - field + 1, jump)[:, None], np.arange(side)[None]
    fields: Bools = (pixels >= starts) & (pixels < starts + field)
    return fields


def _reached(fields: Bools, length: int, starts: range) -> tuple[tuple[int, ...], Bools]:
    """Along one axis: the starts of a patch whose scores no other start exceeds, and the scores reached from each."""
    reached = np.stack([fields[:, start : start + length].any(axis=1) for start in starts])
    distinct, first = np.unique(reached, axis=0, return_index=True)
    # Row a goes if another one contains all of its scores; distinct rows cannot contain each other.
    inside = ~(distinct[:, None] & ~distinct[None]).any(axis=2)
    maximal = inside.sum(axis=1) == 1
    order = np.argsort(first[maximal])
    return tuple(int(starts[i]) for i in first[maximal][order]), distinct[maximal][order]
