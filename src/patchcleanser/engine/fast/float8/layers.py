"""Layers in eight bits, in place of a half-precision network's, and blocks that pass over memory less often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from timm.models.vision_transformer import Block, LayerScale, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.engine.fast.float8.rounding import Seen, rounded
from patchcleanser.engine.fast.fused_layers import FirstTokenBlock, FoldedResBlock, FusedMlp, does_nothing, replaced

SHORT = torch.float8_e4m3fn
LARGEST = torch.finfo(SHORT).max
"""Three bits behind the point, and numbers from 2⁻⁹ to 448: what is larger is none, and its label is computed again."""

USUAL = 8.0
"""What the usual size of a layer's inputs becomes: 56 times as much can be told still, and a 4000th."""

MOST = 2.0**14
"""What numbers are multiplied by at most: half precision ends soon after."""

FUSED_ON = (9, 0)
"""The kind of GPU that kernels of our own were written for, and measured on: Hopper."""

TILE = 128
"""What these kernels work on at a time, in rows and columns."""


class Short(NamedTuple):
    """A linear layer's weights in eight bits, and what they and its inputs are multiplied by before."""

    eight: Tensor
    eight_up: float
    up: float

    @classmethod
    def of(cls, layer: nn.Linear, seen: Seen) -> Short:
        """Of a linear layer with such inputs."""
        weight = layer.weight.detach().float()
        up = _power_of_two(min(USUAL / max(seen.size, 1e-9), MOST))
        eight_up = _power_of_two(min(LARGEST / max(float(weight.abs().max()), 1e-9), MOST))
        return cls(rounded(weight * eight_up, SHORT, seen.together), eight_up, up)


class EightLinear(nn.Module):
    """A linear layer whose inputs and weights have eight bits; sums are longer, and outputs as the layer's were."""

    eight: Tensor
    up: Tensor
    down: Tensor
    eight_down: Tensor
    whole: Tensor

    def __init__(self, layer: nn.Linear, short: Short) -> None:
        super().__init__()
        self.bias, self.dtype = layer.bias, layer.weight.dtype
        plain = layer.weight.detach().new_ones((), dtype=torch.float32)
        self.register_buffer("eight", short.eight.to(plain.device))
        self.register_buffer("up", (short.up * plain).to(layer.weight.dtype))
        self.register_buffer("down", plain / short.up)
        self.register_buffer("eight_down", plain / short.eight_up)
        self.register_buffer("whole", self.down * self.eight_down)

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.product(self.short(inputs)).view(*inputs.shape[:-1], -1)

    def short(self, inputs: Tensor) -> Tensor:
        """Inputs […, in] as rows [n, in] in eight bits."""
        larger = inputs.reshape(-1, inputs.shape[-1]) * self.up
        # Some kernels would take the largest number for what is larger still.
        return torch.where(larger.abs() <= LARGEST, larger, torch.nan).to(SHORT)

    def product(self, rows: Tensor) -> Tensor:
        """Rows [n, in] in eight bits → [n, out]."""
        outputs: Tensor = torch._scaled_mm(
            rows,
            self.eight.t(),
            scale_a=self.down,
            scale_b=self.eight_down,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return outputs


class Gelu(nn.Module):
    """GELU by its tanh form, with the exponential that a GPU has an instruction for."""

    def forward(self, x: Tensor) -> Tensor:
        """[…] → […]."""
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


class EightMlp(nn.Module):
    """Linear, GELU, linear in eight bits; with a kernel of our own, hidden numbers are never anything else."""

    def __init__(self, first: EightLinear, second: EightLinear, *, fused: bool) -> None:
        super().__init__()
        self.first, self.act, self.second, self.fused = first, Gelu(), second, fused

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.second.product(self.hidden(self.first.short(inputs))).view(*inputs.shape[:-1], -1)

    def hidden(self, rows: Tensor) -> Tensor:
        """Rows [n, in] in eight bits → what the second layer is given, in eight bits."""
        first, second = self.first, self.second
        if not self.fused:
            return second.short(self.act(first.product(rows)))
        outputs: Tensor = torch.ops.patchcleanser.linear_gelu(rows, first.eight, first.bias, first.whole, second.up)
        return outputs


class EightBlock(nn.Module):
    """A ViT's block that is given a sum to do, and leaves its own last one to whoever comes next.

    Such a sum is part of the next norm's pass over memory; by itself it would be one more.
    """

    times: Tensor

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = block.norm1, block.attn, block.ls1
        self.norm2, self.mlp = block.norm2, block.mlp
        second = block.mlp.second
        plain = second.up.new_ones(len(second.eight))
        self.register_buffer("times", plain if type(block.ls2) is nn.Identity else block.ls2.gamma.detach())

    @staticmethod
    def of(block: nn.Module) -> EightBlock | None:
        """None if it is not such a block, or its MLP is not in eight bits."""
        known = (
            type(block) is Block and type(block.mlp) is EightMlp and does_nothing(block.drop_path1, block.drop_path2)
        )
        return EightBlock(block) if known and type(block.ls2) in (nn.Identity, LayerScale) else None

    def forward(self, x: Tensor, more: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum x + more × times [N, tokens, width] → what comes out, as such a sum."""
        x = torch.addcmul(x, more, times)
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x, self.mlp(self.norm2(x)), self.times


class EightResBlock(nn.Module):
    """ResMLP's block; with kernels of our own, three passes over memory in all."""

    mix: Tensor
    scale: Tensor
    shift: Tensor
    ls2: Tensor

    def __init__(self, block: FoldedResBlock, mlp: EightMlp) -> None:
        super().__init__()
        self.mlp, self.tokens = mlp, block.tokens
        for name in ("scale", "shift", "ls2"):
            self.register_buffer(name, getattr(block, name).contiguous())
        mix = block.mix
        self.fused = mlp.fused and len(block.ls2) % TILE == 0
        if self.fused:  # in whole tiles, with nothing in the rest of them
            mix = functional.pad(mix, (0, -mix.shape[1] % TILE, 0, -len(mix) % TILE))
        self.register_buffer("mix", mix)

    @staticmethod
    def of(block: FoldedResBlock) -> EightResBlock | None:
        """None if its linear layers are not in eight bits."""
        mlp = block.mlp
        return EightResBlock(block, mlp) if isinstance(mlp, EightMlp) else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the same."""
        mlp = self.mlp
        if self.fused:
            ours, second = torch.ops.patchcleanser, mlp.second
            x, rows = ours.mix_tokens(x, self.mix, self.scale, self.shift, mlp.first.up)
            outputs: Tensor = ours.linear_sum(mlp.hidden(rows), second.eight, second.bias, second.whole, self.ls2, x)
            return outputs
        mixed = torch.bmm(self.mix[: self.tokens, : self.tokens].expand(len(x), -1, -1), x)
        x = torch.addcmul(x + self.shift, mixed, self.scale)
        return torch.addcmul(x, mlp(x), self.ls2)


class Chained(nn.Module):
    """Blocks that leave their last sums to each other, and what comes after them."""

    def __init__(self, blocks: list[nn.Module], rest: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.rest = nn.ModuleList(blocks), nn.Sequential(*rest)

    @staticmethod
    def within(model: VisionTransformer) -> VisionTransformer | None:
        """The ViT with its blocks chained, in place; None if they do not begin with several such blocks.

        Other networks may go through their blocks one by one.
        """
        blocks: list[nn.Module] = []
        for part in model.blocks:
            if (block := EightBlock.of(part)) is None:
                break
            blocks.append(block)
        if len(blocks) < 2 or model.grad_checkpointing:
            return None
        model.blocks = Chained(blocks, list(model.blocks)[len(blocks) :])
        return model

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → what comes out behind the last."""
        more, times = x.detach(), x.new_zeros(x.shape[-1])
        for block in self.blocks:
            x, more, times = block(x, more, times)
        outputs: Tensor = self.rest(torch.addcmul(x, more, times))
        return outputs


def apart(module: nn.Module) -> nn.Module:
    """The module with linear layers that were fused, in place, as layers of their own again."""
    return replaced(module, {FusedMlp: lambda mlp: nn.Sequential(mlp.fc1, Gelu(), mlp.fc2)})


def shortened(module: nn.Module, shorts: Mapping[str, Short], *, fused: bool) -> nn.Module:
    """The module with these layers in eight bits, in place; they are given by name. `fused`: by kernels of our own."""
    found = {module.get_submodule(name): short for name, short in shorts.items()}

    def eight(layer: nn.Linear) -> nn.Module | None:
        return EightLinear(layer, found[layer]) if layer in found else None

    def mlp(parts: nn.Sequential) -> nn.Module | None:
        known = [type(part) for part in parts] == [EightLinear, Gelu, EightLinear] and parts[0].bias is not None
        return EightMlp(cast("EightLinear", parts[0]), cast("EightLinear", parts[2]), fused=fused) if known else None

    def as_it_is(block: nn.Module) -> nn.Module:
        return block

    # The last block of a ViT works on one token, and looks into its layers.
    module = replaced(module, {FirstTokenBlock: as_it_is, nn.Linear: eight})
    module = replaced(module, {FirstTokenBlock: as_it_is, nn.Sequential: mlp})
    module = replaced(module, {FoldedResBlock: EightResBlock.of, VisionTransformer: Chained.within})
    return module.eval()


def has_kernels(device: torch.device) -> bool:
    """Whether kernels of our own are for such a device; then they can be called."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != FUSED_ON:
        return False
    try:
        import patchcleanser.engine.fast.float8.kernels  # noqa: F401
    except ImportError:  # no Triton, or an old one
        return False
    return True


def is_fused(module: nn.Module) -> bool:
    """Whether a part of it goes by kernels of our own."""
    return any(part.fused for part in module.modules() if isinstance(part, (EightMlp, EightResBlock)))


def unfuse(module: nn.Module) -> None:
    """Do without them from now on."""
    for part in module.modules():
        if isinstance(part, (EightMlp, EightResBlock)):
            part.fused = False


def _power_of_two(number: float) -> float:
    """The largest power of two that is no larger: multiplying by it changes no digit.

    >>> _power_of_two(9.0), _power_of_two(0.3)
    (8.0, 0.25)
    """
    return 2.0 ** math.floor(math.log2(number))
