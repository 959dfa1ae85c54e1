"""FP8 layers, in place of a half-precision network's, and blocks that pass over memory less often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from timm.models.vision_transformer import Block, LayerScale, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.engine.fast.fused_layers import (
    FirstTokenBlock,
    FoldedResBlock,
    FusedMlp,
    is_identity,
    replace_layers,
)

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
"""Three mantissa bits, and numbers from 2⁻⁹ to 448: larger ones become NaN, and their labels are computed again."""

SCALED_RMS = 8.0
"""What the root mean square of a layer's inputs is scaled to: then 56 times as much still fits, and a 4000th."""

MAX_SCALE = 2.0**14
"""The largest scale: half precision ends soon after."""

TRITON_CAPABILITY = (9, 0)
"""The GPUs that our Triton kernels were written for, and measured on: Hopper."""

TILE = 128
"""Rows and columns that these kernels work on at a time."""


class Float8Weight(NamedTuple):
    """A linear layer's weight in FP8, and the scales of the weight and of the inputs before they are rounded."""

    weight: Tensor
    weight_scale: float
    input_scale: float

    @classmethod
    def of(cls, layer: nn.Linear, input_rms: float) -> Float8Weight:
        """The weight of a linear layer, for inputs of this root mean square."""
        weight = layer.weight.detach().float()
        input_scale = _power_of_two(min(SCALED_RMS / max(input_rms, 1e-9), MAX_SCALE))
        weight_scale = _power_of_two(min(FLOAT8_MAX / max(float(weight.abs().max()), 1e-9), MAX_SCALE))
        rounded = (weight * weight_scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        return cls(rounded, weight_scale, input_scale)


class Float8Linear(nn.Module):
    """A linear layer with inputs and weights in FP8; sums are float32, and outputs have the layer's own type."""

    float8_weight: Tensor  # not `weight`: code that reads a replaced layer's weight must fail
    input_scale: Tensor
    scale_a: Tensor
    scale_b: Tensor
    product_scale: Tensor

    def __init__(self, layer: nn.Linear, float8: Float8Weight) -> None:
        super().__init__()
        self.bias, self.dtype = layer.bias, layer.weight.dtype
        unit = layer.weight.detach().new_ones((), dtype=torch.float32)
        self.register_buffer("float8_weight", float8.weight.to(unit.device))
        self.register_buffer("input_scale", (float8.input_scale * unit).to(layer.weight.dtype))
        self.register_buffer("scale_a", unit / float8.input_scale)
        self.register_buffer("scale_b", unit / float8.weight_scale)
        self.register_buffer("product_scale", self.scale_a * self.scale_b)

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.matmul(self.quantize(inputs)).view(*inputs.shape[:-1], -1)

    def quantize(self, inputs: Tensor) -> Tensor:
        """Inputs […, in] as FP8 rows [n, in]."""
        scaled = inputs.reshape(-1, inputs.shape[-1]) * self.input_scale
        # Some kernels would clamp what is too large.
        return torch.where(scaled.abs() <= FLOAT8_MAX, scaled, torch.nan).to(FLOAT8)

    def matmul(self, rows: Tensor) -> Tensor:
        """FP8 rows [n, in] → [n, out]."""
        outputs: Tensor = torch._scaled_mm(
            rows,
            self.float8_weight.t(),
            scale_a=self.scale_a,
            scale_b=self.scale_b,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return outputs


class TanhGelu(nn.Module):
    """GELU by its tanh form, with the exponential that a GPU has an instruction for."""

    def forward(self, x: Tensor) -> Tensor:
        """[…] → […]."""
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


class Float8Mlp(nn.Module):
    """Linear, GELU, linear in FP8; with the Triton kernel, hidden activations are only ever written in FP8."""

    def __init__(self, first: Float8Linear, second: Float8Linear, *, triton: bool) -> None:
        super().__init__()
        self.first, self.act, self.second, self.triton = first, TanhGelu(), second, triton

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.second.matmul(self.hidden(self.first.quantize(inputs))).view(*inputs.shape[:-1], -1)

    def hidden(self, rows: Tensor) -> Tensor:
        """FP8 rows [n, in] → the second layer's inputs, in FP8."""
        first, second = self.first, self.second
        if not self.triton:
            return second.quantize(self.act(first.matmul(rows)))
        outputs: Tensor = torch.ops.patchcleanser.linear_gelu(
            rows, first.float8_weight, first.bias, first.product_scale, second.input_scale
        )
        return outputs


class Float8Block(nn.Module):
    """A ViT's block that adds the MLP output of the block before it, and leaves its own to the next.

    Such an addition fuses with the next norm's pass over memory; by itself it would be one more pass.
    """

    gamma: Tensor

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = block.norm1, block.attn, block.ls1
        self.norm2, self.mlp = block.norm2, block.mlp
        second = block.mlp.second
        ones = second.input_scale.new_ones(len(second.float8_weight))
        self.register_buffer("gamma", ones if type(block.ls2) is nn.Identity else block.ls2.gamma.detach())

    @staticmethod
    def of(block: nn.Module) -> Float8Block | None:
        """None if it is no plain ViT block, or its MLP is not in FP8."""
        plain = (
            type(block) is Block and type(block.mlp) is Float8Mlp and is_identity(block.drop_path1, block.drop_path2)
        )
        return Float8Block(block) if plain and type(block.ls2) in (nn.Identity, LayerScale) else None

    def forward(self, x: Tensor, branch: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum x + branch × gamma [N, tokens, width] → the block's output, as such a sum."""
        x = torch.addcmul(x, branch, gamma)
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x, self.mlp(self.norm2(x)), self.gamma


class Float8ResBlock(nn.Module):
    """ResMLP's block in FP8; with Triton kernels, three passes over memory in all."""

    mix: Tensor
    scale: Tensor
    shift: Tensor
    ls2: Tensor

    def __init__(self, block: FoldedResBlock, mlp: Float8Mlp) -> None:
        super().__init__()
        self.mlp, self.tokens = mlp, block.tokens
        for name in ("scale", "shift", "ls2"):
            self.register_buffer(name, getattr(block, name).contiguous())
        mix = block.mix
        self.triton = mlp.triton and len(block.ls2) % TILE == 0
        if self.triton:  # zero-padded to whole tiles
            mix = functional.pad(mix, (0, -mix.shape[1] % TILE, 0, -len(mix) % TILE))
        self.register_buffer("mix", mix)

    @staticmethod
    def of(block: FoldedResBlock) -> Float8ResBlock | None:
        """None if its linear layers are not in FP8."""
        mlp = block.mlp
        return Float8ResBlock(block, mlp) if isinstance(mlp, Float8Mlp) else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the same."""
        mlp, second = self.mlp, self.mlp.second
        if self.triton:
            kernels = torch.ops.patchcleanser
            x, rows = kernels.mix_tokens(x, self.mix, self.scale, self.shift, mlp.first.input_scale)
            outputs: Tensor = kernels.linear_sum(
                mlp.hidden(rows), second.float8_weight, second.bias, second.product_scale, self.ls2, x
            )
            return outputs
        mixed = torch.bmm(self.mix[: self.tokens, : self.tokens].expand(len(x), -1, -1), x)
        x = torch.addcmul(x + self.shift, mixed, self.scale)
        return torch.addcmul(x, mlp(x), self.ls2)


class Float8Blocks(nn.Module):
    """A ViT's blocks that leave their last additions to each other, and the layers after them."""

    def __init__(self, blocks: list[nn.Module], rest: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.rest = nn.ModuleList(blocks), nn.Sequential(*rest)

    @staticmethod
    def within(model: VisionTransformer) -> VisionTransformer | None:
        """The ViT with its blocks joined, in place; None if it does not begin with several plain FP8 blocks.

        Only for timm's own ViT: other networks may go through their blocks one by one.
        """
        blocks: list[nn.Module] = []
        for part in model.blocks:
            if (block := Float8Block.of(part)) is None:
                break
            blocks.append(block)
        if len(blocks) < 2 or model.grad_checkpointing:
            return None
        model.blocks = Float8Blocks(blocks, list(model.blocks)[len(blocks) :])
        return model

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the output of the last layer."""
        branch, gamma = x.detach(), x.new_zeros(x.shape[-1])
        for block in self.blocks:
            x, branch, gamma = block(x, branch, gamma)
        outputs: Tensor = self.rest(torch.addcmul(x, branch, gamma))
        return outputs


def split_mlps(module: nn.Module) -> nn.Module:
    """The module with fused MLPs, in place, as separate layers again."""
    return replace_layers(module, {FusedMlp: lambda mlp: nn.Sequential(mlp.fc1, TanhGelu(), mlp.fc2)})


def to_float8(module: nn.Module, weights: Mapping[str, Float8Weight], *, triton: bool) -> nn.Module:
    """The module with these linear layers, by name, in FP8, in place; `triton` uses our kernels."""
    by_layer = {module.get_submodule(name): weight for name, weight in weights.items()}

    def linear(layer: nn.Linear) -> nn.Module | None:
        return Float8Linear(layer, by_layer[layer]) if layer in by_layer else None

    def mlp(parts: nn.Sequential) -> nn.Module | None:
        if [type(part) for part in parts] != [Float8Linear, TanhGelu, Float8Linear] or parts[0].bias is None:
            return None
        return Float8Mlp(cast("Float8Linear", parts[0]), cast("Float8Linear", parts[2]), triton=triton)

    def unchanged(block: nn.Module) -> nn.Module:
        return block

    # The last block of a ViT computes one token, and reads the weights of its layers.
    module = replace_layers(module, {FirstTokenBlock: unchanged, nn.Linear: linear})
    module = replace_layers(module, {FirstTokenBlock: unchanged, nn.Sequential: mlp})
    module = replace_layers(module, {FoldedResBlock: Float8ResBlock.of, VisionTransformer: Float8Blocks.within})
    return module.eval()


def has_triton_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels are for this device; if so they are loaded."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != TRITON_CAPABILITY:
        return False
    try:
        import patchcleanser.engine.fast.float8.kernels  # noqa: F401
    except ImportError:  # no Triton, or an old one
        return False
    return True


def uses_triton(module: nn.Module) -> bool:
    """Whether a part of it runs our Triton kernels."""
    return any(part.triton for part in module.modules() if isinstance(part, (Float8Mlp, Float8ResBlock)))


def disable_triton(module: nn.Module) -> None:
    """Run torch's kernels from now on."""
    for part in module.modules():
        if isinstance(part, (Float8Mlp, Float8ResBlock)):
            part.triton = False


def _power_of_two(number: float) -> float:
    """The largest power of two that is no larger: multiplying by it changes no digit.

    >>> _power_of_two(9.0), _power_of_two(0.3)
    (8.0, 0.25)
    """
    return 2.0 ** math.floor(math.log2(number))
