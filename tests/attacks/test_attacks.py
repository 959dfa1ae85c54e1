"""Attacks on undefended classifiers: strong, honest about their budget, and inside the threat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import CallableClassifier, DoubleMasking, Preprocessing, Threat, TorchClassifier, Window, attacks
from patchcleanser.attacks import (
    ADAPTIVE,
    ATTACKS,
    AdaptiveAttack,
    PatchAPGD,
    PatchPGD,
    PatchSquare,
    UniversalPatch,
)
from patchcleanser.attacks.objectives import attack_loss, goal_margin
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.errors import InputError, ThreatError

GREY = torch.full((3, 8, 8), 0.5)

CLASSES = {name: entry.load() for name, entry in ATTACKS.items() if name != ADAPTIVE}


def images(number: int, size: int = 8) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [(torch.rand(3, size, size, generator=draw) * 255).round() / 255 for _ in range(number)]


def label_of(model: TorchClassifier, image: Tensor) -> int:
    return int(model.logits(model.prepare(image[None])).argmax())


@pytest.mark.parametrize("loss", ["margin", "ce"])
@pytest.mark.parametrize("attack", [PatchPGD, PatchAPGD])
def test_gradient_attacks_reach_the_optimum_of_a_linear_classifier(
    linear: TorchClassifier, attack: Any, loss: Any
) -> None:
    image, layer = images(1)[0], nn.Linear(3 * 8 * 8, 2)
    layer.weight.data = linear.module[1].weight[:2].detach()  # type: ignore[index]
    model = TorchClassifier(nn.Sequential(nn.Flatten(), layer).eval())
    result = attack(model, Threat.square(4), AttackSettings(iterations=30, loss=loss)).attack(image, 0)
    slope = (layer.weight[0] - layer.weight[1]).view(3, 8, 8)
    (w,) = result.windows
    inside = (slice(None), slice(w.top, w.bottom), slice(w.left, w.right))
    best = image.clone()
    best[inside] = (slope[inside] < 0).float()
    logits = model.logits(best[None])[0].tolist()
    assert result.margin == pytest.approx(logits[0] - logits[1], abs=1e-3)


@pytest.mark.parametrize("name", CLASSES)
def test_only_pixels_of_the_patch_change_and_a_png_can_hold_them(linear: TorchClassifier, name: str) -> None:
    image = images(1)[0]
    result = CLASSES[name](linear, Threat.square(3), AttackSettings(iterations=4)).attack(image, 0)
    (w,) = result.windows
    assert (w.height, w.width) == (3, 3)
    changed = (result.image != image).any(0)
    changed[w.top : w.bottom, w.left : w.right] = False
    assert not changed.any()
    assert result.image.min() >= 0
    assert result.image.max() <= 1
    assert torch.equal((result.image * 255).round() / 255, result.image)
    assert result.label == label_of(linear, result.image)
    assert result.fooled == (result.label != 0)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_found_depends_on_image_and_seed_not_on_the_batch(linear: TorchClassifier, name: str) -> None:
    some, labels = images(3), [0, 1, 2]
    attack = CLASSES[name](linear, Threat.square(3), AttackSettings(iterations=5, locations=2, restarts=2))
    together = attack.candidates(some, labels)
    for image, label, result in zip(some, labels, together, strict=True):
        (alone,) = attack.candidates([image], [label])
        assert [f.windows for f in alone] == [f.windows for f in result]
        assert all(torch.equal(a.image, f.image) for a, f in zip(alone, result, strict=True))
    other = CLASSES[name](linear, Threat.square(3), AttackSettings(iterations=5, locations=2, seed=1)).attack(
        some[0], 0
    )
    assert not torch.equal(other.image, together[0][0].image)


@pytest.mark.parametrize("name", CLASSES)
def test_a_target_is_hit_and_nothing_else_counts(linear: TorchClassifier, name: str) -> None:
    image = images(1)[0]
    label = label_of(linear, image)
    target = (label + 1) % 5
    for loss in ("margin", "ce", "dlr"):
        settings = AttackSettings(iterations=60, target=target, loss=loss)  # type: ignore[arg-type]
        result = CLASSES[name](linear, Threat.square(6), settings).attack(image, label)
        assert result.label == target
        assert result.fooled
        assert result.margin < 0
    with pytest.raises(InputError, match="the target 1 is the true label of an image"):
        CLASSES[name](linear, Threat.square(3), AttackSettings(target=1)).attack(image, 1)


@pytest.mark.parametrize(
    ("threat", "allowed"),
    [
        (Threat.any_rectangle(6), lambda w: w.area <= 6),
        (Threat.rectangle(1, 4, count=3), lambda w: (w.height, w.width) == (1, 4)),
        (Threat.share(0.05), lambda w: (w.height, w.width) == (2, 2)),
        (Threat.square(2, region=Window(2, 3, 4, 5)), lambda w: Window(2, 3, 4, 5).contains(w)),
    ],
    ids=["any", "three", "share", "region"],
)
@pytest.mark.parametrize("places", ["random", "searched"])
def test_patches_have_the_shape_number_and_room_of_the_threat(
    linear: TorchClassifier, threat: Threat, allowed: Any, places: Any
) -> None:
    settings = AttackSettings(iterations=2, locations=3, places=places)
    (result,) = PatchAPGD(linear, threat, settings).candidates(images(1), [0])
    assert len(result) == 3
    for candidate in result:
        assert len(candidate.windows) == threat.count
        assert all(allowed(w) for w in candidate.windows)


def test_gradients_pass_through_resizing_so_the_patch_lies_on_the_image_as_it_came(curved: TorchClassifier) -> None:
    image = images(1, size=9)[0]
    label = label_of(curved, image)
    result = PatchAPGD(curved, Threat.square(4), AttackSettings(iterations=40, locations=4)).attack(image, label)
    assert result.image.shape == image.shape
    assert result.fooled
    assert label_of(curved, result.image) != label


def test_on_the_input_grid_the_result_is_an_attacked_input(curved: TorchClassifier) -> None:
    image = images(1, size=9)[0]
    result = PatchAPGD(curved, Threat.square(4, grid="input"), AttackSettings(iterations=5)).attack(image, 0)
    assert result.image.shape == (3, 11, 11)
    clean = curved.preprocessing.geometry(image[None])[0]
    (w,) = result.windows
    changed = (result.image != clean).any(0)
    changed[w.top : w.bottom, w.left : w.right] = False
    assert not changed.any()
    assert result.label == int(curved.logits(curved.preprocessing.normalise(result.image[None])).argmax())


def test_a_searched_location_finds_the_place_that_matters(corner: TorchClassifier) -> None:
    dark, threat = torch.zeros(3, 24, 24), Threat.square(4)
    blind = PatchAPGD(corner, threat, AttackSettings(iterations=10, seed=0)).attack(dark, 0)
    result = PatchAPGD(corner, threat, AttackSettings(iterations=10, seed=0, places="searched")).attack(dark, 0)
    assert not blind.fooled
    assert result.fooled
    assert result.windows == (Window(0, 0, 4, 4),)


def test_more_locations_and_restarts_never_find_less(curved: TorchClassifier) -> None:
    image = images(1, size=9)[0]
    label = label_of(curved, image)
    (many,) = PatchPGD(curved, Threat.square(2), AttackSettings(iterations=5, locations=4)).candidates([image], [label])
    worst = PatchPGD(curved, Threat.square(2), AttackSettings(iterations=5, locations=4)).attack(image, label)
    assert worst.margin == min(f.margin for f in many)


def test_square_needs_no_gradients_and_counts_its_queries() -> None:
    batches = []

    def function(batch: Any) -> Any:
        batches.append(len(batch))
        return batch.mean((2, 3)) * 20

    model = CallableClassifier(function, fingerprint="colour")
    image = torch.full((3, 8, 8), 0.4)
    image[0] = 0.45
    result = PatchSquare(model, Threat.square(3), AttackSettings(iterations=40)).attack(image, 0)
    assert result.fooled
    assert sum(batches) == result.queries == 42
    with pytest.raises(
        InputError, match=r"gradients, and so a torch .*, got CallableClassifier; .*use --attack square"
    ):
        PatchAPGD(model, Threat.square(3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"iterations": 0}, "iterations is a whole number of at least 1, got 0"),
        ({"restarts": 0}, "restarts is a whole number of at least 1"),
        ({"loss": "l2"}, "a loss is margin, ce, dlr, got 'l2'"),
        ({"places": "best"}, "places are random or searched"),
    ],
)
def test_an_impossible_budget_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        AttackSettings(**settings)


def test_a_patch_that_does_not_fit_is_refused(linear: TorchClassifier) -> None:
    with pytest.raises(ThreatError, match="patch of 9 px does not fit"):
        PatchPGD(linear, Threat.square(9)).attack(GREY, 0)


def test_losses_fall_where_the_goal_comes_nearer() -> None:
    labels = torch.tensor([0, 0])
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0], [1.0, 3.0, 0.0, -1.0]])
    for loss in ("margin", "ce", "dlr"):
        for target in (None, 1):
            far, near = attack_loss(loss, logits, labels, target).tolist()  # type: ignore[arg-type]
            assert near < far
    assert goal_margin(logits, labels).tolist() == [2.0, -2.0]
    with pytest.raises(InputError, match="dlr loss needs at least 3 classes, got 2"):
        attack_loss("dlr", logits[:, :2], labels)


def test_preprocessing_without_resizing_gives_both_grids_the_same_attack(linear: TorchClassifier) -> None:
    image = images(1)[0]
    model = TorchClassifier(linear.module, Preprocessing(mean=(0.4,) * 3, std=(0.3,) * 3))
    result = [
        PatchPGD(model, Threat.square(3, grid=grid), AttackSettings(iterations=5)).attack(image, 0)  # type: ignore[arg-type]
        for grid in ("source", "input")
    ]
    assert torch.equal(result[0].image, result[1].image)


def test_the_package_lists_its_classes_and_imports_them_all_at_once() -> None:
    names: dict[str, Any] = {}
    exec("from patchcleanser.attacks import *", names)
    assert {*dir(attacks)} >= {
        "PatchPGD",
        "PatchAPGD",
        "PatchSquare",
        "AdaptiveAttack",
        "attack_classes",
        "attack_objects",
    }
    assert {*attacks.__all__} <= {*dir(attacks)} & {*names}


@pytest.mark.parametrize("attack", [*CLASSES.values(), UniversalPatch])
def test_attacks_take_a_model_by_name_and_a_threat_by_its_text(attack: Any) -> None:
    made = attack("zoo:tiny", "3", AttackSettings(iterations=1))
    assert (made.classifier.spec, made.threat) == ("zoo:tiny", Threat.square(3))
    with pytest.raises(ThreatError, match="a threat is"):
        attack("zoo:tiny", 3.5)


def test_the_adaptive_attack_takes_a_defense_and_says_so(linear: TorchClassifier) -> None:
    with pytest.raises(InputError, match="got TorchClassifier"):
        AdaptiveAttack(linear)  # type: ignore[arg-type]


def test_results_of_attacks_print_without_their_pixels(linear: TorchClassifier) -> None:
    result = PatchSquare(linear, "3", AttackSettings(iterations=1)).attack(images(1)[0], 0)
    defended = AdaptiveAttack(DoubleMasking(linear, "3", masks=2), AttackSettings(iterations=1)).attack(images(1)[0], 0)
    for text in (repr(result), repr(defended)):
        assert "tensor" not in text
        assert "windows=(Window(" in text
        assert len(text) < 500
