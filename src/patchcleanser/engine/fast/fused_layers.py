"""Layers of timm written anew, in a copy of a network of our own, so that a GPU does less for the same answer.

Every rule takes one exact class, looks at what it relies on, and leaves alone what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.layers import DropPath, GroupNorm, GroupNormAct, Mlp, PatchEmbed, StdConv2d
from timm.models.mlp_mixer import Affine, ResBlock
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

Rule = Callable[[Any], nn.Module | None]


def rewritten(module: nn.Module) -> nn.Module:
    """The module, in eval mode, with the layers that are known here replaced, in place, by cheaper equals."""
    if type(module) is VisionTransformer and is_plain(module):
        _first_token_only(module)
    return replaced(module, RULES).eval()


def replaced(module: nn.Module, rules: Mapping[type[nn.Module], Rule]) -> nn.Module:
    """The module with every layer that a rule knows replaced, in place; those with hooks are left alone."""
    rule = rules.get(type(module))
    if rule is not None and is_plain(module) and (new := rule(module)) is not None:
        return new
    for name, child in module.named_children():
        if (other := replaced(child, rules)) is not child:
            setattr(module, name, other)
    return module


def is_plain(module: nn.Module) -> bool:
    """Nobody hooked into the module, or into a part of it, or gave it another forward() or other method."""
    return not any(
        part._forward_hooks
        or part._forward_pre_hooks
        or any(callable(getattr(type(part), name, None)) for name in vars(part))
        for part in module.modules()
    )


def does_nothing(*parts: Any) -> bool:
    """In eval mode these hand on what they get, and can be left out."""
    return all(type(part) in (nn.Identity, nn.Dropout, DropPath) for part in parts)


def linear_gelu(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (on CUDA by its tanh form) of a linear layer, in the matrix product's own kernel."""
    flat: Tensor = torch._addmm_activation(bias, inputs.reshape(-1, inputs.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*inputs.shape[:-1], -1)


class FlatPatchEmbed(nn.Module):
    """Patches to tokens by one matrix product; as a convolution it takes many times as long."""

    def __init__(self, embed: PatchEmbed) -> None:
        super().__init__()
        self.patch: tuple[int, int] = embed.proj.kernel_size
        self.size: tuple[int, int] | None = embed.img_size
        self.norm = embed.norm
        self.weight = nn.Parameter(embed.proj.weight.permute(0, 2, 3, 1).flatten(1))
        self.bias = embed.proj.bias

    @staticmethod
    def of(embed: PatchEmbed) -> FlatPatchEmbed | None:
        """None if patches overlap, or if what comes out is no sequence."""
        conv = embed.proj
        apart = type(conv) is nn.Conv2d and conv.kernel_size == conv.stride and conv.groups == 1
        usual = apart and conv.padding == (0, 0) and conv.dilation == (1, 1)
        plain = usual and embed.flatten and embed.strict_img_size and not embed.dynamic_img_pad
        return FlatPatchEmbed(embed) if plain else None

    def forward(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → [N, tokens, width]."""
        number, channels, height, width = images.shape
        if self.size is not None and (height, width) != tuple(self.size):
            raise ValueError(f"the network takes images of {self.size}, got {height}×{width}")
        down, across = self.patch
        lines = images.permute(0, 2, 3, 1)
        cells = lines.reshape(number, height // down, down, width // across, across, channels).transpose(2, 3)
        tokens: Tensor = self.norm(functional.linear(cells.flatten(3).flatten(1, 2), self.weight, self.bias))
        return tokens


class FusedMlp(nn.Module):
    """Linear, GELU, linear, with the hidden numbers written once instead of twice."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    @staticmethod
    def of(mlp: Mlp) -> FusedMlp | None:
        """None for other activations, norms or convolutions."""
        return FusedMlp(mlp.fc1, mlp.fc2) if _is_plain_mlp(mlp) else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, width] → […, width]."""
        hidden: Tensor = self.fc2(linear_gelu(inputs, self.fc1.weight, self.fc1.bias))
        return hidden


def _is_plain_mlp(mlp: nn.Module) -> bool:
    return (
        type(mlp) is Mlp
        and type(mlp.act) is nn.GELU
        and type(mlp.norm) is nn.Identity
        and does_nothing(mlp.drop1, mlp.drop2)
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in (mlp.fc1, mlp.fc2))
    )


class FoldedResBlock(nn.Module):
    """ResMLP's block, its affine layers folded into their neighbours.

    Tokens are mixed as one product of the mixing matrix with the tokens as they lie, instead of transposing them
    twice. Rows of the matrix are spaced so that each begins at a multiple of 16 bytes, as fast kernels want it.
    """

    mix: Tensor
    scale: Tensor
    shift: Tensor
    ls2: Tensor

    def __init__(self, block: ResBlock) -> None:
        super().__init__()
        alpha, beta = block.norm1.alpha.flatten(), block.norm1.beta.flatten()
        mixing, tokens = block.linear_tokens, block.linear_tokens.out_features
        spaced = mixing.weight.new_zeros(tokens, -(-mixing.in_features // 8) * 8)
        spaced[:, : mixing.in_features] = mixing.weight
        self.tokens = tokens
        self.register_buffer("mix", spaced)
        self.register_buffer("scale", block.ls1 * alpha)
        self.register_buffer("shift", block.ls1 * (torch.outer(mixing.weight.sum(1), beta) + mixing.bias[:, None]))
        self.register_buffer("ls2", block.ls2.detach().clone())
        mlp, norm = block.mlp_channels, block.norm2
        first = nn.Linear(mlp.fc1.in_features, mlp.fc1.out_features, device="meta")
        first.weight = nn.Parameter(mlp.fc1.weight * norm.alpha.flatten())
        first.bias = nn.Parameter(mlp.fc1.bias + mlp.fc1.weight @ norm.beta.flatten())
        self.mlp: nn.Module = FusedMlp(first, mlp.fc2)

    @staticmethod
    def of(block: ResBlock) -> FoldedResBlock | None:
        """None if its parts are not those of ResMLP."""
        known = _is_plain_mlp(block.mlp_channels) and type(block.norm1) is Affine and type(block.norm2) is Affine
        known = known and does_nothing(block.drop_path)
        if not known or type(block.linear_tokens) is not nn.Linear or block.linear_tokens.bias is None:
            return None
        with torch.no_grad():
            return FoldedResBlock(block)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the same."""
        mixed = torch.bmm(self.mix[:, : self.tokens].expand(len(x), -1, -1), x)
        x = torch.addcmul(x + self.shift, mixed, self.scale)
        return torch.addcmul(x, self.mlp(x), self.ls2)


class ChannelwiseGroupNorm(nn.Module):
    """Group normalisation from each channel's sum and sum of squares, which are quick to get with channels last."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.groups, self.eps, self.weight, self.bias = norm.num_groups, norm.eps, norm.weight, norm.bias
        self.act = norm.act if isinstance(norm, GroupNormAct) else nn.Identity()

    @staticmethod
    def of(norm: nn.GroupNorm) -> ChannelwiseGroupNorm | None:
        """None without weights, or with dropout that is some."""
        usual = norm.affine and does_nothing(getattr(norm, "drop", nn.Identity()))
        return ChannelwiseGroupNorm(norm) if usual else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, …] → the same; moments are float32."""
        number, channels = x.shape[:2]
        inner = tuple(range(2, x.ndim))
        shape = (number, channels, *([1] * len(inner)))
        size = x[0, 0].numel()
        # One look at all numbers is enough if they are taken from one of them, in the middle, where edges do not
        # count: sums of squares that a common large part would drown then lose nothing.
        one = x
        for _ in inner:
            one = one[..., one.shape[-1] // 2]
        moved = x - one.view(shape)
        sums = moved.sum(inner, dtype=torch.float32) / size
        squares = torch.linalg.vector_norm(moved, dim=inner, dtype=torch.float32).square() / size
        means = (one.float() + sums).view(number, self.groups, -1)
        mean = means.mean(2, keepdim=True)
        within = (squares - sums.square()).view(number, self.groups, -1).clamp_min(0.0)
        spread = (within + (means - mean).square()).mean(2, keepdim=True)
        # The mean goes first: beside a large one, nothing would be left of the rest in half precision.
        near = mean.to(x.dtype)
        x = x - near.expand_as(means).reshape(shape)
        scale = self.weight.float().view(1, self.groups, -1) * torch.rsqrt(spread + self.eps)
        shift = self.bias.float().view(1, self.groups, -1) - (mean - near.float()) * scale
        scaled = torch.addcmul(shift.view(shape).to(x.dtype), x, scale.view(shape).to(x.dtype))
        outputs: Tensor = self.act(scaled)
        return outputs


def standardised(conv: StdConv2d) -> nn.Conv2d:
    """Weight standardisation done once instead of at every call."""
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        bias=conv.bias is not None,
        device="meta",  # its weights come from elsewhere, and nobody's random numbers are used up
    )
    flat = conv.weight.reshape(1, conv.out_channels, -1)
    with torch.no_grad():
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=conv.eps)
    plain.weight = nn.Parameter(weight.reshape_as(conv.weight))
    plain.bias = conv.bias
    return plain


class FirstTokenBlock(nn.Module):
    """The last block of a ViT whose head reads the first token only: the others get keys and values, nothing else."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = block.norm1, block.attn, block.ls1
        self.norm2, self.mlp, self.ls2 = block.norm2, block.mlp, block.ls2

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → [N, 1, width]."""
        attn, normed = self.attn, self.norm1(x)
        weight, bias, width = attn.qkv.weight, attn.qkv.bias, attn.proj.in_features
        query = functional.linear(normed[:, :1], weight[:width], None if bias is None else bias[:width])
        others = functional.linear(normed, weight[width:], None if bias is None else bias[width:])
        query = attn.q_norm(query.view(len(x), 1, attn.num_heads, -1).transpose(1, 2))
        key, value = others.view(len(x), x.shape[1], 2, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, attn.k_norm(key), value)
        found = attn.norm(found.transpose(1, 2).flatten(2))
        x = x[:, :1] + self.ls1(attn.proj(found))
        outputs: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return outputs


def _is_plain_attention(attn: Any) -> bool:
    """What is computed here by hand is done by layers whose weights say all."""
    return bool(
        type(attn) is Attention
        and hasattr(attn, "norm")
        and getattr(attn, "gate", None) is None
        and type(attn.qkv) is type(attn.proj) is nn.Linear
        and attn.scale == (attn.proj.in_features // attn.num_heads) ** -0.5
        and does_nothing(attn.proj_drop)
    )


def _first_token_only(model: VisionTransformer) -> None:
    """Let the last block compute what the head reads, if that is the first token alone."""
    if model.global_pool != "token" or getattr(model, "attn_pool", None) is not None or not len(model.blocks):
        return
    last = model.blocks[-1]
    if type(last) is Block and _is_plain_attention(last.attn) and does_nothing(last.drop_path1, last.drop_path2):
        model.blocks[-1] = FirstTokenBlock(last)


RULES: dict[type[nn.Module], Rule] = {
    PatchEmbed: FlatPatchEmbed.of,
    Mlp: FusedMlp.of,
    ResBlock: FoldedResBlock.of,
    nn.GroupNorm: ChannelwiseGroupNorm.of,
    GroupNorm: ChannelwiseGroupNorm.of,
    GroupNormAct: ChannelwiseGroupNorm.of,
    StdConv2d: standardised,
}
