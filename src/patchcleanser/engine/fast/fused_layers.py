"""Fused replacements for layers of timm, in our own copy of a network: less work for a GPU, the same logits.

Every rule takes one exact class, checks what it relies on, and leaves anything else alone.
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


def fuse_layers(module: nn.Module) -> nn.Module:
    """The module, in eval mode, with known layers replaced, in place, by faster equivalents."""
    if type(module) is VisionTransformer and is_plain(module):
        _first_token_only(module)
    return replace_layers(module, RULES).eval()


def replace_layers(module: nn.Module, rules: Mapping[type[nn.Module], Rule]) -> nn.Module:
    """The module with every layer that has a rule replaced, in place; those with hooks are left alone."""
    rule = rules.get(type(module))
    if rule is not None and is_plain(module) and (new := rule(module)) is not None:
        return new
    for name, child in module.named_children():
        if (replacement := replace_layers(child, rules)) is not child:
            setattr(module, name, replacement)
    return module


def is_plain(module: nn.Module) -> bool:
    """Whether neither the module nor a part of it has hooks, or a forward() or other method of its own."""
    return not any(
        part._forward_hooks
        or part._forward_pre_hooks
        or any(callable(getattr(type(part), name, None)) for name in vars(part))
        for part in module.modules()
    )


def is_identity(*parts: Any) -> bool:
    """Whether all of these return their input in eval mode, and can be left out."""
    return all(type(part) in (nn.Identity, nn.Dropout, DropPath) for part in parts)


class FlatPatchEmbed(nn.Module):
    """Patch embedding as one matrix product; as a convolution it takes many times as long."""

    def __init__(self, embed: PatchEmbed) -> None:
        super().__init__()
        self.patch: tuple[int, int] = embed.proj.kernel_size
        self.size: tuple[int, int] | None = embed.img_size
        self.norm = embed.norm
        self.weight = nn.Parameter(embed.proj.weight.permute(0, 2, 3, 1).flatten(1))
        self.bias = embed.proj.bias

    @staticmethod
    def of(embed: PatchEmbed) -> FlatPatchEmbed | None:
        """None if cells overlap, or if the output is no sequence."""
        conv = embed.proj
        disjoint = type(conv) is nn.Conv2d and conv.kernel_size == conv.stride and conv.groups == 1
        dense = disjoint and conv.padding == (0, 0) and conv.dilation == (1, 1)
        plain = dense and embed.flatten and embed.strict_img_size and not embed.dynamic_img_pad
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
    """Linear, GELU (on CUDA by its tanh form), linear; GELU is part of the first product's kernel."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    @staticmethod
    def of(mlp: Mlp) -> FusedMlp | None:
        """None for other activations, norms or convolutions."""
        return FusedMlp(mlp.fc1, mlp.fc2) if _is_plain_mlp(mlp) else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, width] → […, width]."""
        flat, weight = inputs.reshape(-1, inputs.shape[-1]), self.fc1.weight.t()
        hidden: Tensor = torch._addmm_activation(self.fc1.bias, flat, weight, use_gelu=True)
        outputs: Tensor = self.fc2(hidden.view(*inputs.shape[:-1], -1))
        return outputs


def _is_plain_mlp(mlp: nn.Module) -> bool:
    return (
        type(mlp) is Mlp
        and type(mlp.act) is nn.GELU
        and type(mlp.norm) is nn.Identity
        and is_identity(mlp.drop1, mlp.drop2)
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in (mlp.fc1, mlp.fc2))
    )


class FoldedResBlock(nn.Module):
    """ResMLP's block, its affine layers folded into their neighbours.

    Tokens are mixed by one product with the mixing matrix, instead of transposing them twice. Rows of the matrix are
    padded so that each begins at a multiple of 16 bytes, as fast kernels want it.
    """

    mix: Tensor
    scale: Tensor
    shift: Tensor
    ls2: Tensor

    def __init__(self, block: ResBlock) -> None:
        super().__init__()
        alpha, beta = block.norm1.alpha.flatten(), block.norm1.beta.flatten()
        mixing, tokens = block.linear_tokens, block.linear_tokens.out_features
        padded = mixing.weight.new_zeros(tokens, -(-mixing.in_features // 8) * 8)
        padded[:, : mixing.in_features] = mixing.weight
        self.tokens = tokens
        self.register_buffer("mix", padded)
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
        plain = _is_plain_mlp(block.mlp_channels) and type(block.norm1) is Affine and type(block.norm2) is Affine
        plain = plain and is_identity(block.drop_path)
        if not plain or type(block.linear_tokens) is not nn.Linear or block.linear_tokens.bias is None:
            return None
        with torch.no_grad():
            return FoldedResBlock(block)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the same."""
        mixed = torch.bmm(self.mix[:, : self.tokens].expand(len(x), -1, -1), x)
        x = torch.addcmul(x + self.shift, mixed, self.scale)
        return torch.addcmul(x, self.mlp(x), self.ls2)


class ChannelwiseGroupNorm(nn.Module):
    """Group normalisation from each channel's sum and sum of squares, which are fast with channels last."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.groups, self.eps, self.weight, self.bias = norm.num_groups, norm.eps, norm.weight, norm.bias
        self.act = norm.act if isinstance(norm, GroupNormAct) else nn.Identity()

    @staticmethod
    def of(norm: nn.GroupNorm) -> ChannelwiseGroupNorm | None:
        """None without weights, or with an active dropout layer."""
        plain = norm.affine and is_identity(getattr(norm, "drop", nn.Identity()))
        return ChannelwiseGroupNorm(norm) if plain else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, …] → the same; moments are float32."""
        number, channels = x.shape[:2]
        inner = tuple(range(2, x.ndim))
        shape = (number, channels, *([1] * len(inner)))
        size = x[0, 0].numel()
        # One pass is enough if a pixel in the middle, away from the edges, is subtracted first: otherwise a large
        # common offset would drown the sums of squares.
        center = x
        for _ in inner:
            center = center[..., center.shape[-1] // 2]
        shifted = x - center.view(shape)
        sums = shifted.sum(inner, dtype=torch.float32) / size
        squares = torch.linalg.vector_norm(shifted, dim=inner, dtype=torch.float32).square() / size
        means = (center.float() + sums).view(number, self.groups, -1)
        mean = means.mean(2, keepdim=True)
        within = (squares - sums.square()).view(number, self.groups, -1).clamp_min(0.0)
        variance = (within + (means - mean).square()).mean(2, keepdim=True)
        # The mean is subtracted first: beside a large one, half precision would keep nothing of the rest.
        rounded_mean = mean.to(x.dtype)
        x = x - rounded_mean.expand_as(means).reshape(shape)
        scale = self.weight.float().view(1, self.groups, -1) * torch.rsqrt(variance + self.eps)
        shift = self.bias.float().view(1, self.groups, -1) - (mean - rounded_mean.float()) * scale
        scaled = torch.addcmul(shift.view(shape).to(x.dtype), x, scale.view(shape).to(x.dtype))
        outputs: Tensor = self.act(scaled)
        return outputs


def standardised(conv: StdConv2d) -> nn.Conv2d:
    """A convolution with weights standardised once instead of at every call."""
    options = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    # On no device: its weights come from elsewhere, and no random numbers are drawn.
    plain = nn.Conv2d(**{name: getattr(conv, name) for name in options}, bias=conv.bias is not None, device="meta")
    flat = conv.weight.reshape(1, conv.out_channels, -1)
    with torch.no_grad():
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=conv.eps)
    plain.weight = nn.Parameter(weight.reshape_as(conv.weight))
    plain.bias = conv.bias
    return plain


class FirstTokenBlock(nn.Module):
    """The last block of a ViT whose head reads the first token only: other tokens give keys and values, no more."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = block.norm1, block.attn, block.ls1
        self.norm2, self.mlp, self.ls2 = block.norm2, block.mlp, block.ls2

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → [N, 1, width]."""
        attn, normed = self.attn, self.norm1(x)
        weight, bias, width = attn.qkv.weight, attn.qkv.bias, attn.proj.in_features
        query = functional.linear(normed[:, :1], weight[:width], None if bias is None else bias[:width])
        keys_values = functional.linear(normed, weight[width:], None if bias is None else bias[width:])
        query = attn.q_norm(query.view(len(x), 1, attn.num_heads, -1).transpose(1, 2))
        key, value = keys_values.view(len(x), x.shape[1], 2, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, attn.k_norm(key), value)
        attended = attn.norm(attended.transpose(1, 2).flatten(2))
        x = x[:, :1] + self.ls1(attn.proj(attended))
        outputs: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return outputs


def _is_plain_attention(attn: Any) -> bool:
    """Whether FirstTokenBlock computes what this attention does: no gate, plain linear layers, the usual scale."""
    return bool(
        type(attn) is Attention
        and hasattr(attn, "norm")
        and getattr(attn, "gate", None) is None
        and type(attn.qkv) is type(attn.proj) is nn.Linear
        and attn.scale == (attn.proj.in_features // attn.num_heads) ** -0.5
        and is_identity(attn.proj_drop)
    )


def _first_token_only(model: VisionTransformer) -> None:
    """Let the last block compute the first token alone, if the head reads no other."""
    if model.global_pool != "token" or getattr(model, "attn_pool", None) is not None or not len(model.blocks):
        return
    last = model.blocks[-1]
    if type(last) is Block and _is_plain_attention(last.attn) and is_identity(last.drop_path1, last.drop_path2):
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
