"""Compilation and bfloat16 on CUDA; elsewhere nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

MIN_COMPILED_STEPS = 200
"""Compiling takes about half a minute, which does not pay for fewer steps."""


def compile_for(steps: int, module: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a module, or a method of one, if it runs on CUDA for enough steps."""
    return torch.compile(module, dynamic=False) if device.type == "cuda" and steps >= MIN_COMPILED_STEPS else module


def bfloat16(device: torch.device, *, enabled: bool = True) -> torch.autocast:
    """Autocast to bfloat16 on CUDA."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and device.type == "cuda")


def moving_average(module: nn.Module, decay: float) -> ModelEmaV3:
    """An exponential moving average of the weights, whose decay rises to `decay` in the first steps."""
    return ModelEmaV3(module, decay=decay, use_warmup=True, warmup_power=0.8)
