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

SHORT = torch.float8_e4m3fn
TILE = 128
PROGRAMS = 2
"""Programs that share a multiprocessor: while one rounds what it computed, the other computes."""

STAGES = 3
CHANNELS = 64
TOKENS = 32
WARPS = 8


@triton.jit
def _short(numbers, limit: tl.constexpr):
    """In eight bits; what is too large for them is no number."""
    return tl.where(tl.abs(numbers) <= limit, numbers, float("nan")).to(tl.float8e4nv)


@triton.jit
def _tanh(numbers, quick: tl.constexpr):
    """By the instruction that a GPU has for it, or, where kernels are only interpreted, from an exponential."""
    if quick:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2.0 * tl.sigmoid(2.0 * numbers) - 1.0


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
        sums = tl.zeros((tile, tile), dtype=tl.float32)
        for start in range(0, depth, tile):
            sums = tl.dot(rows.load([top, start]), weight.load([left, start]).T, sums)
        columns = left + tl.arange(0, tile)
        bias = tl.load(bias_at + columns, mask=columns < width, other=0.0).to(tl.float32)
        x = sums * scale + bias[None, :]
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
    block = [TILE, TILE]
    with _on(rows.device):
        _linear_gelu[(programs,)](
            TensorDescriptor.from_tensor(rows.contiguous(), block),
            TensorDescriptor.from_tensor(weight.contiguous(), block),
            bias,
            TensorDescriptor.from_tensor(out, block),
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
            num_stages=STAGES,
        )
    return out


@linear_gelu.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, up: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))


@triton.jit
def _mix_tokens(
    x_at,
    more_at,
    times_at,
    mix_at,
    scale_at,
    shift_at,
    up_at,
    out_at,
    short_at,
    tokens,
    width,
    spacing,
    limit: tl.constexpr,
    most: tl.constexpr,
    channels: tl.constexpr,
    some: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * tokens * width
    columns = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = columns < width
    times = tl.load(times_at + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    rows = tl.arange(0, most)
    sums = tl.zeros((most, channels), dtype=tl.float32)
    for start in range(0, tokens, some):
        others = start + tl.arange(0, some)
        there = (others < tokens)[:, None] & inside[None, :]
        at = first + others[:, None] * width + columns[None, :]
        x = tl.load(x_at + at, mask=there, other=0.0).to(tl.float32)
        x += tl.load(more_at + at, mask=there, other=0.0).to(tl.float32) * times
        shares = tl.load(
            mix_at + rows[:, None] * spacing + others[None, :],
            mask=(rows < tokens)[:, None] & (others < tokens)[None, :],
            other=0.0,
        )
        sums = tl.dot(shares, x.to(shares.dtype), sums)
    scale = tl.load(scale_at + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    there = (rows < tokens)[:, None] & inside[None, :]
    place = rows[:, None] * width + columns[None, :]
    at = first + place
    x = tl.load(x_at + at, mask=there, other=0.0).to(tl.float32)
    x += tl.load(more_at + at, mask=there, other=0.0).to(tl.float32) * times
    x += tl.load(shift_at + place, mask=there, other=0.0).to(tl.float32) + sums * scale
    tl.store(out_at + at, x.to(out_at.dtype.element_ty), mask=there)
    tl.store(short_at + at, _short(x * tl.load(up_at).to(tl.float32), limit), mask=there)


@torch.library.custom_op("patchcleanser::mix_tokens", mutates_args=())
def mix_tokens(
    x: Tensor, more: Tensor, times: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """ResMLP's mixing of tokens, of y = x + more × times [N, tokens, width]: y + shift + scale × (mix @ y).

    Once as it is, and once, times `up`, as rows in eight bits. Rows of `mix` may be spaced.
    """
    number, tokens, width = x.shape
    x, more = x.contiguous(), more.contiguous()
    out, short = torch.empty_like(x), torch.empty(number * tokens, width, dtype=SHORT, device=x.device)
    with _on(x.device):
        _mix_tokens[(number, triton.cdiv(width, CHANNELS))](
            x,
            more,
            times,
            mix,
            scale,
            shift,
            up,
            out,
            short,
            tokens,
            width,
            mix.stride(0),
            limit=torch.finfo(SHORT).max,
            most=triton.next_power_of_2(tokens),
            channels=CHANNELS,
            some=TOKENS,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out, short


@mix_tokens.register_fake
def _(
    x: Tensor, more: Tensor, times: Tensor, mix: Tensor, scale: Tensor, shift: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0] * x.shape[1], x.shape[2], dtype=SHORT)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """How many there are; where kernels are interpreted, none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Kernels are started on the current device, which need not be that of the numbers."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
