"""A teacher's feature maps, beside its answers, for networks that learn slowly from few images.

A transformer from nothing must find out by itself that neighbouring pixels belong together; what a convolutional
network sees at a place tells its token there so at once (as in Li et al., "Locality Guidance", 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.errors import TrainingError


class Telling(nn.Module):
    """A network of timm's that answers with two maps of its features, too: from within, and its last."""

    def __init__(self, network: nn.Module, inputs: Tensor, within: float) -> None:
        super().__init__()
        self.network: Any = network
        told = self._maps(inputs)
        last = len(told) - 1
        if last < 1:
            raise TrainingError(f"{type(network).__name__} shows one feature map, guidance needs two; do without it")
        self.places = [max(0, min(round(within * len(told)), last) - 1), last]
        """Of all maps that it has, counted from 0."""
        self.widths = [told[place].shape[1] for place in self.places]

    def _maps(self, inputs: Tensor) -> list[Tensor]:
        """All that there are, for some inputs to try it with."""
        training = self.network.training
        try:
            with torch.no_grad():
                last, maps = self.network.eval().forward_intermediates(inputs)
                self.network.forward_head(last)
        except Exception as error:  # of a network that is not timm's, or was put together from its parts
            raise TrainingError(
                f"{type(self.network).__name__} shows no feature maps (forward_intermediates of timm's networks: "
                f"{error}), so it can neither guide nor be guided; do without the setting guidance"
            ) from error
        finally:
            self.network.train(training)
        told: list[Tensor] = maps
        return told

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and maps [N, width, h, w]."""
        last, maps = self.network.forward_intermediates(inputs, indices=self.places)
        return self.network.forward_head(last), maps


class Guide(nn.Module):
    """What a network's maps say about a teacher's: a linear layer for each, learnt along and thrown away."""

    def __init__(self, widths: list[int], wanted: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in zip(widths, wanted, strict=True))

    def forward(self, maps: list[Tensor], wanted: list[Tensor]) -> Tensor:
        """How far maps are from the teacher's at the same place, each of its channels counting the same."""
        apart = []
        for layer, own, other in zip(self.layers, maps, wanted, strict=True):
            level = functional.batch_norm(other.float(), None, None, training=True)
            level = functional.interpolate(level, own.shape[2:], mode="bilinear", align_corners=False)
            apart.append(functional.mse_loss(layer(own).float(), level))
        return torch.stack(apart).mean()
