"""PatchGuard++: hide every window of features once; an alert if some label then differs. Detection, not recovery."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchcleanser.core.algorithms import first_failure, reporters
from patchcleanser.core.results import DetectionCertificate, DetectionVerdict
from patchcleanser.core.threats import Threat
from patchcleanser.defenses.local_defense import LocalBase, Scores, others, reached_sums
from patchcleanser.defenses.local_scores import LocalLogits
from patchcleanser.errors import InputError

CONFIDENCE_ROUNDING = 1e-5
"""A certificate asks for this much more confidence than an alert; how far scores round is counted before."""


class PatchGuardPlusPlus(LocalBase[DetectionVerdict, DetectionCertificate]):
    """By Xiang and Mittal (2021): Minority Reports in the space of a BagNet's features.

    A window is the set of local logits that one placement of the patch reaches. Without it, the mean
    of the other logits gives a label and a confidence, from one pass through the network for all
    windows. The answer is the label without any window hidden, or an alert if a window gives another
    label with a confidence above `threshold`.

    Certificate: the undefended label and the labels of all windows are the true one, those of the
    windows with a confidence above the threshold. The proof is that of core.algorithms.first_failure:
    some window hides every score that the patch reaches, so it says of the attacked image what it
    said of the clean one, the true label, confidently. A single patch is meant.
    """

    may_alert = True
    many_patches = False

    def __init__(self, classifier: Any, threat: Threat, *, threshold: float = 0.5) -> None:
        if not 0 <= threshold <= 1:
            raise InputError(f"a confidence threshold lies in [0, 1], got {threshold}")
        self.threshold = threshold
        super().__init__(classifier, threat)

    def _evidence(self) -> LocalLogits:
        return LocalLogits(self.classifier, self.threat.grid)

    def _verdict(self, case: Scores) -> DetectionVerdict:
        label = int(case.score.sum((1, 2)).argmax())
        logits = _without(case.score, case)
        labels, sure = logits.argmax(0).tolist(), logits.softmax(0).amax(0).tolist()
        reports = reporters(label, labels, sure, self.threshold)
        return DetectionVerdict(label, bool(reports), tuple(labels), reports, case.spent)

    def _certificate(self, case: Scores, label: int) -> DetectionCertificate:
        # At worst, in another batch: the label with what it surely has, all others with what they may have.
        worst = _without(case.high, case)
        worst[label] = _without(case.low, case)[label]
        sure = worst.softmax(0)[label].tolist()
        lead = (worst[label] - others(worst, label).amax(0)).tolist()
        labels = [label if ahead > 0 else -1 for ahead in lead]
        failing = first_failure(label, labels, sure, self.threshold + CONFIDENCE_ROUNDING)
        right = int(case.score.sum((1, 2)).argmax()) == label
        return DetectionCertificate(label, failing is None and right, failing, min(lead), case.spent)

    def _outcome(self, verdict: DetectionVerdict) -> int:
        return -1 if verdict.alert else verdict.label


def _without(scores: Tensor, case: Scores) -> Tensor:
    """The mean of the scores [classes, down, across] outside every window, in order: [classes, windows].

    It is 0 where nothing is left, which leads nobody; the difference of two equal sums might.
    """
    found = []
    for reach in case.reaches:
        left = torch.ones_like(scores[0])
        number = left.sum() - reached_sums(left, reach)
        sums = scores.sum((1, 2))[:, None, None] - reached_sums(scores, reach)
        found.append(torch.where(number > 0, sums / number.clamp_min(1.0), 0.0).flatten(1))
    return torch.cat(found, dim=1)
