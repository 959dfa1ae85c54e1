"""Patches that turn classes of a multi-label image around, by the attacker who knows the defense.

An attack can refute a certificate; it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.attacks.adaptive import AdaptiveAttack, defense_on_grid
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import CallableClassifier, Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.multilabel import Bools
from patchcleanser.core.results import Result
from patchcleanser.defenses.double_masking import DoubleMasking
from patchcleanser.defenses.multilabel_masking import MultiLabelExamination, MultiLabelMasking
from patchcleanser.networks.wrapper import logits_in

CERTIFIED_CLASSES, OTHER_CLASSES = 2, 1
"""How many classes of an image are attacked: certified ones of the smallest lead, and others."""


@dataclass(frozen=True, repr=False)
class FlipResult(Result):
    """One class of one image under attack."""

    image: int
    label: int
    """The class, by its number."""
    present: bool
    """Whether the image truly shows it."""
    certified: bool
    """Whether its answer is certified at every placement."""
    undefended_wrong: bool
    """Whether the undefended classifier is wrong about the class under attack."""
    defended_wrong: bool
    true_positives: int
    """Of all classes of the attacked image, with the defense."""
    false_positives: int
    promised: tuple[int, int]
    """At least so many true positives, and at most so many false ones."""
    queries: int = 0
    """Classifications by the attacker."""

    @property
    def broken(self) -> bool:
        """Whether the certificate is refuted: this must never be."""
        least, most = self.promised
        return (self.certified and self.defended_wrong) or self.true_positives < least or self.false_positives > most


class OneClass(nn.Module):
    """Two logits, absent and present, from the score of one class of a network: 0, and how far it is above `threshold`.

    The threshold is that of a logit. Probabilities are turned into logits, in which gradients do not vanish.
    """

    def __init__(self, network: nn.Module, number: int, threshold: float, *, probabilities: bool) -> None:
        super().__init__()
        self.network, self.number, self.threshold, self.probabilities = network, number, threshold, probabilities

    def forward(self, inputs: Tensor) -> Tensor:
        score = logits_in(self.network(inputs))[:, self.number]
        logit = torch.logit(score, eps=1e-6) if self.probabilities else score
        return torch.stack([torch.zeros_like(logit), logit - self.threshold], dim=1)


def one_class(defense: MultiLabelMasking, place: int) -> Classifier:
    """The classifier of one class: label 1 if it is present. Its double-masking is that of the class.

    `place` is the place of the class among those that count. Without gradients the patch is searched at random.
    """
    classifier, share = defense.classifier, float(defense.threshold[place if len(defense.threshold) > 1 else 0])
    number = place if defense.outputs is None else int(defense.outputs[place])
    threshold, probabilities = float(np.log(share / (1 - share))), defense.scores == "probabilities"
    if isinstance(classifier, TorchClassifier) and classifier.plain:
        module = OneClass(classifier.ready_module, number, threshold, probabilities=probabilities)
        view = TorchClassifier(module.eval(), classifier.preprocessing, classes=2)
        view.multi_label = ""  # whatever the network inside ends in, these two exclude each other
        return view
    scores = OneClass(_Logits(classifier), number, threshold, probabilities=probabilities).eval()
    return CallableClassifier(scores, classifier.preprocessing, array="torch", classes=2, device=classifier.device)


class _Logits(nn.Module):
    """A classifier as a module of prepared inputs."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier.checked_logits(inputs)


def attack_classes(
    defense: MultiLabelMasking,
    images: Sequence[Tensor],
    truths: Sequence[Bools],
    settings: AttackSettings | None = None,
) -> Iterator[FlipResult]:
    """Attack classes of clean images [C, H, W] with their true classes, each class by a patch of its own.

    For one class the defense is double-masking with two labels, so AdaptiveAttack attacks it as it is: where the
    proof of the class is weakest, against all masks at once. Certified are attacked the classes of the smallest
    lead, and one more that is not certified. Every attacked image is answered by the multi-label defense, and compared
    with all that its certificate promises.
    """
    for number, (image, truth) in enumerate(zip(images, truths, strict=True)):
        (examined,) = defense.examine(image[None], [truth])
        for place, certified in targets(defense, examined):
            attack = AdaptiveAttack(
                DoubleMasking(one_class(defense, place), defense.threat, mask_set=examined.table.mask_set), settings
            )
            label = int(examined.truth[place])
            (result,) = attack.challenge([image], [label])
            changed = result.attacked.image
            (verdict,) = defense_on_grid(defense).predict(changed[None])
            present = np.zeros(len(truth), dtype=bool)
            present[list(verdict.present)] = True
            certificate = examined.certificate
            yield FlipResult(
                image=number,
                label=place,
                present=bool(label),
                certified=certified,
                undefended_wrong=result.attacked.fooled,
                defended_wrong=bool(present[place] != examined.truth[place]),
                true_positives=int((present & examined.truth).sum()),
                false_positives=int((present & ~examined.truth).sum()),
                promised=(certificate.true_positives, certificate.false_positives),
                queries=result.attacked.queries,
            )


def targets(defense: MultiLabelMasking, examined: MultiLabelExamination) -> list[tuple[int, bool]]:
    """Classes to attack, and whether each is certified: those whose bounds are nearest to their thresholds."""
    everywhere, thresholds = examined.bounds.placed(examined.hides).each_class(), defense.score_thresholds
    lead = np.where(examined.truth, everywhere.low[0] - thresholds, thresholds - everywhere.high[0])
    certified = everywhere.right(examined.truth, thresholds)[0]
    order = np.argsort(np.abs(lead), kind="stable")
    chosen = [*order[certified[order]][:CERTIFIED_CLASSES], *order[~certified[order]][:OTHER_CLASSES]]
    return [(int(place), bool(certified[place])) for place in chosen]
