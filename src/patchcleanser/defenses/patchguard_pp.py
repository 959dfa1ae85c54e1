"""PatchGuard++: hide every window of features once, and raise an alert if some label then differs."""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.algorithms import first_failure, reporters
from patchcleanser.core.results import DetectionCertificate, DetectionVerdict
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.local_defense import ImageScores, LocalScoreDefense, other_classes, reached_sums
from patchcleanser.errors import InputError

CONFIDENCE_ROUNDING = 1e-5
"""A certificate needs this much more confidence than an alert, for the rounding of softmax."""


class PatchGuardPlusPlus(LocalScoreDefense[DetectionVerdict, DetectionCertificate]):
    """By Xiang and Mittal (2021): Minority Reports in the space of a BagNet's features.

    A window is the set of local logits that one placement of the patch reaches. Without it, the mean of the other
    logits gives a label and a confidence, from one pass through the network for all windows. The answer is the label
    without any window hidden, or an alert if a window gives another label with a confidence above `threshold`.

    Certificate: the undefended label and the labels of all windows are the true one, those of the windows with a
    confidence above the threshold. The proof is that of core.algorithms.first_failure: some window hides every score
    that the patch reaches, so its label on the attacked image is that on the clean one, the true label, confidently
    (proofs/MinorityReports.v: never_silently_wrong, with local scores for pixels and windows for masks).
    This is detection, not recovery, of one patch.
    """

    may_alert = True
    many_patches = False

    def __init__(self, classifier: AnyClassifier, threat: AnyThreat, *, threshold: float = 0.5) -> None:
        if not 0 <= threshold <= 1:
            raise InputError(f"a confidence threshold lies in [0, 1], got {threshold}")
        self.threshold = threshold
        super().__init__(classifier, threat)

    def verdict(self, image: ImageScores) -> DetectionVerdict:
        label = int(image.scores.sum((1, 2)).argmax())
        means = _means_outside(image.scores, image)
        labels, confidences = means.argmax(0).tolist(), means.softmax(0).amax(0).tolist()
        reports = reporters(label, labels, confidences, self.threshold)
        return DetectionVerdict(label, bool(reports), tuple(labels), reports, image.classifications)

    def certificate(self, image: ImageScores, label: int) -> DetectionCertificate:
        # The worst case in another batch: the label at its lower bound, all other classes at their upper bounds.
        worst = _means_outside(image.high, image)
        worst[label] = _means_outside(image.low, image)[label]
        confidences = worst.softmax(0)[label].tolist()
        margins = (worst[label] - other_classes(worst, label).amax(0)).tolist()
        labels = [label if margin > 0 else -1 for margin in margins]
        failing = first_failure(label, labels, confidences, self.threshold + CONFIDENCE_ROUNDING)
        right = int(image.scores.sum((1, 2)).argmax()) == label
        return DetectionCertificate(label, failing is None and right, failing, min(margins), image.classifications)


def _means_outside(scores: Tensor, image: ImageScores) -> Tensor:
    """The mean of the scores [classes, down, across] outside every window, in order: [classes, windows].

    Where nothing is left it is 0 for every class, so none leads; the difference of two equal sums might round.
    """
    means = []
    for footprint in image.footprints:
        ones = torch.ones_like(scores[0])
        number = ones.sum() - reached_sums(ones, footprint)
        sums = scores.sum((1, 2))[:, None, None] - reached_sums(scores, footprint)
        means.append(torch.where(number > 0, sums / number.clamp_min(1.0), 0.0).flatten(1))
    return torch.cat(means, dim=1)
