"""The attacker who knows the defense breaks what is not certified, and nothing that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchcleanser import (
    CallableClassifier,
    ChallengerMasking,
    DoubleMasking,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
)
from patchcleanser.attacks import AdaptiveAttack
from patchcleanser.attacks.adaptive import defense_on_grid
from patchcleanser.attacks.objectives import AttackPlan, MaskedObjective
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Certificate
from patchcleanser.errors import ContradictionError

THREAT = Threat.square(3)
BUDGET = AttackSettings(iterations=15, locations=2)
DEFENSES = {"double": DoubleMasking, "challenger": ChallengerMasking, "minority": MinorityReports}


def red(size: int = 12) -> Tensor:
    """Red all over: no small patch can change that."""
    image = torch.full((3, size, size), 0.3)
    image[0] = 0.7
    return image


def blob(size: int = 12) -> Tensor:
    """Red only because of one red spot; whoever covers it sees green."""
    image = torch.full((3, size, size), 0.4)
    image[1] = 0.45
    image[0, 4:7, 4:7] = 1.0
    image[0] += 0.02
    return image.clamp(0, 1)


@pytest.mark.parametrize("name", DEFENSES)
def test_the_adaptive_attack_fools_what_is_not_certified_and_nothing_that_is(
    colour: TorchClassifier, name: str
) -> None:
    defense = DEFENSES[name](colour, THREAT, masks=3)
    weak, strong = AdaptiveAttack(defense, BUDGET).challenge([blob(), red()], [0, 0])
    assert not weak.certified
    assert weak.fooled
    assert weak.verdict.label != 0
    assert strong.certified
    assert not strong.fooled
    (again,) = defense.predict([weak.attacked.image])
    assert again == weak.verdict


@pytest.mark.parametrize("count", [1, 2])
def test_patches_stay_inside_the_threat(colour: TorchClassifier, count: int) -> None:
    threat = Threat.square(2, count=count)
    result = AdaptiveAttack(DoubleMasking(colour, threat, masks=2), AttackSettings(iterations=3)).attack(blob(), 0)
    assert len(result.attacked.windows) == count
    changed = (result.attacked.image != blob()).any(0)
    for w in result.attacked.windows:
        assert (w.height, w.width) == (2, 2)
        changed[w.top : w.bottom, w.left : w.right] = False
    assert not changed.any()


def test_any_rectangle_can_be_attacked(colour: TorchClassifier) -> None:
    defense = DoubleMasking(colour, Threat.any_rectangle(9), masks=3)
    assert AdaptiveAttack(defense, BUDGET).attack(blob(), 0).fooled


def test_without_gradients_it_searches_at_random() -> None:
    model = CallableClassifier(lambda x: 20 * x.mean((2, 3)), fingerprint="colour")
    defense = DoubleMasking(model, THREAT, masks=3)
    assert AdaptiveAttack(defense, AttackSettings(iterations=40, locations=2)).attack(blob(), 0).fooled


def test_on_the_input_grid_the_defense_answers_the_attacked_input_unresized(colour: TorchClassifier) -> None:
    # Resized to 14 and cropped to 12: an input handed in as an image would be resized and cropped again.
    model = TorchClassifier(colour.module, Preprocessing(resize=14, crop=(12, 12), interpolation="nearest"))
    defense = DoubleMasking(model, Threat.square(3, grid="input"), masks=3)
    result = AdaptiveAttack(defense, BUDGET).attack(blob(), 0)
    assert result.attacked.image.shape == (3, 12, 12)
    assert defense_on_grid(defense).predict([result.attacked.image]) == [result.verdict]
    plain = DoubleMasking(colour, THREAT, masks=3)
    assert plain.predict([result.attacked.image])[0].label == result.verdict.label


class Careless(DoubleMasking):
    """Certifies everything."""

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[Certificate]:
        result = yield from super().certificate_flow(table, label, maps=maps)
        return replace(result, certified=True, row_certified=True)


def test_a_certified_image_that_is_fooled_is_raised_as_a_contradiction(colour: TorchClassifier) -> None:
    with pytest.raises(ContradictionError, match="a certified image of class 0 was fooled into 1 by a patch of 3×3 at"):
        AdaptiveAttack(Careless(colour, THREAT, masks=3), BUDGET).attack(blob(), 0)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_gradients_in_chunks_are_those_of_the_whole_loss(curved: TorchClassifier, threshold: Any) -> None:
    defense = DoubleMasking(curved, Threat.square(3), masks=2)
    masks = defense.mask_set((9, 9))
    place = masks.cover(Threat.square(3)).placements[0]
    plans = [AttackPlan(place, 0, [-1, 0, 1, 2], [(1, 5)]), AttackPlan(place, 1, [-1, 1, 3], [(3, 6), (1, 4)])]
    images = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(2))
    slopes = []
    for chunk in (1, 100):
        objective = MaskedObjective(curved, masks, plans, threshold=threshold, chunk=chunk)
        objective.choose_targets(images, None)
        result = objective(images, gradient=True)
        assert result.gradient is not None
        slopes.append(result.gradient)
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-6, rtol=1e-4)
    step = 1e-3  # and the loss falls along them
    moved = objective((images - step * slopes[1] / slopes[1].norm()).clamp(0, 1), gradient=False)
    assert (moved.loss <= result.loss + 1e-6).all()
    assert moved.loss.sum() < result.loss.sum()
