"""RecoveryMasking: what double-masking and challenger masking share, and the coarse round before them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.algorithms import LabelFlow, certification_flow, coarse_first_flow
from patchcleanser.core.geometry import Size, is_integer
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.masks import MaskSet, PerAxis, masks_per_axis
from patchcleanser.core.results import Certificate, Verdict
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.mask_defense import MaskDefense, MaskSets
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import MaskError

FEWEST_COARSE = 2
"""A single coarse mask would hide the whole image."""


class RecoveryMasking(MaskDefense[Verdict, Certificate]):
    """Recovers the true label. `coarse` larger masks per axis are tried first, if the number is not 0.

    If the labels under the coarse masks agree, they are the answer; if not, the fine masks decide. A certificate then
    also demands that the coarse masks with the true label cover the threat. The proof is in
    core.algorithms.certification_flow (proofs/CoarseFirst.v: coarse_first_and_row_certified_keeps_the_label).
    """

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        *,
        coarse: int = 0,
        masks: PerAxis = None,
        stride: PerAxis = None,
        precision: Precision = "exact",
        confirm: Confirm = "sampled",
        mask_set: MaskSet | None = None,
        chunk: int | None = None,
    ) -> None:
        own: dict[str, Any] = {"masks": masks, "stride": stride, "mask_set": mask_set, "chunk": chunk}
        super().__init__(classifier, threat, **own, precision=precision, confirm=confirm)
        if not is_integer(coarse) or (coarse != 0 and coarse < FEWEST_COARSE):
            raise MaskError(
                f"coarse is the number of larger masks per axis that are tried first: 0 for none, or at least "
                f"{FEWEST_COARSE}; got {coarse!r}"
            )
        if mask_set is None and stride is None and coarse >= max(masks_per_axis(masks, None)[0]):
            down, across = masks_per_axis(masks, None)[0]
            raise MaskError(f"coarse masks are fewer per axis than the {down}×{across} masks after them, got {coarse}")
        self.coarse = coarse
        self._coarse_sets = MaskSets(self.threat, coarse) if coarse else None

    def empty_table(self, size: Size) -> LabelTable:
        coarse = LabelTable(self._coarse_sets.of(size)) if self._coarse_sets else None
        return LabelTable(self.mask_set(size), coarse)

    def verdict_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        return coarse_first_flow(table, self._fine_flow)

    @abstractmethod
    def _fine_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        """Decide by the fine masks."""

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[Certificate]:
        return certification_flow(table, label, self.threat, maps=maps)
