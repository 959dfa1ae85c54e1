"""Fused layers compute what the ones they replace do."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser.engine.fast import fused_layers
from patchcleanser.engine.fast.fused_layers import fuse_layers
from patchcleanser.networks.builders import resmlp, vit


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
    return {type(part).__name__ for part in module.modules() if type(part).__module__ == fused_layers.__name__}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vit_tiny_patch16_224", {"FlatPatchEmbed", "FusedMlp", "FirstTokenBlock"}),
        ("deit_tiny_distilled_patch16_224", {"FlatPatchEmbed", "FusedMlp"}),
        ("resmlp_12_224", {"FlatPatchEmbed", "FoldedResBlock", "FusedMlp"}),
        ("mixer_s16_224", {"FlatPatchEmbed", "FusedMlp"}),
        ("resnetv2_50x1_bit", {"ChannelwiseGroupNorm"}),
        ("resnet18", set()),
    ],
)
def test_a_fused_network_computes_the_same_logits(name: str, parts: set[str]) -> None:
    module = timm_model(name)
    inputs = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    fresh = fuse_layers(copy.deepcopy(module))
    assert replaced(fresh) == parts
    assert not any(part.training for part in fresh.modules())
    before, after = module(inputs), fresh(inputs)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert before.std() > 1e-3  # there was something to tell apart


@pytest.mark.parametrize("build", [vit, resmlp])
def test_our_own_networks_fused_compute_the_same_logits(build: type) -> None:
    torch.manual_seed(0)
    module = varied(build())
    inputs = torch.randn(4, 3, 32, 32)
    fresh = fuse_layers(copy.deepcopy(module))
    assert replaced(fresh)
    assert (module(inputs) - fresh(inputs)).abs().max() < 1e-4 * module(inputs).abs().max()


def test_layers_with_hooks_or_their_own_forward_are_left_alone() -> None:
    hooked, patched = timm_model("vit_tiny_patch16_224"), timm_model("vit_tiny_patch16_224")
    for block in hooked.blocks:  # type: ignore[union-attr]
        block.mlp.fc1.register_forward_hook(lambda module, inputs, output: output * 2)
    for block in patched.blocks:  # type: ignore[union-attr]
        block.mlp.forward = lambda x: x * 2
    inputs = torch.randn(1, 3, 224, 224)
    for module in (hooked, patched):
        fresh = fuse_layers(copy.deepcopy(module))
        assert replaced(fresh) <= {"FlatPatchEmbed"}
        assert (module(inputs) - fresh(inputs)).abs().max() < 1e-4 * module(inputs).abs().max()


def test_other_activations_than_gelu_are_left_alone() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    module = timm_model("mixer_s16_224")
    for block in module.blocks:  # type: ignore[union-attr]
        block.mlp_channels.act = block.mlp_tokens.act = Twice()
    assert replaced(fuse_layers(module)) == {"FlatPatchEmbed"}


def test_attention_with_custom_linear_layers_is_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.repeat(1, 1, 3)

    module = timm_model("vit_tiny_patch16_224")
    old = module.blocks[-1].attn.qkv  # type: ignore[index, union-attr]
    new = Adapted(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    module.blocks[-1].attn.qkv = new.requires_grad_(False)  # type: ignore[index, union-attr]
    inputs = torch.randn(1, 3, 224, 224)
    fresh = fuse_layers(copy.deepcopy(module))
    assert "FirstTokenBlock" not in replaced(fresh)
    assert (module(inputs) - fresh(inputs)).abs().max() < 1e-4 * module(inputs).abs().max()


@pytest.mark.parametrize("method", ["forward_head", "forward_features", "pool"])
def test_a_vit_with_a_method_of_its_own_keeps_all_its_tokens(method: str) -> None:
    module = timm_model("vit_tiny_patch16_224")
    setattr(module, method, getattr(module, method))
    assert "FirstTokenBlock" not in replaced(fuse_layers(module))


def test_dropouts_that_were_replaced_are_not_left_out() -> None:
    class Clamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(-0.1, 0.1)

    vision, mixing = timm_model("vit_tiny_patch16_224"), timm_model("resmlp_12_224")
    vision.blocks[-1].drop_path2 = Clamp()  # type: ignore[index, union-attr]
    for block in vision.blocks:  # type: ignore[union-attr]
        block.mlp.drop1 = Clamp()
    for block in mixing.blocks:  # type: ignore[union-attr]
        block.drop_path = Clamp()
    assert replaced(fuse_layers(vision)) == {"FlatPatchEmbed"}
    assert replaced(fuse_layers(mixing)) == {"FlatPatchEmbed", "FusedMlp"}


@pytest.mark.parametrize("name", ["resmlp_12_224", "resnetv2_50x1_bit"])
def test_fusing_draws_no_random_numbers(name: str) -> None:
    module = timm_model(name)
    before = torch.get_rng_state()
    fuse_layers(module)
    assert (torch.get_rng_state() == before).all()


def test_images_that_the_network_refuses_are_refused() -> None:
    embed = timm_model("resmlp_12_224").stem
    inputs = torch.randn(1, 3, 192, 192)
    with pytest.raises(AssertionError):
        embed(inputs)
    with pytest.raises(ValueError, match="192×192"):
        fuse_layers(embed)(inputs)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (3.0, 1.0), (10.0, 0.03), (30.0, 0.03)])
def test_group_norm_keeps_small_differences_beside_a_large_mean(mean: float, spread: float) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 64).requires_grad_(False)
    inputs = (torch.randn(2, 64, 16, 16) * spread + mean).half()
    anew = fused_layers.ChannelwiseGroupNorm(norm).half()(inputs).float()
    assert (anew - norm.float()(inputs.float())).abs().max() < 1e-2
