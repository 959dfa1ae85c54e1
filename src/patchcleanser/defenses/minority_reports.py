"""Minority Reports: raise an alert if hiding some place changes the label. Detection, not recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from patchcleanser.core.tables import UNMASKED, LabelTable
from patchcleanser.core.threats import Threat
from patchcleanser.core.verdicts import DetectionCertificate, DetectionVerdict
from patchcleanser.defenses.base import Game, MaskDefense
from patchcleanser.errors import InputError


def reporters(undefended: int, one: Sequence[int], confidences: Sequence[float], threshold: float) -> tuple[int, ...]:
    """Masks whose label contradicts the undefended one with confidence above the threshold.

    >>> reporters(3, [3, 5, 5], [0.9, 0.4, 0.8], threshold=0.5)
    (2,)
    """
    return tuple(
        i
        for i, (label, sure) in enumerate(zip(one, confidences, strict=True))
        if label != undefended and sure > threshold
    )


def first_failure(label: int, one: Sequence[int], confidences: Sequence[float], threshold: float) -> int | None:
    """The first mask whose label is wrong or not confident enough, if any.

    Proof of the certificate: let all one-mask labels of a clean image be y with confidence
    above the threshold. A patch is hidden by some mask, under which the attacked image looks
    like the clean one: label y, with the same confidence. If the attacked image's undefended
    label is not y, that mask contradicts it confidently, and the alert fires. Both sides use
    >, so equality cannot slip between them, and the confidence under a mask has the same bits
    in both, whatever the batch (Batches._exact).
    """
    for i, (found, sure) in enumerate(zip(one, confidences, strict=True)):
        if found != label or not sure > threshold:
            return i
    return None


class MinorityReports(MaskDefense[DetectionVerdict, DetectionCertificate]):
    """Answers the undefended label, or an alert. A detection-certified image is never wrong *silently*.

    This is a weaker promise than recovery: an attacker can still deny an answer. Its
    certificates are a class of their own so that the two are never counted together.
    """

    may_alert = True

    def __init__(self, classifier: Any, threat: Threat, *, threshold: float = 0.5, **options: Any) -> None:
        if options.get("precision") == "fast":
            raise InputError("Minority Reports compares confidences, which fast labels lack; use precision='exact'")
        super().__init__(classifier, threat, **options)
        if not 0 <= threshold <= 1:
            raise InputError(f"a confidence threshold lies in [0, 1], got {threshold}")
        self.threshold = threshold

    def _verdict(self, table: LabelTable) -> Game[DetectionVerdict]:
        yield np.array([*table.masks(), UNMASKED])
        undefended, one = int(table.labels[UNMASKED]), table.one()
        reports = reporters(undefended, one, self._confidences(table), self.threshold)
        return DetectionVerdict(undefended, bool(reports), tuple(one), reports, table.spent)

    def _certificate(self, table: LabelTable, label: int, maps: bool) -> Game[DetectionCertificate]:
        yield np.array([*table.masks(), UNMASKED])
        failing = first_failure(label, table.one(), self._confidences(table), self.threshold)
        right = int(table.labels[UNMASKED]) == label
        return DetectionCertificate(label, failing is None and right, failing, table.margin, table.spent)

    def _confidences(self, table: LabelTable) -> list[float]:
        return [float(c) for c in table.confidences[: len(table.mask_set)]]

    def _outcome(self, verdict: DetectionVerdict) -> int:
        return -1 if verdict.alert else verdict.label
