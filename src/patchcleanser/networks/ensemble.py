"""Ensembles: the mean of several networks' logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcleanser.networks.wrapper import logits_in


class Mean(nn.Module):
    """The mean logits of several networks, which all see the same masked image."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.mask_aware = all(getattr(network, "mask_aware", False) for network in networks)
        self.steady = all(getattr(network, "steady", False) for network in networks)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([logits_in(network(inputs)) for network in self.networks]).mean(0)
