"""What makes training fast on CUDA and changes nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WORTH = 200
"""Compiling takes half a minute or so; runs of fewer steps do without."""


def compiled(module: Callable[..., Tensor], device: torch.device, steps: int) -> Callable[..., Tensor]:
    """A module, or a method of one, for `steps` steps of few shapes: compiled on CUDA where that pays."""
    return torch.compile(module, dynamic=False) if device.type == "cuda" and steps >= WORTH else module
