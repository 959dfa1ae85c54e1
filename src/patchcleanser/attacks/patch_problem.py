"""The search problem of an attack: where patches may be, candidates side by side, and the best images so far."""

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


def random_placements(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Placement]:
    """Random placements of the threat's patches, each of one of its shapes, anywhere it may be.

    >>> placement = random_placements(Threat.square(2, count=2), (6, 6), 1, torch.Generator().manual_seed(0))[0]
    >>> len(placement), placement[0].height
    (2, 2)
    """
    room, shapes = threat.room(size), threat.shapes(size)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=draw))

    def window() -> Window:
        height, width = shapes[below(len(shapes))]
        top, left = below(room.height - height + 1), below(room.width - width + 1)
        return Window(room.top + top, room.left + left, height, width)

    return [tuple(window() for _ in range(threat.count)) for _ in range(number)]


def scan_placements(threat: Threat, size: Size, number: int, draw: torch.Generator) -> list[Placement]:
    """At most `number` placements, spread out: a grid for one patch, random ones for several.

    >>> len(scan_placements(Threat.square(5), (32, 32), 64, torch.Generator()))
    64
    """
    room, shapes = threat.room(size), threat.shapes(size)
    each = int((number / len(shapes)) ** 0.5)
    if threat.count > 1 or each < 2:
        return random_placements(threat, size, number, draw)
    windows: dict[Window, None] = {}
    for height, width in shapes:
        for top in _spread(room.height - height, each):
            for left in _spread(room.width - width, each):
                windows[Window(room.top + top, room.left + left, height, width)] = None
    return [(window,) for window in windows]


def _spread(last: int, number: int) -> list[int]:
    return sorted({int(v) for v in np.linspace(0, last, number).round()})


def pixels_inside(masks: Sequence[Sequence[Window]], size: Size) -> Tensor:
    """[masks, 1, H, W]: True in the windows of each mask, or of each placement."""
    inside = torch.zeros(len(masks), 1, *size, dtype=torch.bool)
    for pixels, windows in zip(inside, masks, strict=True):
        for window in windows:
            pixels[(0, *window.slices)] = True
    return inside


class LossValues(NamedTuple):
    """An objective's values for a batch of B images."""

    loss: Tensor
    """[B]: what the search minimises."""
    margin: Tensor
    """[B]: how far the goal is; below 0 it is reached."""
    gradient: Tensor
    """[B, C, H, W]: of each image's loss; empty if not requested."""


class Objective(Protocol):
    """Images of all candidates [B, C, H, W], always the whole batch in its order → how well each does."""

    def __call__(self, images: Tensor, *, gradient: bool) -> LossValues: ...


@dataclass(frozen=True)
class PatchProblem:
    """B candidates: clean images with their labels, where each may be changed, and what to minimise."""

    clean: Tensor
    """[B, C, H, W] in [0, 1]."""
    labels: Tensor
    """[B]: the true labels."""
    changeable: Tensor
    """[B, 1, H, W]: True where the attacker chooses."""
    placements: list[Placement]
    draws: list[torch.Generator]
    """A random generator for each candidate."""

    @classmethod
    def build(
        cls,
        images: Sequence[Tensor],
        labels: Sequence[int],
        placements: Sequence[Sequence[Placement]],
        draws: Sequence[torch.Generator],
    ) -> PatchProblem:
        """One candidate for each placement of each image, seeded by the image's generator."""
        clean = torch.stack([image for image, own in zip(images, placements, strict=True) for _ in own])
        flat = [placement for own in placements for placement in own]
        truths = [label for label, own in zip(labels, placements, strict=True) for _ in own]
        seeds = [torch.randint(2**62, (1,), generator=d) for d, own in zip(draws, placements, strict=True) for _ in own]
        return cls(
            clean,
            torch.tensor(truths, device=clean.device),
            pixels_inside(flat, size_of(clean)).to(clean.device),
            flat,
            [torch.Generator().manual_seed(int(seed)) for seed in seeds],
        )

    def paste(self, pixels: Tensor) -> Tensor:
        """The clean images with these pixels where they may be changed."""
        return torch.where(self.changeable, pixels, self.clean)

    def noise(self) -> Tensor:
        """Uniform random pixels, each candidate's by its own generator."""
        shape = self.clean.shape[1:]
        return torch.stack([torch.rand(shape, generator=draw) for draw in self.draws]).to(self.clean.device)


class BestImages:
    """The best images so far, by margin: a search may follow another loss, but the goal counts."""

    def __init__(self, problem: PatchProblem) -> None:
        self.images = problem.clean.clone()
        self.margin = problem.clean.new_full((len(problem.clean),), torch.inf)
        self.queries = 0
        """Evaluations of the objective."""

    def update(self, images: Tensor, margin: Tensor) -> None:
        """Take over the images that are better."""
        better = margin < self.margin
        self.images = torch.where(per_image(better), images, self.images)
        self.margin = torch.where(better, margin, self.margin)
        self.queries += 1


def per_image(values: Tensor) -> Tensor:
    """[B] → [B, 1, 1, 1], to broadcast over images."""
    return values[:, None, None, None]


def size_of(image: Tensor) -> Size:
    """(height, width) of [..., H, W]."""
    return image.shape[-2], image.shape[-1]
