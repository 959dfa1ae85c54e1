"""The attacker who knows the defense: patches where the proof fails, pixels against all masks at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.attacks.apgd import apgd_search
from patchcleanser.attacks.objectives import AttackPlan, MaskedObjective
from patchcleanser.attacks.patch_attack import (
    AttackResult,
    AttackSettings,
    attack_results,
    classifier_on_grid,
    generator_for,
    image_on_grid,
)
from patchcleanser.attacks.patch_problem import PatchProblem, Placement, size_of
from patchcleanser.attacks.square import square_search
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.results import Certificate, DetectionCertificate, DetectionVerdict, Verdict
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.defenses.minority_reports import MinorityReports
from patchcleanser.errors import ContradictionError, InputError

SHORTLIST = 64
"""The number of weakest placements that are compared in detail."""


@dataclass(frozen=True)
class AdaptiveResult:
    """A defense's verdict on an attacked image whose clean original it may have certified."""

    attacked: AttackResult
    verdict: Verdict | DetectionVerdict
    fooled: bool
    """Whether the defense answers a wrong label, and no alert."""
    certified: bool
    """Whether the clean image was (row-, or for detection) certified: then `fooled` must be False."""

    @property
    def contradiction(self) -> bool:
        """A certified image was fooled."""
        return self.certified and self.fooled


class AdaptiveAttack:
    """Against double-masking, challenger masking and Minority Reports.

    A patch is put where every mask that hides it fails the proof: its row of two-mask labels on the clean image has a
    wrong one, so that mask is no obstacle for any pixels. The pixels are then chosen so that all masks that do *not*
    hide the patch give one wrong label (a wrong majority), and so that masks that hide a part of it, if they stay
    right, are refuted in the second round by their weakest partner (no right disagreer is recovered). Against Minority
    Reports: so that the undefended label is wrong, and no mask contradicts it with confidence above the threshold. On
    a certified image no such place exists; the places of smallest margin are attacked. A coarse round is not
    aimed at: the attack is against the masks after it. Without gradients, pixels are searched at random.
    """

    def __init__(self, defense: MaskDefense[Any, Any], settings: AttackSettings | None = None) -> None:
        if not isinstance(defense, MaskDefense):
            raise InputError(
                "the adaptive attack takes a defense with masks, as DoubleMasking(classifier, threat), "
                f"got {type(defense).__name__}"
            )
        self.defense, self.settings = defense, settings or AttackSettings(locations=4)
        self.search = apgd_search if isinstance(defense.classifier, TorchClassifier) else square_search
        self.grid_classifier = classifier_on_grid(defense.classifier, defense.threat)
        self.detects = isinstance(defense, MinorityReports)

    def attack(self, image: Tensor, label: int) -> AdaptiveResult:
        """The worst patch found for one clean image with its true label; ContradictionError if it was certified."""
        (result,) = self.challenge([image], [label])
        if result.contradiction:
            places = " and ".join(map(str, result.attacked.windows))
            raise ContradictionError(
                f"a certified image of class {label} was fooled into {result.verdict.label} by a patch of {places} "
                f"(seed {self.settings.seed}); the defense, the classifier or this package is broken"
            )
        return result

    def challenge(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[AdaptiveResult]:
        """The same for many images at once; contradictions are returned, for the caller to raise."""
        pixels = [image_on_grid(image, self.defense.classifier, self.defense.threat) for image in images]
        if len({image.shape for image in pixels}) > 1:  # candidates are stacked, and share their masks
            return [self.challenge([x], [y])[0] for x, y in zip(images, labels, strict=True)]
        examinations = self.defense.examine(images, labels, maps=True)
        plans = [self._plans(e.table, y) for e, y in zip(examinations, labels, strict=True)]
        attacked = self._optimise(pixels, labels, plans)
        verdicts = defense_on_grid(self.defense).predict([result.image for result in attacked])
        pairs = iter(zip(attacked, verdicts, strict=True))
        results: list[AdaptiveResult] = []
        for examination, own, label in zip(examinations, plans, labels, strict=True):
            certified = is_certified(examination.certificate)
            tries = [
                AdaptiveResult(result, verdict, is_fooled(verdict, label), certified)
                for result, verdict in islice(pairs, len(own))
            ]
            results.append(min(tries, key=lambda t: (not t.fooled, t.attacked.margin)))
        return results

    def _optimise(
        self, images: Sequence[Tensor], labels: Sequence[int], plans: Sequence[Sequence[AttackPlan]]
    ) -> list[AttackResult]:
        draws = [generator_for(image, self.settings.seed) for image in images]
        problem = PatchProblem.build(images, labels, [[plan.placement for plan in own] for own in plans], draws)
        objective = MaskedObjective(
            self.grid_classifier,
            self.defense.mask_set(size_of(problem.clean)),
            [plan for own in plans for plan in own],
            threshold=self.defense.threshold if isinstance(self.defense, MinorityReports) else None,
            chunk=self.settings.chunk,
        )
        objective.choose_targets(problem.clean, self.settings.target)
        best = self.search(problem, objective, self.settings.iterations)
        return attack_results(best, problem, self.grid_classifier, self.settings)

    def _plans(self, table: LabelTable, label: int) -> list[AttackPlan]:
        """The weakest placements, and the labels that have to change at each."""
        cover = table.mask_set.cover(self.defense.threat)
        strength = _confidences(table, label) if self.detects else _row_margins(table, label)
        # A placement is as strong as the strongest mask that hides it.
        scores = np.where(cover.hides, strength, -np.inf).max(axis=1)
        short = np.argsort(scores, kind="stable")[:SHORTLIST]
        touching = {int(p): _touching(table, cover.placements[p]) & ~cover.hides[p] for p in short}
        # Where the proof fails, masks that hide a part of the patch decide: best if their rows fail too.
        order = sorted(touching, key=lambda p: (scores[p] > 0, _right_share(strength, touching[p]), scores[p]))
        return [
            self._plan(table, label, cover.placements[p], cover.hides[p], touching[p], rank)
            for p in order[: self.settings.locations]
            for rank in range(self.settings.restarts)
        ]

    def _plan(
        self,
        table: LabelTable,
        label: int,
        placement: Placement,
        hides: NDArray[np.bool_],
        touching: NDArray[np.bool_],
        rank: int,
    ) -> AttackPlan:
        wrong = [int(y) for y in table.labels[: len(hides)][hides] if y != label]
        unions = np.flatnonzero(~hides).tolist()
        if self.detects:
            return AttackPlan(placement, label, [UNMASKED, *unions], [], wrong, rank)
        index, margins = table.mask_set.unions.index, _signed_margins(table, label)
        pairs = [(int(i), int(index[i][margins[index[i]].argmin()])) for i in np.flatnonzero(touching)]
        return AttackPlan(placement, label, unions, pairs, wrong, rank)


def _signed_margins(table: LabelTable, label: int) -> NDArray[np.float32]:
    """Margins by union, negative where the label is wrong; infinite where it is not known."""
    right = table.labels[:-1] == label
    signed: NDArray[np.float32] = np.where(right, table.margins[:-1], -table.margins[:-1])
    return np.nan_to_num(signed, nan=np.inf)


def _row_margins(table: LabelTable, label: int) -> NDArray[np.float32]:
    """For each mask the smallest margin in its row of two-mask labels; below 0 the row has a wrong label."""
    rows: NDArray[np.float32] = _signed_margins(table, label)[table.mask_set.unions.index].min(axis=1)
    return rows


def _confidences(table: LabelTable, label: int) -> NDArray[np.float32]:
    """For each mask the confidence with which it contradicts a wrong label; -1 where it is wrong itself."""
    size = len(table.mask_set)
    confidences: NDArray[np.float32] = np.where(table.labels[:size] == label, table.confidences[:size], -1.0)
    return confidences


def _touching(table: LabelTable, placement: Placement) -> NDArray[np.bool_]:
    """Masks that hide at least a pixel of a patch."""
    masks = table.mask_set.masks
    return np.array([any(window.overlaps(patch) for window in mask for patch in placement) for mask in masks])


def _right_share(strength: NDArray[np.float32], touching: NDArray[np.bool_]) -> float:
    """The share of these masks whose rows are right."""
    return float((strength[touching] > 0).mean()) if touching.any() else 0.0


def is_certified(certificate: Certificate | DetectionCertificate) -> bool:
    """Whether the certificate promises that no patch of the threat misleads."""
    if isinstance(certificate, DetectionCertificate):
        return certificate.detection_certified
    return certificate.row_certified


def is_fooled(verdict: Verdict | DetectionVerdict, label: int) -> bool:
    """Whether the answer is wrong; an alert is no answer."""
    return verdict.label != label and not getattr(verdict, "alert", False)


def defense_on_grid(defense: MaskDefense[Any, Any]) -> MaskDefense[Any, Any]:
    """The same defense for images that are on the threat's grid already (see AttackResult.image).

    On the source grid that is the defense itself. On the input grid an attacked image is resized and cropped already.
    """
    if defense.threat.grid == "source":
        return defense
    on_grid = copy.copy(defense)
    on_grid.engine = defense.engine.with_classifier(classifier_on_grid(defense.classifier, defense.threat))
    return on_grid
