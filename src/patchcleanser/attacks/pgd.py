"""Projected gradient descent in the pixels of a patch: sign steps that grow smaller."""

from __future__ import annotations

from typing import Literal

from patchcleanser.attacks.base import Attack, AttackSettings
from patchcleanser.attacks.search import Best, Problem
from patchcleanser.classifiers.base import Classifier
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

Schedule = Literal["linear", "constant"]


def pgd(problem: Problem, iterations: int, *, step: float = 0.25, schedule: Schedule = "linear") -> Best:
    """From random pixels, steps by the sign of the slope, kept in [0, 1].

    The step falls linearly to 0.01 (large ones cross the landscape, small ones settle), or stays.
    """
    best, pixels = Best.none(problem), problem.noise()
    for number in range(iterations):
        images = problem.pasted(pixels)
        found = problem.objective(images, slope=True)
        best.keep(images, found.margin)
        size = step if schedule == "constant" else max(step * (1 - number / iterations), min(step, 0.01))
        pixels = (pixels - size * found.slope.sign()).clamp(0, 1)
    images = problem.pasted(pixels)
    best.keep(images, problem.objective(images, slope=False).margin)
    return best


class PatchPGD(Attack):
    """The plain attack of the literature.

    >>> import torch
    >>> from patchcleanser import Threat, TorchClassifier
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3)).eval()
    >>> attack = PatchPGD(TorchClassifier(net), Threat.square(3), AttackSettings(iterations=5))
    >>> attack.attack(torch.full((3, 8, 8), 0.5), 0).queries
    7
    """

    def __init__(
        self,
        classifier: Classifier,
        threat: Threat,
        settings: AttackSettings | None = None,
        *,
        step: float = 0.25,
        schedule: Schedule = "linear",
    ) -> None:
        super().__init__(classifier, threat, settings)
        if not 0 < step <= 1 or schedule not in ("linear", "constant"):
            raise InputError(f"a step lies in (0, 1] and a schedule is linear or constant, got {step} and {schedule!r}")
        self.step = step
        self.schedule: Schedule = schedule

    def optimise(self, problem: Problem, iterations: int) -> Best:
        """Projected gradient descent."""
        return pgd(problem, iterations, step=self.step, schedule=self.schedule)
