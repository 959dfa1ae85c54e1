"""Minority Reports: raise an alert if hiding some place changes the label. Detection, not recovery."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.classifiers.torch import ends_in
from patchcleanser.core.algorithms import LabelFlow, detection_certification_flow, detection_flow
from patchcleanser.core.geometry import is_number
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.masks import MaskSet, PerAxis
from patchcleanser.core.results import DetectionCertificate, DetectionVerdict
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import InputError


class MinorityReports(MaskDefense[DetectionVerdict, DetectionCertificate]):
    """Answers the undefended label, or an alert. A detection-certified image is never wrong *silently*.

    This is a weaker promise than recovery: an attacker can still deny an answer. Its
    certificates are a class of their own so that the two are never counted together.
    The proof is in core.algorithms.first_failure (proofs/MinorityReports.v: never_silently_wrong).
    """

    may_alert = True

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        *,
        threshold: float = 0.5,
        masks: PerAxis = None,
        stride: PerAxis = None,
        precision: Precision = "exact",
        confirm: Confirm = "sampled",
        mask_set: MaskSet | None = None,
        chunk: int | None = None,
    ) -> None:
        if precision == "fast":
            raise InputError("Minority Reports compares confidences, which fast labels lack; use precision='exact'")
        own: dict[str, Any] = {"masks": masks, "stride": stride, "mask_set": mask_set, "chunk": chunk}
        super().__init__(classifier, threat, **own, precision=precision, confirm=confirm)
        if not is_number(threshold) or not 0 <= threshold <= 1:
            raise InputError(f"a confidence threshold lies in [0, 1], got {threshold!r}")
        if ends_in(getattr(self.classifier, "module", None), nn.Softmax):
            logging.getLogger("patchcleanser").warning(
                "the network ends in a softmax, and confidences are the softmax of its output: they are all too small, "
                "and few are above the threshold %s; take the softmax out",
                threshold,
            )
        self.threshold = threshold

    def verdict_flow(self, table: LabelTable) -> LabelFlow[DetectionVerdict]:
        return detection_flow(table, self.threshold)

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[DetectionCertificate]:
        return detection_certification_flow(table, label, self.threshold)
