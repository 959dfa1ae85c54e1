"""Kernels of our own, in Triton, for what no library does in one pass over a GPU's memory (measured on an H200).

Products of eight bits are so fast that what stands between two of them takes as long: numbers are written, read again,
changed a little and written once more. Here that is done where the numbers are made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from patchcleanser.engine.fast.float8.layers import SHORT, TILE

PROGRAMS = 2
"""Programs of `linear_gelu` that share a multiprocessor: while one rounds what it computed, the other computes."""

CHANNELS = 64
TOKENS = 32
"""Tiles in which tokens are mixed: channels, and tokens that are looked at together."""


@triton.jit
def _short(numbers, limit: tl.constexpr):
    """In eight bits; what is too large for them is no number."""
    return tl.where(tl.abs(numbers) <= limit, numbers, float("nan")).to(tl.float8e4nv)


@triton.jit
def _tanh(numbers, quick: tl.constexpr):
    """By the instruction that a GPU has for it, or, where kernels are only interpreted, from an exponential."""
    if quick:
        found = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = 2.0 * tl.sigmoid(2.0 * numbers) - 1.0
    return found


@triton.jit
def _products(rows, weight, top, left, depth, tile: tl.constexpr):
    """Of some rows and some weights."""
    sums = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, depth, tile):
        sums = tl.dot(rows.load([top, start]), weight.load([left, start]).T, sums)
    return sums


@triton.jit
def _some(numbers_at, left, width, tile: tl.constexpr):
    """Of one number for each column, those of some columns."""
    columns = left + tl.arange(0, tile)
    return tl.load(numbers_at + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _linear_gelu(
    rows,
    weight,
    bias_at,
    out,
    scale_at,
    up_at,
    height,
    width,
    depth,
    limit: tl.constexpr,
    tile: tl.constexpr,
    programs: tl.constexpr,
    quick: tl.constexpr,
):
    scale, up = tl.load(scale_at), tl.load(up_at).to(tl.float32)
    across = tl.cdiv(width, tile)
    # Neighbouring programs share rows, and all of them the weights.
    for number in tl.range(tl.program_id(0), across * tl.cdiv(height, tile), programs, flatten=True):
        top, left = (number // across) * tile, (number % across) * tile
        x = _products(rows, weight, top, left, depth, tile) * scale + _some(bias_at, left, width, tile)
        half = 0.5 * x
        gelu = half + half * _tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x), quick)
        out.store([top, left], _short(gelu * up, limit))


@torch.library.custom_op("patchcleanser::linear_gelu", mutates_args=())
def linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, up: Tensor) -> Tensor:
    """GELU (its tanh form) of a linear layer: rows [n, in] and weights [out, in] in eight bits → [n, out], in eight.

    Products are multiplied by `scale` before the bias is added, and what comes out by `up`.
    """
    (height, depth), width = rows.shape, len(weight)
    out = torch.empty(height, width, dtype=SHORT, device=rows.device)
    tiles = triton.cdiv(height, TILE) * triton.cdiv(width, TILE)
    programs = min(tiles, PROGRAMS * _multiprocessors(rows.device))
    with _on(rows.device):
        _linear_gelu[(programs,)](
            _tiled(rows),
            _tiled(weight),
            bias,
            _tiled(out),
            scale,
            up,
            height,
            width,
            depth,
            limit=torch.finfo(SHORT).max,
            tile=TILE,
            programs=programs,
            quick=rows.is_cuda,
            num_warps=4,
            num_stages=3,
        )
    return out


@linear_gelu.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, up: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))


@triton.jit
def _linear_sum(rows, weight, bias_at, times_at, x, out, scale_at, width, depth, tile: tl.constexpr):
    across = tl.cdiv(width, tile)
    top, left = (tl.program_id(0) // across) * tile, (tl.program_id(0) % across) * tile
    sums = _products(rows, weight, top, left, depth, tile) * tl.load(scale_at) + _some(bias_at, left, width, tile)
    before = x.load([top, left])
    after = before.to(tl.float32) + sums * _some(times_at, left, width, tile)
    out.store([top, left], after.to(before.dtype))


@torch.library.custom_op("patchcleanser::linear_sum", mutates_args=())
def linear_sum(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, times: Tensor, x: Tensor) -> Tensor:
    """The sum x […, out] + times × a linear layer of rows [n, in]; these and its weights [out, in] have eight bits."""
    width, depth = weight.shape
    flat = x.reshape(-1, width)
    out = torch.empty_like(flat)
    with _on(rows.device):
        _linear_sum[(triton.cdiv(len(rows), TILE) * triton.cdiv(width, TILE),)](
            _tiled(rows),
            _tiled(weight),
            bias,
            times,
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
def _(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, times: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@triton.jit
def _mix_tokens(
    x_at,
    mix_at,
    scale_at,
    shift_at,
    up_at,
    out_at,
    short_at,
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
        others = start + tl.arange(0, some)
        # What lies behind the last token is another image's, and no share of nothing: it might be no number.
        x = tl.load(
            x_at + first + others[:, None] * width + columns[None, :], mask=(others < tokens)[:, None], other=0.0
        )
        sums = tl.dot(tl.load(mix_at + rows[:, None] * spacing + others[None, :]), x, sums)
    there = (rows < tokens)[:, None]
    place = rows[:, None] * width + columns[None, :]
    x = tl.load(x_at + first + place, mask=there, other=0.0).to(tl.float32)
    x += tl.load(shift_at + place, mask=there, other=0.0).to(tl.float32)
    x += sums * tl.load(scale_at + columns).to(tl.float32)[None, :]
    tl.store(out_at + first + place, x.to(out_at.dtype.element_ty), mask=there)
    tl.store(short_at + first + place, _short(x * tl.load(up_at).to(tl.float32), limit), mask=there)


@torch.library.custom_op("patchcleanser::mix_tokens", mutates_args=())
def mix_tokens(x: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """ResMLP's mixing of tokens, x + shift + scale × (mix @ x): as it is [N, tokens, width], and as rows in eight bits.

    Those are multiplied by `up` before. `mix` has whole tiles, filled up with zeros, and `width` whole channels'.
    """
    number, tokens, width = x.shape
    x = x.contiguous()
    out, short = torch.empty_like(x), torch.empty(number * tokens, width, dtype=SHORT, device=x.device)
    with _on(x.device):
        _mix_tokens[(number * triton.cdiv(tokens, TILE) * (width // CHANNELS),)](
            x,
            mix,
            scale,
            shift,
            up,
            out,
            short,
            tokens=tokens,
            width=width,
            spacing=mix.stride(0),
            limit=torch.finfo(SHORT).max,
            tile=TILE,
            channels=CHANNELS,
            some=TOKENS,
            num_warps=4,
            num_stages=3,
        )
    return out, short


@mix_tokens.register_fake
def _(x: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0] * x.shape[1], x.shape[2], dtype=SHORT)


def _tiled(matrix: Tensor) -> TensorDescriptor:
    """A matrix of which a GPU fetches tiles by itself; what lies outside of it is zero."""
    return TensorDescriptor.from_tensor(matrix.contiguous(), [TILE, TILE])


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """How many there are; where kernels are interpreted, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Kernels are started on the current device, which need not be that of the numbers."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
