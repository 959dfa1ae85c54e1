"""What every search works on: candidates side by side, an objective to make small, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from patchcleanser.attacks.places import Place, free_pixels


class Found(NamedTuple):
    """What an objective says of a batch."""

    loss: Tensor
    """[B]: what the search makes small."""
    margin: Tensor
    """[B]: how far the goal is; below 0 it is reached."""
    slope: Tensor
    """[B, C, H, W]: the gradient of each candidate's loss; empty if it was not asked for."""


class Objective(Protocol):
    """Images of all candidates [B, C, H, W] → how well each does."""

    def __call__(self, images: Tensor, *, slope: bool) -> Found:
        """Always the whole batch, in its order."""


@dataclass(frozen=True)
class Problem:
    """B candidates: clean images, where each may be changed, and what is wanted."""

    clean: Tensor
    """[B, C, H, W] in [0, 1]."""
    free: Tensor
    """[B, 1, H, W]: True where the attacker chooses."""
    places: Sequence[Place]
    objective: Objective
    draws: Sequence[torch.Generator]
    """Each candidate's own chance."""

    @classmethod
    def of(cls, clean: Tensor, places: Sequence[Place], objective: Objective, seeds: Sequence[int]) -> Problem:
        """A problem on the device of the images."""
        size = clean.shape[-2], clean.shape[-1]
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        return cls(clean, free_pixels(places, size).to(clean.device), places, objective, draws)

    def pasted(self, pixels: Tensor) -> Tensor:
        """The clean images with these pixels where they may be changed."""
        return torch.where(self.free, pixels, self.clean)

    def noise(self) -> Tensor:
        """Uniform random pixels, each candidate by its own chance."""
        shape = self.clean.shape[1:]
        return torch.stack([torch.rand(shape, generator=draw) for draw in self.draws]).to(self.clean.device)


@dataclass
class Best:
    """The best images so far, by margin: a search may follow another loss, but the goal counts."""

    images: Tensor
    margin: Tensor
    queries: int = 0
    """Classifications, or steps of the objective, spent on each candidate."""

    @classmethod
    def none(cls, problem: Problem) -> Best:
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
