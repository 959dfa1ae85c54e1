"""The attacker who knows the defense: patches where the proof fails, pixels against all masks at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.attacks.apgd import apgd
from patchcleanser.attacks.objectives import AttackPlan, MaskedObjective
from patchcleanser.attacks.patch_attack import (
    AttackResult,
    AttackSettings,
    attack_results,
    classifier_on_grid,
    generator_for,
    image_on_grid,
    require_gradients,
    size_of,
)
from patchcleanser.attacks.patch_problem import BestImages, PatchProblem, Placement
from patchcleanser.attacks.square import square
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.geometry import Window
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.results import Certificate, DetectionCertificate, DetectionVerdict, Verdict
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.defenses.minority_reports import MinorityReports
from patchcleanser.errors import ContradictionError

SHORTLIST = 64
"""So many of the weakest placements are looked at more closely."""

Search = Callable[[PatchProblem, int], BestImages]


@dataclass(frozen=True)
class AdaptiveResult:
    """What a defense says of an attacked image whose clean original it may have certified."""

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

    A patch is put where every mask that hides it fails the proof: its row of two-mask labels on the
    clean image has a wrong one, so that mask is no obstacle whatever the pixels are. The pixels are
    then chosen so that all masks that do *not* hide the patch give one wrong label (a wrong
    majority), and so that masks that hide a part of it, if they stay right, are refuted in the second
    round by their weakest partner (no right disagreer is recovered). Against Minority Reports: so
    that the undefended label is wrong, and no mask contradicts it with confidence above the threshold.
    On a certified image no such place exists; the places of smallest margin are attacked.
    """

    def __init__(
        self, defense: MaskDefense[Any, Any], settings: AttackSettings | None = None, *, search: Search | None = None
    ) -> None:
        self.defense, self.settings = defense, settings or AttackSettings(locations=4)
        if search is None:
            search = apgd if isinstance(defense.classifier, TorchClassifier) else square
        if search is not square:
            require_gradients(defense.classifier)
        self.search = search
        self.seen = classifier_on_grid(defense.classifier, defense.threat)

    def attack(self, image: Tensor, label: int) -> AdaptiveResult:
        """The worst that was found for one clean image with its true label; ContradictionError if it was certified."""
        (found,) = self.challenge([image], [label])
        if found.contradiction:
            places = " and ".join(map(str, found.attacked.windows))
            raise ContradictionError(
                f"a certified image of class {label} was fooled into {found.verdict.label} by a patch of {places} "
                f"(seed {self.settings.seed}); the defense, the classifier or this package is broken"
            )
        return found

    def challenge(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[AdaptiveResult]:
        """The same for many images at once; contradictions are returned, for the caller to raise."""
        placed = [image_on_grid(image, self.defense.classifier, self.defense.threat) for image in images]
        if len({image.shape for image in placed}) > 1:  # candidates are stacked, and share their masks
            return [self.challenge([x], [y])[0] for x, y in zip(images, labels, strict=True)]
        examined = self.defense.examine(images, labels, maps=True)
        plans = [self._plans(e.table, y) for e, y in zip(examined, labels, strict=True)]
        found = self._optimised(placed, plans)
        verdicts = defense_on_grid(self.defense).predict([attacked.image for attacked in found])
        results: list[AdaptiveResult] = []
        at = 0
        for e, mine, label in zip(examined, plans, labels, strict=True):
            certified = proved(e.certificate)
            tries = [
                AdaptiveResult(attacked, verdict, is_fooled(verdict, label), certified)
                for attacked, verdict in zip(found[at : at + len(mine)], verdicts[at : at + len(mine)], strict=True)
            ]
            results.append(min(tries, key=lambda c: (not c.fooled, c.attacked.margin)))
            at += len(mine)
        return results

    def _optimised(self, images: Sequence[Tensor], plans: Sequence[Sequence[AttackPlan]]) -> list[AttackResult]:
        flat = [plan for mine in plans for plan in mine]
        clean = torch.stack([image for image, mine in zip(images, plans, strict=True) for _ in mine])
        threshold = self.defense.threshold if isinstance(self.defense, MinorityReports) else None
        masks = self.defense.mask_set(size_of(clean[0]))
        objective = MaskedObjective(self.seen, masks, flat, threshold=threshold, chunk=self.settings.chunk)
        objective.choose_targets(clean, self.settings.target)
        seeds = []
        for image, mine in zip(images, plans, strict=True):
            draw = generator_for(image, self.settings.seed)
            seeds += [int(torch.randint(2**62, (1,), generator=draw)) for _ in mine]
        problem = PatchProblem.of(clean, [plan.place for plan in flat], objective, seeds)
        best = self.search(problem, self.settings.iterations)
        truths = torch.tensor([plan.truth for plan in flat], device=clean.device)
        return attack_results(best, problem, self.seen, truths, self.settings)

    def _plans(self, table: LabelTable, label: int) -> list[AttackPlan]:
        """The weakest placements, and what has to be turned at each."""
        cover = table.mask_set.cover(self.defense.threat)
        detection = isinstance(self.defense, MinorityReports)
        strength = _sureness(table, label) if detection else _row_margins(table, label)
        # A placement is as strong as the strongest mask that hides it.
        scores = np.where(cover.hides, strength, -np.inf).max(axis=1)
        short = np.argsort(scores, kind="stable")[:SHORTLIST]
        touched = {int(p): _touching(table, cover.placements[p]) & ~cover.hides[p] for p in short}
        # Where the proof fails, masks that hide a part of the patch decide: best if their rows fail too.
        order = sorted(touched, key=lambda p: (scores[p] > 0, _standing(strength, touched[p]), scores[p]))
        chosen = order[: self.settings.locations]
        return [
            _plan(table, label, cover.placements[p], cover.hides[p], touched[p], rank, detection)
            for p in chosen
            for rank in range(self.settings.restarts)
        ]


def _plan(
    table: LabelTable,
    label: int,
    place: Placement,
    hides: NDArray[np.bool_],
    touched: NDArray[np.bool_],
    rank: int,
    detection: bool,
) -> AttackPlan:
    index, signed = table.mask_set.unions.index, _signed(table, label)
    ones = np.flatnonzero(~hides).tolist()
    pairs = [] if detection else [(int(i), int(index[i][signed[index[i]].argmin()])) for i in np.flatnonzero(touched)]
    wrong = [int(y) for y in table.labels[: len(hides)][hides] if y != label]
    return AttackPlan(place, label, ([UNMASKED] if detection else []) + ones, pairs, wrong, rank)


def _signed(table: LabelTable, label: int) -> NDArray[np.float32]:
    """Margins by union, negative where the label is wrong; infinite where it is not known."""
    right = table.labels[:-1] == label
    signed: NDArray[np.float32] = np.where(right, table.margins[:-1], -table.margins[:-1])
    return np.nan_to_num(signed, nan=np.inf)


def _row_margins(table: LabelTable, label: int) -> NDArray[np.float32]:
    """For each mask the smallest margin in its row of two-mask labels; below 0 its row has a wrong one."""
    rows: NDArray[np.float32] = _signed(table, label)[table.mask_set.unions.index].min(axis=1)
    return rows


def _sureness(table: LabelTable, label: int) -> NDArray[np.float32]:
    """For each mask the confidence with which it contradicts a wrong label; none where it is wrong itself."""
    size = len(table.mask_set)
    sure: NDArray[np.float32] = np.where(table.labels[:size] == label, table.confidences[:size], -1.0)
    return sure


def _touching(table: LabelTable, place: Placement) -> NDArray[np.bool_]:
    """Masks that hide at least a pixel of a patch."""
    return np.array([any(_meet(w, patch) for w in mask for patch in place) for mask in table.mask_set.masks])


def _meet(one: Window, other: Window) -> bool:
    down = one.top < other.bottom and other.top < one.bottom
    return down and one.left < other.right and other.left < one.right


def _standing(strength: NDArray[np.float32], touched: NDArray[np.bool_]) -> float:
    """The share of these masks whose rows stand."""
    return float((strength[touched] > 0).mean()) if touched.any() else 0.0


def proved(certificate: Certificate | DetectionCertificate) -> bool:
    """Whether the certificate promises that no patch of the threat misleads."""
    if isinstance(certificate, DetectionCertificate):
        return certificate.detection_certified
    return certificate.row_certified


def is_fooled(verdict: Verdict | DetectionVerdict, label: int) -> bool:
    """Whether the answer is wrong; an alert is no answer."""
    return verdict.label != label and not getattr(verdict, "alert", False)


def defense_on_grid(defense: MaskDefense[Any, Any]) -> MaskDefense[Any, Any]:
    """The same defense for images that are on the threat's grid already (see AttackResult.image).

    On the source grid that is the defense itself. On the input grid an attacked image is resized and
    cropped, and must not be resized again.
    """
    if defense.threat.grid == "source":
        return defense
    twin = copy.copy(defense)
    twin.engine = defense.engine.with_classifier(classifier_on_grid(defense.classifier, defense.threat))
    return twin
