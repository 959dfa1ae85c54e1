"""Projected gradient descent in the pixels of a patch: sign steps that grow smaller."""

from __future__ import annotations

from typing import Literal

from patchcleanser.attacks.patch_attack import Attack, AttackSettings
from patchcleanser.attacks.patch_problem import BestImages, Objective, PatchProblem
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

Schedule = Literal["linear", "constant"]


class PatchPGD(Attack):
    """The standard attack of the literature: from random pixels, steps by the sign of the gradient, kept in [0, 1].

    The step falls linearly to 0.01 (large steps explore, small ones converge), or stays constant.

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

    def optimise(self, problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
        best, pixels, step = BestImages(problem), problem.noise(), self.step
        for number in range(iterations):
            images = problem.paste(pixels)
            values = objective(images, gradient=True)
            best.update(images, values.margin)
            if self.schedule == "linear":
                step = max(self.step * (1 - number / iterations), min(self.step, 0.01))
            pixels = (pixels - step * values.gradient.sign()).clamp(0, 1)
        images = problem.paste(pixels)
        best.update(images, objective(images, gradient=False).margin)
        return best
