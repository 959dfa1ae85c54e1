"""FP8 layers: near what they replace, NaN for what is too large, alone or joined."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from engine.small_networks import float8_weights
from patchcleanser.engine.fast.float8 import layers as float8_layers
from patchcleanser.engine.fast.float8.layers import (
    Float8Blocks,
    Float8Linear,
    Float8Mlp,
    Float8Weight,
    TanhGelu,
    split_mlps,
    to_float8,
)
from patchcleanser.engine.fast.half import to_half

NETWORKS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"img_size": 64, "embed_dim": 256, "num_heads": 4, "depth": 4},
    "vit_small_patch14_dinov2": {"img_size": 56, "embed_dim": 256, "num_heads": 4, "depth": 4, "init_values": 0.7},
    "resmlp_12_224": {"img_size": 64},
}


def test_what_is_too_large_for_fp8_becomes_nan() -> None:
    plain = nn.Linear(256, 256).half()
    layer = Float8Linear(plain, Float8Weight.of(plain, 1.0))
    inputs = torch.randn(4, 256).half()
    inputs[1, 3], inputs[2, 5] = 60.0, torch.inf  # 448 / 8 is 56
    outputs = layer(inputs)
    assert outputs.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("usual", [0.0, 1e-7, 1.0, 1e4])
def test_inputs_of_any_scale_are_resolved(usual: float) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 256).half()
    inputs = (torch.randn(8, 256) * usual).half()
    weight = Float8Weight.of(plain, float(inputs.float().square().mean().sqrt()))
    outputs, exact = Float8Linear(plain, weight)(inputs), plain.float()(inputs.float())
    assert (outputs - exact).abs().max() <= 0.1 * exact.abs().max()


def test_gelu_is_the_tanh_form() -> None:
    numbers = torch.linspace(-20, 20, 1001)
    torch.testing.assert_close(
        TanhGelu()(numbers), nn.functional.gelu(numbers, approximate="tanh"), atol=1e-6, rtol=1e-5
    )


def both(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network in FP8, its blocks separate and joined, and some inputs."""
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10, **NETWORKS[name]).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.05)  # type: ignore[operator]
    for part in module.modules():
        if hasattr(part, "ls2") and isinstance(part.ls2, nn.Parameter):  # of ResMLP, next to nothing at first
            nn.init.uniform_(part.ls1, 0.2, 0.8), nn.init.uniform_(part.ls2, 0.2, 0.8)
    inputs = torch.randn(8, 3, *2 * [NETWORKS[name]["img_size"]]).half()
    with torch.inference_mode():
        plain = split_mlps(to_half(module))
        weights = float8_weights(plain, inputs)
        joined = to_float8(copy.deepcopy(plain), weights, triton=False)
        monkeypatch.setattr(float8_layers.Float8Blocks, "within", staticmethod(lambda model: None))
        return to_float8(plain, weights, triton=False), joined, inputs


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("vit")])
def test_joined_blocks_compute_what_separate_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, joined, inputs = both(name, monkeypatch)
    (blocks,) = (part for part in joined.modules() if isinstance(part, Float8Blocks))
    assert len(blocks.blocks) == 3  # the last block works on one token
    assert not any(isinstance(part, Float8Blocks) for part in plain.modules())
    with torch.inference_mode():
        wanted, answer = plain(inputs).float(), joined(inputs).float()
        coarse = sum(isinstance(part, Float8Linear) for part in joined.modules())
    assert coarse == sum(isinstance(part, Float8Linear) for part in plain.modules()) > 4
    # Sums are rounded elsewhere, and with that some numbers to FP8; a sum left out would be ten times as much.
    assert (answer - wanted).square().mean().sqrt() < 0.1 * (wanted - wanted.mean(0)).std()


def test_what_is_too_large_inside_a_resmlp_becomes_nan_in_its_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, float8, inputs = both("resmlp_12_224", monkeypatch)  # which has no norms
    inputs[3, :, 5, 5] = 60_000.0
    with torch.inference_mode():
        assert float8(inputs).isnan().all(1).tolist() == [number == 3 for number in range(8)]


def hooked(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda block, inputs, outputs: 0.5 * outputs)


def going_through_its_blocks(module: Any) -> None:
    module.set_grad_checkpointing(True)


def with_something_behind_attention(module: Any) -> None:
    for block in module.blocks:
        block.drop_path1 = nn.Tanh()


@pytest.mark.parametrize("change", [hooked, going_through_its_blocks, with_something_behind_attention])
def test_only_plain_blocks_are_joined(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    module = timm.create_model("vit_small_patch16_224", num_classes=10, **NETWORKS["vit_small_patch16_224"]).eval()
    change(module)
    inputs = torch.randn(4, 3, 64, 64).half()
    with torch.inference_mode():
        plain = split_mlps(to_half(module))
        weights = float8_weights(plain, inputs)
        float8 = to_float8(plain, weights, triton=False)
        assert not any(isinstance(part, Float8Blocks) for part in float8.modules())
        assert any(isinstance(part, Float8Mlp) for part in float8.modules())
        assert torch.isfinite(float8(inputs)).all()
