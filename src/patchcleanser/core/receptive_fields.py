"""Which pixels each local score sees, and so which scores a patch can reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

Bools = NDArray[np.bool_]
Span = tuple[int, int]
"""Pixels along one axis: the first, and one past the last."""


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

    def spans(self, room: Window) -> tuple[list[Span], list[Span]]:
        """The rows, and the columns, of the placements that lie inside a window: where each starts and ends."""
        down = [(top, top + self.shape[0]) for top in self.tops]
        across = [(left, left + self.shape[1]) for left in self.lefts]
        rows = [(start, stop) for start, stop in down if room.top <= start and stop <= room.bottom]
        return rows, [(start, stop) for start, stop in across if room.left <= start and stop <= room.right]

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

    def hardest_room(self, threat: Threat) -> Window:
        """The smallest window that holds every placement of the footprints; they may leave out the border.

        >>> ReceptiveFields.fields((32, 32), field=5, jump=1).hardest_room(Threat.square(5))
        Window(top=4, left=4, height=24, width=24)
        """
        every = Window(0, 0, *self.size)
        down, across = ([span for f in self.footprints(threat) for span in f.spans(every)[axis]] for axis in (0, 1))
        return _window(_hull(down), _hull(across))

    def fitted(self, window: Window, threat: Threat) -> Window | None:
        """A window around the footprints' placements inside this one that as few scores as possible see.

        It is as large as it can be without being seen by more of them. None if this one holds no placement.

        >>> ReceptiveFields.fields((32, 32), field=5, jump=1).fitted(Window(4, 10, 8, 8), Threat.square(5))
        Window(top=0, left=10, height=12, width=8)
        """
        down, across = ([span for f in self.footprints(threat) for span in f.spans(window)[axis]] for axis in (0, 1))
        if not (down and across):
            return None
        return _window(_enlarged(self.down, *_hull(down)), _enlarged(self.across, *_hull(across)))

    def visible(self, boxes: NDArray[np.int32]) -> Bools:
        """[N, scores down, across]: the scores that see no pixel of the boxes [N, windows, (top, bottom, left, right)].

        >>> ReceptiveFields.fields((1, 6), field=1, jump=1).visible(np.array([[[0, 1, 1, 3]]])).astype(int).tolist()
        [[[1, 0, 0, 1, 1, 1]]]
        """
        hidden = np.zeros((len(boxes), *self.grid), dtype=bool)
        for top, bottom, left, right in boxes.transpose(1, 2, 0):
            hidden |= _seeing(self.down, top, bottom)[:, :, None] & _seeing(self.across, left, right)[:, None, :]
        return ~hidden


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


def _hull(spans: list[Span]) -> Span:
    """The pixels from the first to the last of any span."""
    starts, stops = zip(*spans, strict=True)
    return min(starts), max(stops)


def _window(down: Span, across: Span) -> Window:
    return Window(down[0], across[0], down[1] - down[0], across[1] - across[0])


def _enlarged(fields: Bools, start: int, stop: int) -> Span:
    """Along one axis: the pixels around these up to the next that scores see which do not see any of these."""
    foreign = np.flatnonzero(fields[~fields[:, start:stop].any(axis=1)].any(axis=0))
    before, after = foreign[foreign < start], foreign[foreign >= stop]
    return int(before[-1]) + 1 if len(before) else 0, int(after[0]) if len(after) else fields.shape[1]


def _seeing(fields: Bools, starts: NDArray[np.int32], stops: NDArray[np.int32]) -> Bools:
    """[intervals, scores]: along one axis, the scores that see a pixel of each interval; an empty one has none."""
    counts = np.pad(fields.cumsum(axis=1), ((0, 0), (1, 0)))
    seeing: Bools = (counts[:, stops] > counts[:, starts]).T
    return seeing
