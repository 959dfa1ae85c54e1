"""Auto-PGD (Croce & Hein 2020) in the pixels of a patch: it chooses its step itself."""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser.attacks.patch_attack import Attack
from patchcleanser.attacks.patch_problem import BestImages, Objective, PatchProblem, per_image

MOMENTUM = 0.75
MIN_IMPROVED = 0.75
"""If a smaller share of the steps since the last checkpoint lowered the loss, the step is halved."""
FIRST_STEP = 1.0
"""The paper's 2ε: pixels in [0, 1] are a ball of ε = 1/2 around grey."""


def checkpoints(iterations: int) -> list[int]:
    """Iterations after which progress is checked: first after 22% of them, then ever sooner, at least 6% apart.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap, shortest, less = (max(1, iterations * percent // 100) for percent in (22, 6, 3))
    numbers = [gap]
    while numbers[-1] + max(gap - less, shortest) <= iterations:
        gap = max(gap - less, shortest)
        numbers.append(numbers[-1] + gap)
    return numbers


class _Descent:
    """The state of every candidate [B, …]: pixels now and before, the best ones, and how the last steps went."""

    def __init__(self, pixels: Tensor, gradient: Tensor, loss: Tensor) -> None:
        self.pixels = self.before = self.best = pixels
        self.gradient = self.best_gradient = gradient
        self.loss = self.best_loss = self.checked_loss = loss
        self.step = self.checked_step = torch.full_like(loss, FIRST_STEP)
        self.improved = torch.zeros_like(loss)
        """Steps since the last checkpoint that lowered the loss."""

    def next_pixels(self, first: bool) -> Tensor:
        """A projected sign step, blended with the last movement."""
        ahead = (self.pixels - per_image(self.step) * self.gradient.sign()).clamp(0, 1)
        share = 1.0 if first else MOMENTUM
        return (self.pixels + share * (ahead - self.pixels) + (1 - share) * (self.pixels - self.before)).clamp(0, 1)

    def advance(self, pixels: Tensor, gradient: Tensor, loss: Tensor) -> None:
        self.improved = self.improved + (loss < self.loss)
        self.before, self.pixels, self.gradient, self.loss = self.pixels, pixels, gradient, loss
        better = loss < self.best_loss
        self.best = torch.where(per_image(better), pixels, self.best)
        self.best_gradient = torch.where(per_image(better), gradient, self.best_gradient)
        self.best_loss = torch.where(better, loss, self.best_loss)

    def check(self, steps: int) -> None:
        """Halve the step and go back to the best pixels where too little was gained in the last `steps`."""
        few = self.improved < MIN_IMPROVED * steps
        stuck = (self.checked_step == self.step) & (self.checked_loss <= self.best_loss)
        self.checked_step, self.checked_loss = self.step, self.best_loss
        halve = few | stuck
        self.step = torch.where(halve, self.step / 2, self.step)
        self.pixels = torch.where(per_image(halve), self.best, self.pixels)
        self.before = torch.where(per_image(halve), self.best, self.before)
        self.gradient = torch.where(per_image(halve), self.best_gradient, self.gradient)
        self.loss = torch.where(halve, self.best_loss, self.loss)
        self.improved = torch.zeros_like(self.improved)


def apgd_search(problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
    """From random pixels; every candidate has its own step, momentum and checkpoints."""
    best = BestImages(problem)

    def evaluate(pixels: Tensor) -> tuple[Tensor, Tensor]:
        images = problem.paste(pixels)
        values = objective(images, gradient=True)
        best.update(images, values.margin)
        return values.gradient, values.loss

    pixels = problem.noise()
    state = _Descent(pixels, *evaluate(pixels))
    checks, last = set(checkpoints(iterations)), 0
    for number in range(1, iterations + 1):
        pixels = state.next_pixels(first=number == 1)
        state.advance(pixels, *evaluate(pixels))
        if number in checks:
            state.check(number - last)
            last = number
    return best


class PatchAPGD(Attack):
    """The attack to report: nothing to tune, at least as strong as PGD for the same budget."""

    def optimise(self, problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
        return apgd_search(problem, objective, iterations)
