"""Challenger masking: where labels disagree, masks are compared two at a time until one label is left."""

from __future__ import annotations

from typing import Any

from patchcleanser.core.algorithms import LabelFlow, certification_flow, challenger_flow
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Certificate, Verdict
from patchcleanser.core.threats import Threat
from patchcleanser.defenses.mask_defense import MaskDefense


class ChallengerMasking(MaskDefense[Verdict, Certificate]):
    """At most twice as many classifications as masks, the same certificate, a little less clean accuracy.

    The proof is in core.algorithms.certification_flow (proofs/ChallengerMasking.v: challenger_masking_keeps_the_label).
    """

    def __init__(self, classifier: Any, threat: Threat | str, *, seed: int | None = None, **options: Any) -> None:
        super().__init__(classifier, threat, **options)
        self.seed = seed

    def verdict_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        return challenger_flow(table, self.seed)

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[Certificate]:
        return certification_flow(table, label, self.threat, maps=maps)
