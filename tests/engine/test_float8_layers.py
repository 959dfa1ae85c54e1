"""Layers in eight bits: near what they replace, never silent about what is too large, alone or chained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser.engine.fast.float8 import layers as room
from patchcleanser.engine.fast.float8.backend import seen_inputs
from patchcleanser.engine.fast.float8.layers import Chained, EightLinear, EightMlp, Gelu, Short, apart, shortened
from patchcleanser.engine.fast.float8.rounding import Seen
from patchcleanser.engine.fast.half import halved

NETWORKS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"img_size": 64, "embed_dim": 256, "num_heads": 4, "depth": 4},
    "vit_small_patch14_dinov2": {"img_size": 56, "embed_dim": 256, "num_heads": 4, "depth": 4, "init_values": 0.7},
    "resmlp_12_224": {"img_size": 64},
}


def test_what_is_too_large_for_eight_bits_is_no_number() -> None:
    plain = nn.Linear(256, 256).half()
    layer = EightLinear(plain, Short.of(plain, Seen(1.0, torch.eye(256))))
    inputs = torch.randn(4, 256).half()
    inputs[1, 3], inputs[2, 5] = 60.0, torch.inf  # 448 / 8 is 56
    outputs = layer(inputs)
    assert outputs.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("usual", [0.0, 1e-7, 1.0, 1e4])
def test_numbers_of_any_usual_size_are_told_apart(usual: float) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 256).half()
    inputs = (torch.randn(8, 256) * usual).half()
    short = Short.of(plain, Seen.of(inputs))
    outputs, exact = EightLinear(plain, short)(inputs), plain.float()(inputs.float())
    assert (outputs - exact).abs().max() <= 0.1 * exact.abs().max()


def test_gelu_is_the_tanh_form() -> None:
    numbers = torch.linspace(-20, 20, 1001)
    torch.testing.assert_close(Gelu()(numbers), nn.functional.gelu(numbers, approximate="tanh"), atol=1e-6, rtol=1e-5)


def both(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network in eight bits, its blocks as they are and chained, and some inputs."""
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10, **NETWORKS[name]).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.05)  # type: ignore[operator]
    for part in module.modules():
        if hasattr(part, "ls2") and isinstance(part.ls2, nn.Parameter):  # of ResMLP, next to nothing at first
            nn.init.uniform_(part.ls1, 0.2, 0.8), nn.init.uniform_(part.ls2, 0.2, 0.8)
    inputs = torch.randn(8, 3, *2 * [NETWORKS[name]["img_size"]]).half()
    with torch.inference_mode():
        plain = apart(halved(module))
        seen = seen_inputs(plain, inputs)
        shorts = {name: Short.of(plain.get_submodule(name), one) for name, one in seen.items()}
        chained = shortened(copy.deepcopy(plain), shorts, fused=False)
        monkeypatch.setattr(room.Chained, "within", staticmethod(lambda model: None))
        return shortened(plain, shorts, fused=False), chained, inputs


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("vit")])
def test_chained_blocks_answer_as_blocks_by_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, chained, inputs = both(name, monkeypatch)
    (found,) = (part for part in chained.modules() if isinstance(part, Chained))
    assert len(found.blocks) == 3  # the last block works on one token
    assert not any(isinstance(part, Chained) for part in plain.modules())
    with torch.inference_mode():
        wanted, answer = plain(inputs).float(), chained(inputs).float()
        coarse = sum(isinstance(part, EightLinear) for part in chained.modules())
    assert coarse == sum(isinstance(part, EightLinear) for part in plain.modules()) > 4
    # Sums are rounded elsewhere, and with that some numbers to eight bits; a sum left out would be ten times as much.
    assert (answer - wanted).square().mean().sqrt() < 0.1 * (wanted - wanted.mean(0)).std()


def test_what_is_too_large_inside_a_resmlp_is_no_number_in_its_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, short, inputs = both("resmlp_12_224", monkeypatch)  # which has no norms
    inputs[3, :, 5, 5] = 60_000.0
    with torch.inference_mode():
        assert short(inputs).isnan().all(1).tolist() == [number == 3 for number in range(8)]


def hooked(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda block, given, found: 0.5 * found)


def going_through_its_blocks(module: Any) -> None:
    module.set_grad_checkpointing(True)


def with_something_behind_attention(module: Any) -> None:
    for block in module.blocks:
        block.drop_path1 = nn.Tanh()


@pytest.mark.parametrize("change", [hooked, going_through_its_blocks, with_something_behind_attention])
def test_only_blocks_that_are_known_are_chained(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    module = timm.create_model("vit_small_patch16_224", num_classes=10, **NETWORKS["vit_small_patch16_224"]).eval()
    change(module)
    inputs = torch.randn(4, 3, 64, 64).half()
    with torch.inference_mode():
        plain = apart(halved(module))
        shorts = {n: Short.of(plain.get_submodule(n), one) for n, one in seen_inputs(plain, inputs).items()}
        short = shortened(plain, shorts, fused=False)
        assert not any(isinstance(part, Chained) for part in short.modules())
        assert any(isinstance(part, EightMlp) for part in short.modules())
        assert torch.isfinite(short(inputs)).all()
