"""Does a mask set cover a threat? An exact answer, whatever the masks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat
from patchcleanser.errors import MaskError

Mask = tuple[Window, ...]
"""One mask: the union of its windows."""

PLACEMENTS = 2_000_000
"""The most combinations of K patches that are checked one by one; about a second's work."""


@dataclass(frozen=True)
class Cover:
    """Which masks hide which placements of the threat's patches.

    `hides[p, m]` is True if mask m hides all of `placements[p]`. Only the hardest placements
    are kept: if every mask that hides p also hides q, then q needs no row of its own. So a
    subset of the masks covers the threat if and only if every row has one of them.
    """

    placements: tuple[tuple[Window, ...], ...]
    hides: NDArray[np.bool_]

    def hole(self, masks: NDArray[np.bool_] | None = None) -> tuple[Window, ...] | None:
        """Patches that no mask (of the chosen ones) hides together, or None: covering is proved."""
        hidden = (self.hides if masks is None else self.hides & masks).any(axis=1)
        missed = np.flatnonzero(~hidden)
        return self.placements[missed[0]] if len(missed) else None


def cover_of(masks: Sequence[Mask], threat: Threat, image: Size) -> Cover:
    """Every placement of the threat's patches against every mask, exactly.

    For K patches a mask must hide all K at once; since only the hardest single placements matter (a mask that hides a
    harder one hides the easier one too), only K-tuples of those are combined. That this decides what every placement
    would is checked by Coq (proofs/Cover.v: cover_check_is_exact).
    """
    places: list[Window] = []
    rows: list[NDArray[np.bool_]] = []
    for shape in threat.shapes(image):
        tops, lefts, hides = positions(masks, shape, threat.room(image))
        flat = hides.reshape(-1, len(masks))
        hardest = _hardest(flat)
        rows.append(flat[hardest])
        places += [Window(int(tops[i // len(lefts)]), int(lefts[i % len(lefts)]), *shape) for i in hardest]
    single = np.concatenate(rows)
    hardest = _hardest(single)
    return _combine([places[i] for i in hardest], single[hardest], threat.count)


def positions(
    masks: Sequence[Mask], shape: Size, room: Window
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Representative patch positions (tops, lefts) and which masks hide each [tops, lefts, masks].

    As a patch moves down, the set of window edges above its first row and above its last row changes only where one of
    the two crosses an edge. Between two such rows every mask treats the patch alike, so one position per interval
    stands for all of them; likewise across. Each representative is the first position of its interval (proofs/Cover.v:
    representatives_stand_for_all_placements).
    """
    windows = [w for mask in masks for w in mask]
    row_edges = sorted({e for w in windows for e in (w.top, w.bottom)})
    column_edges = sorted({e for w in windows for e in (w.left, w.right)})
    tops = _breaks(row_edges, shape[0], room.top, room.bottom)
    lefts = _breaks(column_edges, shape[1], room.left, room.right)
    first = [mask[0] for mask in masks]
    down = _within(tops, shape[0], [w.top for w in first], [w.bottom for w in first])
    across = _within(lefts, shape[1], [w.left for w in first], [w.right for w in first])
    hides = down[:, None, :] & across[None, :, :]
    for m, mask in enumerate(masks):
        if len(mask) > 1:
            hides[:, :, m] = _inside_union(mask, tops, lefts, shape)
    return tops, lefts, hides


def _within(starts: NDArray[np.intp], side: int, low: list[int], high: list[int]) -> NDArray[np.bool_]:
    """[starts, intervals]: whether the segment from each start lies inside each interval."""
    inside: NDArray[np.bool_] = (np.array(low) <= starts[:, None]) & (starts[:, None] + side <= np.array(high))
    return inside


def _breaks(edges: Sequence[int], side: int, start: int, stop: int) -> NDArray[np.intp]:
    """First positions at which a segment of length `side` stands differently to some edge."""
    last = stop - side
    turns = {start} | set(edges) | {e - side + 1 for e in edges}
    return np.array(sorted(t for t in turns if start <= t <= last), dtype=np.intp)


def _inside_union(mask: Mask, tops: NDArray[np.intp], lefts: NDArray[np.intp], shape: Size) -> NDArray[np.bool_]:
    """Whether each patch lies inside the union of the windows, by counting hidden pixels."""
    height = int(max(tops[-1] + shape[0], *(w.bottom for w in mask)))
    width = int(max(lefts[-1] + shape[1], *(w.right for w in mask)))
    hidden = np.zeros((height + 1, width + 1), dtype=np.int64)
    for w in mask:
        hidden[w.top + 1 : w.bottom + 1, w.left + 1 : w.right + 1] = 1
    total = hidden.cumsum(axis=0).cumsum(axis=1)
    t0, l0 = tops[:, None], lefts[None, :]
    t1, l1 = t0 + shape[0], l0 + shape[1]
    inside: NDArray[np.bool_] = total[t1, l1] - total[t0, l1] - total[t1, l0] + total[t0, l0] == shape[0] * shape[1]
    return inside


def _hardest(hides: NDArray[np.bool_]) -> list[int]:
    """Indices of the rows that contain no other row: the hardest placements, each once."""
    words = _words(hides)
    _, first = np.unique(words.view(f"V{8 * words.shape[1]}").ravel(), return_index=True)
    order = first[np.argsort(hides[first].sum(axis=1), kind="stable")]
    hardest: list[int] = []
    rows = np.empty((len(order), words.shape[1]), dtype=np.uint64)
    for i in order:
        # Rows come by size, so a row can only contain rows that came before it.
        outside = rows[: len(hardest)] & ~words[i]
        if outside.any(axis=1).all():
            rows[len(hardest)] = words[i]
            hardest.append(int(i))
    return hardest


def _words(bits: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Rows of bits packed into 64-bit words, which compare 64 masks at a time."""
    short = -bits.shape[1] % 64
    packed = np.packbits(np.pad(bits, ((0, 0), (0, short))), axis=1)
    return np.ascontiguousarray(packed).view(np.uint64)


def _combine(places: list[Window], hides: NDArray[np.bool_], count: int) -> Cover:
    """The hardest placements of `count` patches from the hardest placements of one."""
    tuples = comb(len(places) + count - 1, count)
    if tuples > PLACEMENTS:
        raise MaskError(
            f"{count} patches give {tuples:,} hardest placements to check, more than {PLACEMENTS:,}; "
            "use fewer masks or patches"
        )
    chosen = np.array(list(combinations_with_replacement(range(len(places)), count)), dtype=np.intp)
    together = hides[chosen[:, 0]]
    for patch in range(1, count):
        together &= hides[chosen[:, patch]]
    hardest = list(range(len(places))) if count == 1 else _hardest(together)
    placements = tuple(tuple(places[i] for i in chosen[k]) for k in hardest)
    return Cover(placements, together[hardest])
