"""Clipped BagNet: local logits squashed into [-1, 1], so that no place can say much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.core.threats import Threat
from patchcleanser.defenses.local_defense import LocalDefense, Scores, summed_ahead
from patchcleanser.defenses.local_scores import LocalLogits
from patchcleanser.errors import InputError


class ClippedBagNet(LocalDefense):
    """CBN, by Zhang et al. (2020): the answer is the class with the largest sum of tanh(scale * z + shift).

    The classifier is a network of small receptive fields (`net:bagnet`); 0.05 and -1 are the paper's.

    Certificate and proof: a squashed logit lies in [-1, 1], so the difference of two is never below
    -2. Where a patch reaches, the worst is assumed: -2 for the true class against any other. If
    the true class is ahead all the same, for every placement, no patch changes the answer; the sums
    are in local.summed_ahead, with a swing of 2.
    """

    def __init__(self, classifier: Any, threat: Threat, *, scale: float = 0.05, shift: float = -1.0) -> None:
        if not scale > 0:
            raise InputError(f"logits are squashed by a scale above 0, got {scale}")
        self.scale, self.shift = scale, shift
        super().__init__(classifier, threat)

    def _evidence(self) -> LocalLogits:
        return LocalLogits(self.classifier, self.threat.grid)

    def _scored(self, local: Tensor) -> Tensor:
        return torch.tanh(self.scale * local + self.shift)

    def _totals(self, case: Scores) -> Tensor:
        return case.score.sum((1, 2))

    def _ahead(self, case: Scores, label: int, reach: Footprint) -> Tensor:
        return summed_ahead(case, label, reach, swing=2.0)
