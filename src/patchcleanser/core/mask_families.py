"""A few rectangles that contain every rectangle of at most a given area, and masks for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, axis_stride

SLACK = 1.6
"""How many times the pixels of a mask for the square of the same area a mask may hide.

At 1% of 224×224 with 6×6 masks: 1.0 → 219 masks, 1.4 → 100, 1.6 → 72, 2.0 → 49, 3.0 → 21.
The paper's six shapes with 6×6 masks each are 156 masks, the largest 2.9 times the square's."""


@dataclass(frozen=True)
class MaskGrid:
    """A grid of masks that covers one rectangle: its size, the strides, the number of masks, and pixels in each."""

    shape: Size
    strides: Size
    masks: int
    area: int


def near_square(area: int, room: Size) -> Size:
    """The rectangle of at least `area` pixels nearest to a square that fits the room.

    >>> near_square(502, (224, 224)), near_square(502, (10, 224))
    ((23, 22), (10, 51))
    """
    height = min(math.isqrt(area - 1) + 1, room[0])
    width = min(-(-area // height), room[1])
    return (min(-(-area // width), room[0]), width) if width == room[1] else (height, width)


def fewest_masks(shape: Size, room: Size, largest: float) -> MaskGrid | None:
    """The fewest masks of at most `largest` pixels that cover one rectangle, if there are any.

    A band as wide as the room takes one mask across, so all of its masks go down the image:
    the best split between the axes is searched, not fixed at k by k.
    """
    down = _useful_strides(room[0], shape[0])
    places_down, places_across = room[0] - shape[0] + 1, room[1] - shape[1] + 1
    heights = np.minimum(shape[0] + down - 1, room[0])
    widest = np.minimum(largest // heights, room[1]).astype(np.int64)
    down, heights, widest = (values[widest >= shape[1]] for values in (down, heights, widest))
    if not len(down):
        return None
    # The smallest stride that needs no more masks than the widest mask allowed.
    across = -(-places_across // -(-places_across // (widest - shape[1] + 1)))
    areas = heights * np.minimum(shape[1] + across - 1, room[1])
    counts = -(-places_down // down) * -(-places_across // across)
    best = np.lexsort((areas, counts))[0]
    return MaskGrid(shape, (int(down[best]), int(across[best])), int(counts[best]), int(areas[best]))


@lru_cache(maxsize=4096)
def _useful_strides(image: int, patch: int) -> NDArray[np.int64]:
    """The smallest stride for every number of masks; no other stride can be best."""
    return np.unique([axis_stride(image, patch, count) for count in range(1, image - patch + 2)]).astype(np.int64)


def covering_family(shapes: Sequence[Size], room: Size, largest: float) -> list[MaskGrid]:
    """The fewest masks, each of at most `largest` pixels, for all of these maximal rectangles.

    `shapes` run from wide to tall. A run of neighbours fits inside the rectangle that is as tall as the run's last and
    as wide as its first (proofs/MaskSets.v: the_shape_of_a_run_holds_the_run), so a partition into runs gives a family
    that contains them all. Dynamic programming over the runs finds the partition with the fewest masks in total, and
    among those the one that hides the fewest pixels. A run of one always fits if `largest` is at least the largest
    shape's area. Any partition covers (proofs/MaskSets.v: family_covers_every_rectangle).

    >>> shapes = [(h, min(224, 502 // h)) for h in range(1, 225)]
    >>> [grid.shape for grid in covering_family(shapes, (224, 224), largest=5017)]
    [(14, 224), (41, 33), (224, 11)]
    """
    best: list[tuple[int, int, list[MaskGrid]]] = [(0, 0, [])]
    for end in range(1, len(shapes) + 1):
        options = []
        for start in reversed(range(end)):
            grid = fewest_masks((shapes[end - 1][0], shapes[start][1]), room, largest)
            if grid is None:
                break  # longer runs only get wider
            masks, pixels, chosen = best[start]
            options.append((masks + grid.masks, pixels + grid.masks * grid.area, [*chosen, grid]))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]
