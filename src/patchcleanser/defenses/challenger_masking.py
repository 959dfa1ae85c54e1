"""Challenger masking: where labels disagree, masks are compared two at a time until one label is left."""

from __future__ import annotations

from typing import Any

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.algorithms import LabelFlow, challenger_flow
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Verdict
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.recovery_masking import RecoveryMasking


class ChallengerMasking(RecoveryMasking):
    """Fewer classifications than double-masking, the same certificate, a little less clean accuracy.

    The proof is in core.algorithms.certification_flow (proofs/ChallengerMasking.v: challenger_masking_keeps_the_label).
    """

    def __init__(
        self, classifier: AnyClassifier, threat: AnyThreat, *, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(classifier, threat, **options)
        self.seed = seed

    def _fine_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        return challenger_flow(table, self.seed)
