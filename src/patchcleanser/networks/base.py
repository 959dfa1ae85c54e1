"""What networks that ask other networks share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Around(nn.Module):
    """A network that asks another one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def logits_in(output: Any) -> Tensor:
    """The logits of what a network returned; transformers wrap them."""
    logits: Tensor = getattr(output, "logits", output)
    return logits
