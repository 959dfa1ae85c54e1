"""PatchGuard: for each class, take away the window of scores with the most evidence for it."""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.local_defense import ImageScores, LocalRecovery, other_classes, reached_sums
from patchcleanser.defenses.smoothing import AblationDefense
from patchcleanser.errors import InputError


class PatchGuard(LocalRecovery):
    """PG-BN: robust masking, by Xiang et al. (2021), of the local logits of a BagNet (`net:bagnet`), clipped at 0.

    A window is the set of scores that one placement of the patch reaches. For each class, the window with the
    largest sum for that class is taken away, if it holds more than `ratio` of the class's total (0, the paper's,
    always does). The class with the largest rest is the answer.

    Certificate: for every window w of the clean image, let A be the true class's scores outside w. sum(A) minus the
    largest window of A must exceed, for each other class c, the sum of c's scores outside w, divided by 1 - ratio.

    Proof. The patch changes scores in some window w only; write V ≥ 0 for what it puts there.

    - Another class c: if a window is taken away, it holds at least as much as w does now, so what is left is at most
      c's sum outside w, which is unchanged. If none is, then w holds at most `ratio` of the total, so the total is at
      most the sum outside w divided by 1 - ratio.
    - The true class: its total is sum(A) + sum(V), and each window holds at most its part of A plus sum(V). So what
      is left is at least sum(A) minus the largest window of A, masked or not.

    The proof is for one window, so for one patch; Coq has checked it for integer scores (proofs/LocalScores.v:
    patchguard_keeps_the_label).
    """

    many_patches = False

    def __init__(self, classifier: AnyClassifier, threat: AnyThreat, *, ratio: float = 0.0) -> None:
        if not 0 <= ratio < 1:
            raise InputError(f"the share of a class's sum that a window must hold lies in [0, 1), got {ratio}")
        self.ratio = ratio
        super().__init__(classifier, threat)

    def transform_scores(self, scores: Tensor) -> Tensor:
        return scores.clamp_min(0.0)

    def class_scores(self, image: ImageScores) -> Tensor:
        total, window = image.scores.sum((1, 2)), _largest_window(image.scores, image.footprints)
        return torch.where(window > self.ratio * total, total - window, total)

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        rivals = other_classes(image.high, label)
        # Where the window is all there is, rounding leaves a little more or less than nothing.
        outside = (rivals.sum((1, 2))[:, None, None] - reached_sums(rivals, footprint)).clamp_min(0.0)
        rows, columns = (torch.from_numpy(m).to(image.low.device) for m in (footprint.rows, footprint.columns))
        inside = rows[:, None, :, None] & columns[None, :, None, :]
        left = image.low[label] * ~inside
        return left.sum((2, 3)) - _largest_window(left, image.footprints) - outside.amax(0) / (1 - self.ratio)


class PatchGuardSmoothing(AblationDefense, PatchGuard):
    """PG-DS: robust masking of the confidences of ablated views, those of de-randomized smoothing."""


def _largest_window(scores: Tensor, footprints: tuple[Footprint, ...]) -> Tensor:
    """The largest sum of any window, for each map of scores [..., down, across]."""
    return torch.stack([reached_sums(scores, footprint).amax((-2, -1)) for footprint in footprints]).amax(0)
