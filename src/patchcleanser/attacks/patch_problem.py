"""What every search works on: where patches may be, candidates side by side, an objective, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat

Placement = tuple[Window, ...]
"""The windows of all patches of one attack."""


def room_for(threat: Threat, size: Size) -> list[Size]:
    """The patch shapes; ThreatError if none fits an image of this size."""
    return threat.shapes(size)


def random_placements(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Placement]:
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


def scan_placements(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Placement]:
    """At most `number` placements spread over the room: a grid for one patch, random ones for several.

    >>> len(scan_places(Threat.square(5), (32, 32), 64, torch.Generator()))
    64
    """
    room, shapes = threat.room(size), threat.shapes(size)
    each = int((number / len(shapes)) ** 0.5)
    if threat.count > 1 or each < 2:
        return random_placements(threat, size, number, draw)
    found: dict[Window, None] = {}
    for height, width in shapes:
        for top in _spread(room.height - height, each):
            for left in _spread(room.width - width, each):
                found[Window(room.top + top, room.left + left, height, width)] = None
    return [(window,) for window in found]


def _spread(last: int, number: int) -> list[int]:
    return sorted({int(v) for v in np.linspace(0, last, number).round()})


def changeable_pixels(places: Sequence[Placement], size: Size) -> Tensor:
    """[places, 1, H, W]: True where the attacker chooses."""
    free = torch.zeros(len(places), 1, *size, dtype=torch.bool)
    for n, place in enumerate(places):
        for w in place:
            free[n, :, w.top : w.bottom, w.left : w.right] = True
    return free


class LossValues(NamedTuple):
    """What an objective says of a batch."""

    loss: Tensor
    """[B]: what the search makes small."""
    margin: Tensor
    """[B]: how far the goal is; below 0 it is reached."""
    slope: Tensor
    """[B, C, H, W]: the gradient of each candidate's loss; empty if it was not asked for."""


class Objective(Protocol):
    """Images of all candidates [B, C, H, W] → how well each does."""

    def __call__(self, images: Tensor, *, slope: bool) -> LossValues:
        """Always the whole batch, in its order."""


@dataclass(frozen=True)
class PatchProblem:
    """B candidates: clean images, where each may be changed, and what is wanted."""

    clean: Tensor
    """[B, C, H, W] in [0, 1]."""
    free: Tensor
    """[B, 1, H, W]: True where the attacker chooses."""
    places: Sequence[Placement]
    objective: Objective
    draws: Sequence[torch.Generator]
    """Each candidate's own chance."""

    @classmethod
    def of(cls, clean: Tensor, places: Sequence[Placement], objective: Objective, seeds: Sequence[int]) -> PatchProblem:
        """A problem on the device of the images."""
        size = clean.shape[-2], clean.shape[-1]
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        return cls(clean, changeable_pixels(places, size).to(clean.device), places, objective, draws)

    def pasted(self, pixels: Tensor) -> Tensor:
        """The clean images with these pixels where they may be changed."""
        return torch.where(self.free, pixels, self.clean)

    def noise(self) -> Tensor:
        """Uniform random pixels, each candidate by its own chance."""
        shape = self.clean.shape[1:]
        return torch.stack([torch.rand(shape, generator=draw) for draw in self.draws]).to(self.clean.device)


@dataclass
class BestImages:
    """The best images so far, by margin: a search may follow another loss, but the goal counts."""

    images: Tensor
    margin: Tensor
    queries: int = 0
    """Classifications, or steps of the objective, spent on each candidate."""

    @classmethod
    def none(cls, problem: PatchProblem) -> BestImages:
        """Nothing tried yet."""
        return cls(problem.clean.clone(), problem.clean.new_full((len(problem.clean),), torch.inf))

    def keep(self, images: Tensor, margin: Tensor) -> None:
        """Take over what is better."""
        better = margin < self.margin
        self.images = torch.where(wide(better), images, self.images)
        self.margin = torch.where(better, margin, self.margin)
        self.queries += 1


def wide(values: Tensor) -> Tensor:
    """[B] → [B, 1, 1, 1]."""
    return values[:, None, None, None]
