"""The mean of several networks' answers: as dear as all of them, and more often right than any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcleanser.networks.base import logits_in


class Mean(nn.Module):
    """Networks that are all asked about every image, of which the same pixels are hidden for each."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.mask_aware = all(getattr(network, "mask_aware", False) for network in networks)
        self.steady = all(getattr(network, "steady", False) for network in networks)

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C, H, W] → the mean of the logits of all."""
        return torch.stack([logits_in(network(inputs)) for network in self.networks]).mean(0)
