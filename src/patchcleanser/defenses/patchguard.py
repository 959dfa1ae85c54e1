"""PatchGuard: for each class, take away the window of scores that speaks for it most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.core.threats import Threat
from patchcleanser.defenses.local_defense import LocalDefense, Scores, others, reached_sums
from patchcleanser.defenses.local_scores import Evidence, LocalLogits
from patchcleanser.defenses.smoothing import Ablating
from patchcleanser.errors import InputError


class RobustMasking(LocalDefense):
    """Robust masking, by Xiang et al. (2021), on local scores clipped to at least 0.

    A window is the set of scores that one placement of the patch reaches. For each class, the window
    with the largest sum for that class is taken away, if it holds more than `ratio` of the class's
    whole sum (0, the paper's, always does). The class with the largest rest is the answer.

    Certificate: for every window w of the clean image, let A be the true class's scores outside w.
    sum(A) minus the largest window of A must exceed, for each other class c, the sum of c's scores
    outside w, divided by 1 - ratio.

    Proof. The patch changes scores in some window w only; write V ≥ 0 for what it puts there.

    - Another class c: if a window is taken away, it holds at least as much as w does now, so what is
      left is at most c's sum outside w, which is unchanged. If none is, then w holds at most
      `ratio` of the whole, so the whole is at most the sum outside w divided by 1 - ratio.
    - The true class: its whole is sum(A) + sum(V), and each window holds at most its part of A plus
      sum(V). So what is left is at least sum(A) minus the largest window of A, masked or not.

    The proof is for one window, so for one patch.
    """

    many_patches = False

    def __init__(self, classifier: Any, threat: Threat, *, ratio: float = 0.0) -> None:
        if not 0 <= ratio < 1:
            raise InputError(f"the share of a class's sum that a window must hold lies in [0, 1), got {ratio}")
        self.ratio = ratio
        super().__init__(classifier, threat)

    def _scored(self, local: Tensor) -> Tensor:
        return local.clamp_min(0.0)

    def _totals(self, case: Scores) -> Tensor:
        whole, window = case.score.sum((1, 2)), _largest(case.score, case.reaches)
        return torch.where(window > self.ratio * whole, whole - window, whole)

    def _ahead(self, case: Scores, label: int, reach: Footprint) -> Tensor:
        rivals = others(case.high, label)
        # Where the window is all there is, rounding leaves a little more or less than nothing.
        outside = (rivals.sum((1, 2))[:, None, None] - reached_sums(rivals, reach)).clamp_min(0.0)
        rows, columns = (torch.from_numpy(m).to(case.low.device) for m in (reach.rows, reach.columns))
        inside = rows[:, None, :, None] & columns[None, :, None, :]
        left = case.low[label] * ~inside
        mine = left.sum((2, 3)) - _largest(left, case.reaches)
        return mine - outside.amax(0) / (1 - self.ratio)


class PatchGuard(RobustMasking):
    """PG-BN: robust masking of the local logits of a BagNet (`net:bagnet`)."""

    def _evidence(self) -> Evidence:
        return LocalLogits(self.classifier, self.threat.grid)


class PatchGuardSmoothing(Ablating, RobustMasking):
    """PG-DS: robust masking of the confidences of ablated views, those of de-randomized smoothing."""


def _largest(scores: Tensor, reaches: tuple[Footprint, ...]) -> Tensor:
    """The largest sum of any window, for each map of scores [..., down, across]."""
    return torch.stack([reached_sums(scores, reach).amax((-2, -1)) for reach in reaches]).amax(0)
