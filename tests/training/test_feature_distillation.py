"""Networks that learn from a teacher's feature maps, and by Muon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.data import ArrayDataset, in_memory, load_dataset
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.builders import resnet
from patchcleanser.training import Cutout, Recipe, fit

MUON = Recipe(
    epochs=8,
    batch=50,
    optimizer="muon",
    rate=1e-2,
    weight_decay=0.05,
    clip=1.0,
    cutout=Cutout(1, 4, 6),
    precision="no",
    holdout=0.0,
)
NORM = {"preprocessing": Preprocessing(mean=(0.49, 0.48, 0.45), std=(0.25, 0.25, 0.26))}


@pytest.fixture(scope="module")
def images() -> ArrayDataset:
    return in_memory(load_dataset("sample"), (32, 32))


@pytest.fixture
def teacher() -> TorchClassifier:
    torch.manual_seed(3)
    module = resnet(layers=(1, 1, 1, 1), channels=(16, 24, 32, 40), stem_stride=2)
    return TorchClassifier(module.eval(), NORM["preprocessing"])


def vit(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = VisionTransformer(32, 8, num_classes=10, embed_dim=64, depth=3, num_heads=2)
    return module


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def unexplained(module: nn.Module, teacher: TorchClassifier, images: ArrayDataset) -> float:
    """Share of the teacher's last maps that no linear layer can read off a network's tokens there."""
    pixels = torch.from_numpy(images.images[:200]).permute(0, 3, 1, 2).float() / 255
    inputs = NORM["preprocessing"](pixels)
    with torch.no_grad():
        tokens = module.forward_features(inputs)[:, 1:]  # type: ignore[operator]
        maps = teacher.module.forward_features(inputs)  # type: ignore[operator]
    wanted = nn.functional.interpolate(maps, (4, 4), mode="bilinear").flatten(2).transpose(1, 2).flatten(0, 1)
    wanted = (wanted - wanted.mean(0)) / wanted.std(0).clamp_min(1e-6)
    given = torch.cat([tokens.flatten(0, 1), torch.ones(len(wanted), 1)], 1)
    left = wanted - given @ torch.linalg.lstsq(given, wanted).solution
    return float(left.square().mean() / wanted.square().mean())


def test_tokens_learn_the_features_that_the_teacher_has_at_their_place(
    images: ArrayDataset, teacher: TorchClassifier, tmp_path: Path
) -> None:
    recipe = replace(MUON, epochs=25, teacher_weight=0.5)
    plain = fit(vit(), images, recipe, **NORM, out=tmp_path / "a", teacher=teacher)
    guided = fit(vit(), images, replace(recipe, guidance=2.0), **NORM, out=tmp_path / "b", teacher=teacher)
    without, with_it = (unexplained(fitted.module, teacher, images) for fitted in (plain, guided))
    assert with_it < 0.8 * without
    assert set(guided.module.state_dict()) == set(vit().state_dict())  # the projector is discarded


def test_a_distilled_run_that_was_killed_ends_like_an_unbroken_one(
    images: ArrayDataset, teacher: TorchClassifier, tmp_path: Path
) -> None:
    def kill(done: float, epochs: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    recipe = replace(MUON, epochs=3, guidance=1.0)
    unbroken = fit(vit(), images, recipe, **NORM, out=tmp_path / "a", teacher=teacher)
    with pytest.raises(KeyboardInterrupt):
        fit(vit(), images, recipe, **NORM, out=tmp_path / "b", teacher=teacher, on_progress=kill)
    resumed = fit(vit(5), images, recipe, **NORM, out=tmp_path / "b", teacher=teacher)
    assert torch.equal(weights(unbroken.module), weights(resumed.module))


def test_muon_learns_a_few_hundred_real_images(images: ArrayDataset, tmp_path: Path) -> None:
    fitted = fit(vit(), images, replace(MUON, epochs=25), **NORM, out=tmp_path)
    assert fitted.history[0].accuracy < 0.35
    assert fitted.history[-1].accuracy > 0.9


def test_networks_without_feature_maps_are_refused(
    images: ArrayDataset, teacher: TorchClassifier, tmp_path: Path
) -> None:
    recipe = replace(MUON, epochs=1, guidance=1.0)
    with pytest.raises(TrainingError, match=r"feature distillation \(guidance\) needs a teacher"):
        fit(vit(), images, recipe, **NORM, out=tmp_path)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    with pytest.raises(TrainingError, match=r"Sequential has no feature maps .* use guidance=0"):
        fit(plain, images, recipe, **NORM, out=tmp_path, teacher=teacher)
    with pytest.raises(TrainingError, match="Sequential has no feature maps"):
        fit(vit(), images, recipe, **NORM, out=tmp_path, teacher=TorchClassifier(plain))
    with pytest.raises(InputError, match=r"does not work with the loss 'window'; set guidance to 0, got 1"):
        replace(recipe, loss="window")
