"""Auto-PGD (Croce & Hein 2020) in the pixels of a patch: it chooses its step itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchcleanser.attacks.patch_attack import Attack
from patchcleanser.attacks.patch_problem import BestImages, PatchProblem, wide

MOMENTUM = 0.75
ENOUGH = 0.75
"""If fewer of the steps since the last checkpoint made the loss smaller, the step is halved."""
FIRST_STEP = 1.0
"""The paper's 2ε: pixels in [0, 1] are a ball of ε = 1/2 around grey."""


def checkpoints(iterations: int) -> list[int]:
    """When to look back: first after 22% of the iterations, then ever sooner, at least 6% apart.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap, least, less = (max(1, iterations * percent // 100) for percent in (22, 6, 3))
    found = [gap]
    while found[-1] + max(gap - less, least) <= iterations:
        gap = max(gap - less, least)
        found.append(found[-1] + gap)
    return found


@dataclass
class _Descent:
    """Where each candidate stands [B, …], and how its last steps went."""

    now: Tensor
    before: Tensor
    slope: Tensor
    loss: Tensor
    best: Tensor
    best_slope: Tensor
    best_loss: Tensor
    step: Tensor
    better: Tensor
    """Steps since the last checkpoint that made the loss smaller."""
    checked_step: Tensor
    checked_loss: Tensor

    @classmethod
    def begin(cls, pixels: Tensor, slope: Tensor, loss: Tensor) -> _Descent:
        step = torch.full_like(loss, FIRST_STEP)
        none = torch.zeros_like(loss)
        return cls(pixels, pixels, slope, loss, pixels, slope, loss, step, none, step, loss)

    def move(self, first: bool) -> Tensor:
        """The next pixels: a projected sign step, blended with the last movement."""
        ahead = (self.now - wide(self.step) * self.slope.sign()).clamp(0, 1)
        share = 1.0 if first else MOMENTUM
        return (self.now + share * (ahead - self.now) + (1 - share) * (self.now - self.before)).clamp(0, 1)

    def arrive(self, pixels: Tensor, slope: Tensor, loss: Tensor) -> None:
        self.better = self.better + (loss < self.loss)
        self.before, self.now, self.slope, self.loss = self.now, pixels, slope, loss
        improved = loss < self.best_loss
        self.best = torch.where(wide(improved), pixels, self.best)
        self.best_slope = torch.where(wide(improved), slope, self.best_slope)
        self.best_loss = torch.where(improved, loss, self.best_loss)

    def look_back(self, steps: int) -> None:
        """Halve the step and go back to the best pixels where too little was gained."""
        few = self.better < ENOUGH * steps
        stuck = (self.checked_step == self.step) & (self.checked_loss <= self.best_loss)
        self.checked_step, self.checked_loss = self.step, self.best_loss
        halve = few | stuck
        self.step = torch.where(halve, self.step / 2, self.step)
        self.now = torch.where(wide(halve), self.best, self.now)
        self.before = torch.where(wide(halve), self.best, self.before)
        self.slope = torch.where(wide(halve), self.best_slope, self.slope)
        self.loss = torch.where(halve, self.best_loss, self.loss)
        self.better = torch.zeros_like(self.better)


def apgd(problem: PatchProblem, iterations: int) -> BestImages:
    """From random pixels; every candidate has its own step, momentum and checkpoints."""
    best = BestImages.none(problem)

    def look(pixels: Tensor) -> tuple[Tensor, Tensor]:
        images = problem.pasted(pixels)
        found = problem.objective(images, slope=True)
        best.keep(images, found.margin)
        return found.slope, found.loss

    pixels = problem.noise()
    state = _Descent.begin(pixels, *look(pixels))
    checks, last = set(checkpoints(iterations)), 0
    for number in range(1, iterations + 1):
        pixels = state.move(first=number == 1)
        state.arrive(pixels, *look(pixels))
        if number in checks:
            state.look_back(number - last)
            last = number
    return best


class PatchAPGD(Attack):
    """The attack to report: nothing to tune, at least as strong as PGD for the same budget."""

    def optimise(self, problem: PatchProblem, iterations: int) -> BestImages:
        """Auto-PGD."""
        return apgd(problem, iterations)
