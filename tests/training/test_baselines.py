"""The recipes of the baselines, on a few hundred real images and a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.data import ArrayDataset, in_memory, load_dataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.one_pass import OnePass
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.builders import build_network
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling
from patchcleanser.training import RECIPES, Ablation, fit
from patchcleanser.training.training_run import window_loss
from patchcleanser.training.visible_loss import visible_places, visible_weights, worst_logits

NORM = Preprocessing(mean=(0.49, 0.48, 0.45), std=(0.25, 0.25, 0.26))
SMALL_RESNET = {"layers": (1, 1, 1, 1), "channels": (16, 24, 32, 48), "stem_stride": 2}
SMALL_BAGNET = {"field": 5, "stride": 2, "width": 48, "depth": 3}
SMALL_SPLIT = {"field": 5, "stride": 2, "width": 24, "depth": 2, "head": 2, "head_width": 24}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "ds": ("ds-cifar", "ablated", SMALL_RESNET, {"rate": 0.1, "epochs": 40}),
    "pg-ds": ("smoothed-vit-cifar", "smoothed-vit", {"width": 48, "depth": 3}, {"rate": 3e-3, "epochs": 60}),
    "cbn": ("bagnet-cifar", "bagnet", SMALL_BAGNET, {"rate": 0.01, "epochs": 40}),
    "pg-bn": ("patchguard-cifar", "bagnet", SMALL_BAGNET, {"window": 2, "epochs": 25}),
    "bagcert": ("bagcert-cifar", "bagnet", {**SMALL_BAGNET, "votes": True}, {"epochs": 25}),
    "one-pass": ("one-pass-cifar", "bagnet", SMALL_BAGNET, {"rate": 0.05, "epochs": 40}),
    "one-pass, head": ("one-pass-cifar", "split", SMALL_SPLIT, {"rate": 0.05, "epochs": 40}),
    "ibp": ("ibp-cifar", "interval", {"width": 4, "hidden": 64}, {"rate": 5e-3, "epochs": 45}),
}


@pytest.fixture(scope="module")
def images() -> ArrayDataset:
    sample = in_memory(load_dataset("sample"), (32, 32))
    return sample.subset([i for i, label in enumerate(sample.labels) if label in (0, 6)])  # airplanes and frogs


@pytest.mark.parametrize("defense", CASES)
def test_each_recipe_learns_what_its_defense_proves(defense: str, images: ArrayDataset, tmp_path: Path) -> None:
    name, network, options, quick = CASES[defense]
    recipe = replace(RECIPES[name], batch=20, ema=0.0, shift=0, warmup=0.1, precision="no", **quick)
    if defense == "ibp":
        recipe = replace(recipe, cutout=replace(recipe.cutout, count=2, smallest=1, largest=1))
    torch.manual_seed(0)
    module = build_network(network, options).eval()
    wrapper = {"one-pass": VisiblePooling, "one-pass, head": VisibleFeatures}.get(defense)
    module = module if wrapper is None else wrapper(module).eval()
    before = certified(defense, module, images)
    module = fit(module, images, recipe, preprocessing=NORM, out=tmp_path).module
    after = certified(defense, module, images)
    assert before[1] <= 0.55  # of two classes, a network that says always the same is right about half of the time
    assert after[0] > 0.8
    assert after[1] > 0.55


def certified(defense: str, module: torch.nn.Module, images: ArrayDataset) -> tuple[float, float]:
    """Shares of the images answered rightly, and certified against a patch of one pixel."""
    built = DEFENSES[defense.partition(",")[0]].load()(TorchClassifier(module, NORM, classes=10), Threat.square(1))
    some = range(0, len(images), 3)
    labels = images.labels[list(some)]
    results = built.examine(torch.stack([images.image(i) for i in some]), labels)
    right = [e.verdict.label == y for e, y in zip(results, labels, strict=True)]
    return sum(right) / len(results), sum(e.certificate.certified for e in results) / len(results)


@pytest.mark.parametrize(("kind", "pixels"), [("columns", 8 * 3), ("rows", 3 * 6), ("blocks", 9)])
def test_an_ablation_keeps_one_band_or_block(kind: str, pixels: int) -> None:
    hidden = Ablation(ablation=kind, keep=3).random_masks(
        50, (8, 6), torch.Generator().manual_seed(0), torch.device("cpu")
    )
    assert (~hidden).sum((1, 2)).tolist() == [pixels] * 50
    # Every pixel is kept somewhere, also by bands that go on at the other side.
    assert (~hidden).any(0).all()


def test_an_ablation_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="an ablation keeps columns, rows or blocks"):
        Ablation(ablation="circles")


def test_the_true_class_loses_its_best_window_before_the_loss_and_the_others_keep_theirs() -> None:
    local = torch.full((1, 2, 6, 6), -1.0)  # what speaks against a class counts for nothing
    local[0, 0, 2:5, 1:4] = 9.0
    local[0, 0, 5, 5] = 4.0
    local[0, 1, 0, 0] = 2.0
    without = local.clone()
    without[0, 0, 2:5, 1:4] = 0.0
    expected = torch.nn.functional.cross_entropy(without.clamp_min(0).mean((2, 3)), torch.tensor([0]))
    assert torch.allclose(window_loss(local, torch.tensor([0]), 3), expected)
    assert window_loss(local, torch.tensor([0]), 2) < expected < window_loss(local, torch.tensor([1]), 3)
    flat = torch.zeros(1, 2, 4, 12)
    flat[0, 0] = 1.0
    left = torch.tensor([[(48 - 4 * 9) / 48, 0.0]])  # a map lower than the window loses all of its height
    assert torch.allclose(
        window_loss(flat, torch.tensor([0]), 9), torch.nn.functional.cross_entropy(left, torch.tensor([0]))
    )


def test_a_loss_that_looks_into_a_network_says_which_networks_can_be_looked_into(
    images: ArrayDataset, tmp_path: Path
) -> None:
    module = build_network("resnet", SMALL_RESNET)
    with pytest.raises(TrainingError, match="which has no `local`; use net:bagnet"):
        fit(module, images, replace(RECIPES["patchguard-cifar"], precision="no"), preprocessing=NORM, out=tmp_path)


def test_a_card_names_the_settings_of_its_own_loss_only() -> None:
    own = {"loss", "margin", "window", "ramp", "worst", "pairs"}
    for recipe, settings in (("scratch-cifar", set()), ("bagcert-cifar", {"loss", "margin"})):
        assert own & set(RECIPES[recipe].to_dict()) == settings
    assert own & set(RECIPES["patchguard-cifar"].to_dict()) == {"loss", "window", "ramp"}
    assert own & set(RECIPES["one-pass-cifar"].to_dict()) == {"loss", "ramp", "worst", "pairs"}


def test_a_network_that_hides_pixels_only_is_not_trained_for_one_pass(images: ArrayDataset, tmp_path: Path) -> None:
    module = build_network("bagnet", SMALL_BAGNET)
    with pytest.raises(TrainingError, match="which does not pool what is visible; use visible:net:bagnet"):
        fit(module, images, replace(RECIPES["one-pass-cifar"], precision="no"), preprocessing=NORM, out=tmp_path)
    with pytest.raises(InputError, match="worst is a share in"):
        replace(RECIPES["one-pass-cifar"], worst=1.5)


def test_the_worst_pair_of_masks_is_that_of_the_defense() -> None:
    fields, threat = ReceptiveFields.fields((12, 12), 3, 1), Threat.square(2)
    module = VisiblePooling(build_network("bagnet", {"field": 3, "width": 8, "depth": 1})).eval()
    weights = visible_weights(visible_places(fields, threat, torch.device("cpu")))
    images, labels = torch.randn(6, 3, 12, 12), torch.arange(6)
    with torch.no_grad():
        logits = worst_logits(module.local(images), labels, weights, torch.ones(6, dtype=torch.bool))
        defense = OnePass(TorchClassifier(module, Preprocessing(), classes=10), threat)
        means = defense.engine.pooled([defense.image_state(image) for image in images]).logits[:, :-1]  # type: ignore[attr-defined]
    losses = torch.nn.functional.cross_entropy(
        means.flatten(0, 1), labels.repeat_interleave(means.shape[1]), reduction="none"
    ).reshape(6, -1)
    assert torch.allclose(torch.nn.functional.cross_entropy(logits, labels), losses.amax(1).mean().float(), atol=1e-3)


@pytest.mark.parametrize("change", [{"window": 0}, {"ramp": -0.5}, {"ramp": 2.0}])
def test_windows_and_ramps_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="a window is at least 1 and a ramp lies in"):
        replace(RECIPES["patchguard-cifar"], **change)


def test_a_network_that_votes_is_not_trained_by_its_windows(images: ArrayDataset, tmp_path: Path) -> None:
    module = build_network("bagnet", {**SMALL_BAGNET, "votes": True})
    with pytest.raises(TrainingError, match="which votes"):
        fit(module, images, replace(RECIPES["patchguard-cifar"], precision="no"), preprocessing=NORM, out=tmp_path)
