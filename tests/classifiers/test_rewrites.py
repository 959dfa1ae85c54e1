"""Layers written anew answer as the ones they replace."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser.classifiers import rewrites
from patchcleanser.classifiers.networks import resmlp, vit
from patchcleanser.classifiers.rewrites import rewritten


def varied(module: nn.Module) -> nn.Module:
    """In eval mode, with no scale left at 1 and no shift at 0."""
    draw = torch.Generator().manual_seed(0)
    for tensor in module.parameters():
        if tensor.ndim < 2 or tensor.shape[0] == 1:
            tensor.data = 0.1 * torch.randn(tensor.shape, generator=draw) + (1.0 if tensor.mean() > 0.5 else 0.0)
    return module.eval().requires_grad_(False)


def timm_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return varied(timm.create_model(name, pretrained=False, num_classes=10))


def replaced(module: nn.Module) -> set[str]:
    return {type(part).__name__ for part in module.modules() if type(part).__module__ == rewrites.__name__}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vit_tiny_patch16_224", {"FlatPatchEmbed", "FusedMlp", "FirstTokenBlock"}),
        ("deit_tiny_distilled_patch16_224", {"FlatPatchEmbed", "FusedMlp"}),
        ("resmlp_12_224", {"FlatPatchEmbed", "FoldedResBlock"}),
        ("mixer_s16_224", {"FlatPatchEmbed", "FusedMlp"}),
        ("resnetv2_50x1_bit", {"ChannelwiseGroupNorm"}),
        ("resnet18", set()),
    ],
)
def test_a_network_written_anew_answers_as_before(name: str, parts: set[str]) -> None:
    module = timm_model(name)
    inputs = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    fresh = rewritten(copy.deepcopy(module))
    assert replaced(fresh) == parts
    assert not any(part.training for part in fresh.modules())
    before, after = module(inputs), fresh(inputs)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert before.std() > 1e-3  # there was something to tell apart


@pytest.mark.parametrize("build", [vit, resmlp])
def test_our_own_networks_written_anew_answer_as_before(build: type) -> None:
    torch.manual_seed(0)
    module = varied(build())
    inputs = torch.randn(4, 3, 32, 32)
    fresh = rewritten(copy.deepcopy(module))
    assert replaced(fresh)
    assert (module(inputs) - fresh(inputs)).abs().max() < 1e-4 * module(inputs).abs().max()


def test_layers_that_somebody_hooked_into_or_changed_are_left_alone() -> None:
    hooked, patched = timm_model("vit_tiny_patch16_224"), timm_model("vit_tiny_patch16_224")
    for block in hooked.blocks:  # type: ignore[union-attr]
        block.mlp.fc1.register_forward_hook(lambda module, inputs, output: output * 2)
    for block in patched.blocks:  # type: ignore[union-attr]
        block.mlp.forward = lambda x: x * 2
    inputs = torch.randn(1, 3, 224, 224)
    for module in (hooked, patched):
        fresh = rewritten(copy.deepcopy(module))
        assert replaced(fresh) <= {"FlatPatchEmbed"}
        assert (module(inputs) - fresh(inputs)).abs().max() < 1e-4 * module(inputs).abs().max()


def test_other_activations_than_gelu_are_left_alone() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    module = timm_model("mixer_s16_224")
    for block in module.blocks:  # type: ignore[union-attr]
        block.mlp_channels.act = block.mlp_tokens.act = Twice()
    assert replaced(rewritten(module)) == {"FlatPatchEmbed"}
