"""The base of networks that wrap another network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Around(nn.Module):
    """A network that wraps another one and has no weights of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def logits_in(output: Any) -> Tensor:
    """The logits in a network's output; Hugging Face transformers wrap them."""
    logits: Tensor = getattr(output, "logits", output)
    return logits
