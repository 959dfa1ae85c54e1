"""What makes training fast on CUDA and changes nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WORTH = 200
"""Compiling takes half a minute or so; runs of fewer steps do without."""


def compiled(module: nn.Module, device: torch.device, steps: int) -> Callable[[Tensor], Tensor]:
    """The module for `steps` steps of few shapes: compiled on CUDA where that pays. It shares the weights."""
    return torch.compile(module, dynamic=False) if device.type == "cuda" and steps >= WORTH else module
