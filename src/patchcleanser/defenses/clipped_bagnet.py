"""Clipped BagNet: local logits are squashed into [-1, 1], so that no position has much influence."""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.local_defense import ImageScores, LocalRecovery, summed_margin
from patchcleanser.errors import InputError


class ClippedBagNet(LocalRecovery):
    """CBN, by Zhang et al. (2020): the answer is the class with the largest sum of tanh(scale * z + shift).

    The classifier is a network of small receptive fields (`net:bagnet`); 0.05 and -1 are the paper's.

    Certificate and proof: a squashed logit lies in [-1, 1], so the difference of two is never below -2. Where a patch
    reaches, the worst is assumed: -2 for the true class against any other. If the true class is ahead all the same,
    for every placement, no patch changes the answer; the sums are in local_defense.summed_margin, with a max_drop of 2.
    Checked by Coq for integer scores: proofs/LocalScores.v: summed_margin_is_a_lower_bound.
    """

    def __init__(
        self, classifier: AnyClassifier, threat: AnyThreat, *, scale: float = 0.05, shift: float = -1.0
    ) -> None:
        if not scale > 0:
            raise InputError(f"logits are squashed by a scale above 0, got {scale}")
        self.scale, self.shift = scale, shift
        super().__init__(classifier, threat)

    def transform_scores(self, scores: Tensor) -> Tensor:
        return torch.tanh(self.scale * scores + self.shift)

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        return summed_margin(image, label, footprint, max_drop=2.0)
