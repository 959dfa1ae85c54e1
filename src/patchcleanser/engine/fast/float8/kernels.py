"""Triton kernels that fuse FP8 products with the elementwise work around them (measured on an H200).

FP8 products are so fast that the elementwise work between two of them takes as long, since it writes and reads all
numbers again. Here it is part of the product's own kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchcleanser.engine.fast.float8.layers import FLOAT8, TILE

PROGRAMS = 2
"""Programs of `linear_gelu` on each multiprocessor: while one rounds its sums, the other computes."""

CHANNELS = 64
TOKENS = 32
"""The tile of `mix_tokens`: channels, and tokens that are read together."""


@triton.jit
def _to_float8(numbers, limit: tl.constexpr):
    """Round to FP8; what is too large becomes NaN."""
    return tl.where(tl.abs(numbers) <= limit, numbers, float("nan")).to(tl.float8e4nv)


@triton.jit
def _tanh(numbers, quick: tl.constexpr):
    """By a GPU's own instruction, or, where kernels are interpreted, from an exponential."""
    if quick:
        outputs = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        outputs = 2.0 * tl.sigmoid(2.0 * numbers) - 1.0
    return outputs


@triton.jit
def _products(rows, weight, top, left, depth, tile: tl.constexpr):
    """One tile of the product rows @ weight.T."""
    sums = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, depth, tile):
        sums = tl.dot(rows.load([top, start]), weight.load([left, start]).T, sums)
    return sums


@triton.jit
def _load_columns(numbers_at, left, width, tile: tl.constexpr):
    """A tile [1, tile] of a vector with one number for each column."""
    columns = left + tl.arange(0, tile)
    return tl.load(numbers_at + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _linear_gelu(
    rows,
    weight,
    bias_at,
    out,
    scale_at,
    out_scale_at,
    height,
    width,
    depth,
    limit: tl.constexpr,
    tile: tl.constexpr,
    programs: tl.constexpr,
    quick: tl.constexpr,
):
    scale, out_scale = tl.load(scale_at), tl.load(out_scale_at).to(tl.float32)
    across = tl.cdiv(width, tile)
    # Neighbouring programs share rows, and all of them the weights.
    for number in tl.range(tl.program_id(0), across * tl.cdiv(height, tile), programs, flatten=True):
        top, left = (number // across) * tile, (number % across) * tile
        x = _products(rows, weight, top, left, depth, tile) * scale + _load_columns(bias_at, left, width, tile)
        half = 0.5 * x
        gelu = half + half * _tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x), quick)
        out.store([top, left], _to_float8(gelu * out_scale, limit))


@torch.library.custom_op("patchcleanser::linear_gelu", mutates_args=())
def linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, out_scale: Tensor) -> Tensor:
    """GELU (its tanh form) of a linear layer: FP8 rows [n, in] and weights [out, in] → FP8 [n, out].

    Products are multiplied by `scale` before the bias is added, and outputs by `out_scale`.
    """
    (height, depth), width = rows.shape, len(weight)
    out = torch.empty(height, width, dtype=FLOAT8, device=rows.device)
    tiles = triton.cdiv(height, TILE) * triton.cdiv(width, TILE)
    programs = min(tiles, PROGRAMS * _multiprocessors(rows.device))
    with _on(rows.device):
        _linear_gelu[(programs,)](
            _tiled(rows),
            _tiled(weight),
            bias,
            _tiled(out),
            scale,
            out_scale,
            height,
            width,
            depth,
            limit=torch.finfo(FLOAT8).max,
            tile=TILE,
            programs=programs,
            quick=rows.is_cuda,
            num_warps=4,
            num_stages=3,
        )
    return out


@linear_gelu.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, out_scale: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))


@triton.jit
def _linear_sum(rows, weight, bias_at, gamma_at, x, out, scale_at, width, depth, tile: tl.constexpr):
    across = tl.cdiv(width, tile)
    top, left = (tl.program_id(0) // across) * tile, (tl.program_id(0) % across) * tile
    sums = _products(rows, weight, top, left, depth, tile) * tl.load(scale_at) + _load_columns(
        bias_at, left, width, tile
    )
    before = x.load([top, left])
    after = before.to(tl.float32) + sums * _load_columns(gamma_at, left, width, tile)
    out.store([top, left], after.to(before.dtype))


@torch.library.custom_op("patchcleanser::linear_sum", mutates_args=())
def linear_sum(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, gamma: Tensor, x: Tensor) -> Tensor:
    """The sum x […, out] + gamma × a linear layer of FP8 rows [n, in], with FP8 weights [out, in]."""
    width, depth = weight.shape
    flat = x.reshape(-1, width)
    out = torch.empty_like(flat)
    with _on(rows.device):
        _linear_sum[(triton.cdiv(len(rows), TILE) * triton.cdiv(width, TILE),)](
            _tiled(rows),
            _tiled(weight),
            bias,
            gamma,
            _tiled(flat),
            _tiled(out),
            scale,
            width,
            depth,
            tile=TILE,
            num_warps=4,
            num_stages=3,
        )
    return out.view(x.shape)


@linear_sum.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, gamma: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@triton.jit
def _mix_tokens(
    x_at,
    mix_at,
    scale_at,
    shift_at,
    out_scale_at,
    out_at,
    float8_at,
    tokens: tl.constexpr,
    width: tl.constexpr,
    spacing: tl.constexpr,
    limit: tl.constexpr,
    tile: tl.constexpr,
    channels: tl.constexpr,
    some: tl.constexpr,
):
    across: tl.constexpr = width // channels
    down: tl.constexpr = (tokens + tile - 1) // tile
    number = tl.program_id(0)
    first = (number // (down * across)).to(tl.int64) * tokens * width
    rows = (number // across % down) * tile + tl.arange(0, tile)
    columns = (number % across) * channels + tl.arange(0, channels)
    sums = tl.zeros((tile, channels), dtype=tl.float32)
    for start in range(0, tokens, some):
        sources = start + tl.arange(0, some)
        # Rows behind the last token are another image's. Times zero they would count for nothing, unless they are NaN.
        x = tl.load(
            x_at + first + sources[:, None] * width + columns[None, :], mask=(sources < tokens)[:, None], other=0.0
        )
        sums = tl.dot(tl.load(mix_at + rows[:, None] * spacing + sources[None, :]), x, sums)
    valid = (rows < tokens)[:, None]
    offsets = rows[:, None] * width + columns[None, :]
    x = tl.load(x_at + first + offsets, mask=valid, other=0.0).to(tl.float32)
    x += tl.load(shift_at + offsets, mask=valid, other=0.0).to(tl.float32)
    x += sums * tl.load(scale_at + columns).to(tl.float32)[None, :]
    tl.store(out_at + first + offsets, x.to(out_at.dtype.element_ty), mask=valid)
    tl.store(float8_at + first + offsets, _to_float8(x * tl.load(out_scale_at).to(tl.float32), limit), mask=valid)


@torch.library.custom_op("patchcleanser::mix_tokens", mutates_args=())
def mix_tokens(x: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, out_scale: Tensor) -> tuple[Tensor, Tensor]:
    """ResMLP's mixing of tokens, x + shift + scale × (mix @ x): as [N, tokens, width], and as FP8 rows.

    The rows are multiplied by `out_scale` first. `mix` is zero-padded to whole tiles, and `width` divides by CHANNELS.
    """
    number, tokens, width = x.shape
    x = x.contiguous()
    out, float8 = torch.empty_like(x), torch.empty(number * tokens, width, dtype=FLOAT8, device=x.device)
    with _on(x.device):
        _mix_tokens[(number * triton.cdiv(tokens, TILE) * (width // CHANNELS),)](
            x,
            mix,
            scale,
            shift,
            out_scale,
            out,
            float8,
            tokens=tokens,
            width=width,
            spacing=mix.stride(0),
            limit=torch.finfo(FLOAT8).max,
            tile=TILE,
            channels=CHANNELS,
            some=TOKENS,
            num_warps=4,
            num_stages=3,
        )
    return out, float8


@mix_tokens.register_fake
def _(x: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, out_scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0] * x.shape[1], x.shape[2], dtype=FLOAT8)


def _tiled(matrix: Tensor) -> TensorDescriptor:
    """A descriptor by which a GPU fetches tiles of a matrix by itself; outside of it are zeros."""
    return TensorDescriptor.from_tensor(matrix.contiguous(), [TILE, TILE])


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has; one where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Make the tensors' device the current one, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
