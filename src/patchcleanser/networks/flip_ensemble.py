"""The mean of a network's answers to an image and to its mirror image: twice the cost, steadier labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchcleanser.networks.base import Around, logits_in


class Mirrored(Around):
    """A network that is asked about every image twice, the second time mirrored left to right.

    Both times the same pixels are hidden, so it is as mask-aware as the network it asks, and no more.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.mask_aware = bool(getattr(network, "mask_aware", False))
        self.steady = bool(getattr(network, "steady", False))

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C, H, W] → the mean of the logits of both."""
        logits = logits_in(self.network(torch.cat([inputs, inputs.flip(-1)])))
        number = inputs.shape[0]  # not chunk(2), which an export would take for batches of one size
        return (logits[:number] + logits[number:]) / 2
