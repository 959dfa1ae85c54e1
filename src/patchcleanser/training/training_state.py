"""What training and hardening share: the state of a run, and faster arithmetic on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from patchcleanser.errors import TrainingError

MIN_COMPILED_STEPS = 200
"""Compiling takes about half a minute, which does not pay for fewer steps."""


def compile_for(steps: int, module: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a module, or a method of one, if it runs on CUDA for enough steps."""
    return torch.compile(module, dynamic=False) if device.type == "cuda" and steps >= MIN_COMPILED_STEPS else module


def bfloat16(device: torch.device, *, enabled: bool = True) -> torch.autocast:
    """Autocast to bfloat16 on CUDA."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and device.type == "cuda")


class TrainingState:
    """What changes from step to step: weights, their moving average, the optimiser and random generators.

    The generator draws masks and augmentation on the device; `order` draws the order of images.
    """

    optimizer: Any

    def __init__(self, module: nn.Module, generator: torch.Generator, *, seed: int, decay: float | None) -> None:
        self.module, self.generator, self.device = module, generator, generator.device
        self.order = np.random.default_rng(seed)
        self.ema: Any = None
        if decay is not None:
            self.ema = ModelEmaV3(module, decay=decay, use_warmup=True, warmup_power=0.8)
        self.step = 0

    @property
    def averaged(self) -> nn.Module:
        """The module with the weights to evaluate and return."""
        return self.module if self.ema is None else self.ema.module

    def parts(self) -> dict[str, Any]:
        """All that has a `state_dict`."""
        return {"module": self.module, "averaged": self.averaged, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {
            **{name: part.state_dict() for name, part in self.parts().items()},
            "generator": self.generator.get_state(),
            "order": self.order.bit_generator.state,
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        try:
            for name, part in self.parts().items():
                part.load_state_dict(state[name])
        except RuntimeError as error:
            raise TrainingError("the checkpoint is of another architecture; use another folder (--out)") from error
        self.generator.set_state(state["generator"].cpu())
        self.order.bit_generator.state, self.step = state["order"], state["step"]
