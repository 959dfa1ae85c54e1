"""Where patches may be: drawn at random, or on a coarse scan of the room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat

Place = tuple[Window, ...]
"""The windows of all patches of one attack."""


def room_for(threat: Threat, size: Size) -> list[Size]:
    """The patch shapes; ThreatError if none fits an image of this size."""
    return threat.shapes(size)


def random_places(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Place]:
    """So many placements of the threat's patches, each of one of its shapes, anywhere in its room.

    >>> place = random_places(Threat.square(2, count=2), (6, 6), 1, torch.Generator().manual_seed(0))[0]
    >>> len(place), place[0].height
    (2, 2)
    """
    room, shapes = threat.room(size), threat.shapes(size)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=draw))

    def one() -> Window:
        height, width = shapes[below(len(shapes))]
        top, left = below(room.height - height + 1), below(room.width - width + 1)
        return Window(room.top + top, room.left + left, height, width)

    return [tuple(one() for _ in range(threat.count)) for _ in range(number)]


def scan_places(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Place]:
    """At most `number` placements spread over the room: a grid for one patch, random ones for several.

    >>> len(scan_places(Threat.square(5), (32, 32), 64, torch.Generator()))
    64
    """
    room, shapes = threat.room(size), threat.shapes(size)
    each = int((number / len(shapes)) ** 0.5)
    if threat.count > 1 or each < 2:
        return random_places(threat, size, number, draw)
    found: dict[Window, None] = {}
    for height, width in shapes:
        for top in _spread(room.height - height, each):
            for left in _spread(room.width - width, each):
                found[Window(room.top + top, room.left + left, height, width)] = None
    return [(window,) for window in found]


def _spread(last: int, number: int) -> list[int]:
    return sorted({int(v) for v in np.linspace(0, last, number).round()})


def free_pixels(places: Sequence[Place], size: Size) -> Tensor:
    """[places, 1, H, W]: True where the attacker chooses."""
    free = torch.zeros(len(places), 1, *size, dtype=torch.bool)
    for n, place in enumerate(places):
        for w in place:
            free[n, :, w.top : w.bottom, w.left : w.right] = True
    return free
