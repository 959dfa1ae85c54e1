"""De-randomized smoothing: each view keeps one band or block, and the classes are voted on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.local_defense import ImageScores, LocalRecovery
from patchcleanser.defenses.local_scores import Ablation, AblationScores
from patchcleanser.errors import InputError


class AblationDefense(LocalRecovery):
    """Takes its scores from ablated views; `ablation` is columns, rows or blocks, of `keep` px."""

    threshold: float | None = None
    """If set, views vote for every class whose confidence is above it."""

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        *,
        ablation: Ablation = "columns",
        keep: int = 4,
        **options: Any,
    ) -> None:
        self.ablation, self.keep = ablation, keep
        super().__init__(classifier, threat, **options)

    def score_source(self) -> AblationScores:
        return AblationScores(
            self.classifier, self.threat.grid, ablation=self.ablation, keep=self.keep, threshold=self.threshold
        )


class Smoothing(AblationDefense):
    """DS, by Levine and Feizi (2020). `ablation` is columns, rows or blocks, of `keep` px.

    The classifier sees every band (or block) of the image alone, in all positions, wrapped around the border. A view
    votes for every class whose confidence is above `threshold`. The class with the most votes is the answer, of
    equals the smallest. With a mask-aware ViT that drops hidden tokens (`tokens:…`) this is Smoothed ViT (Salman et
    al., 2022).

    Certificate: n(y) ≥ n(c) + [c < y] + 2Δ for every other class c, where Δ is the most views that the threat's
    patches can reach: m + s - 1 for bands of s px and one patch of m px.

    Proof. A view that sees no pixel of a patch is the same on the attacked image, and so are its votes. Each of the at
    most Δ others takes at most one vote from y and gives at most one to c. So n(y) ≥ n(c) + [c < y] still holds under
    attack, and y wins, also where votes are equal. Several patches reach at most Δ views each. Checked by Coq:
    proofs/LocalScores.v: smoothing_keeps_the_label, proofs/LocalScores.v:
    several_patches_reach_at_most_so_many_views_each.

    >>> import torch
    >>> from patchcleanser import CallableClassifier, Threat
    >>> bright = lambda x: 9 * torch.stack([x.amax((1, 2, 3)), 1 - x.amax((1, 2, 3))], 1)
    >>> defense = Smoothing(CallableClassifier(bright, array="torch"), Threat.square(2), keep=2)
    >>> [c.certified for c in defense.certify(torch.ones(1, 3, 16, 16), [0])]
    [True]
    """

    def __init__(self, classifier: AnyClassifier, threat: AnyThreat, *, threshold: float = 0.3, **options: Any) -> None:
        if not isinstance(threshold, (int, float)):  # without one, scores would not be votes, and the proof not hold
            raise InputError(f"a confidence threshold lies in [0, 1], got {threshold}")
        self.threshold = threshold
        super().__init__(classifier, threat, **options)

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        """The same for every placement, as published: only the number of views that can be reached counts."""
        votes, rivals = image.low.sum((1, 2))[label], image.high.sum((1, 2))
        rivals = rivals + (torch.arange(len(rivals), device=rivals.device) < label)
        rivals[label] = -torch.inf
        # Votes are whole numbers, so ≥ is > with one vote less.
        margin = votes - rivals.max() - 2 * image.patches * footprint.max_scores + 1
        return margin.expand(1, 1)
