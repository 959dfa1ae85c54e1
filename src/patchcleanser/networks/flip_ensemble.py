"""Flip ensembles: the mean logits of an image and its mirror image, at twice the cost."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchcleanser.networks.wrapper import Around, logits_in


class Mirrored(Around):
    """The mean of a network's logits for an image and for the image flipped left to right.

    The same pixels are hidden in both, so it is mask-aware exactly if the network is.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.mask_aware = bool(getattr(network, "mask_aware", False))
        self.steady = bool(getattr(network, "steady", False))

    def forward(self, inputs: Tensor) -> Tensor:
        logits = logits_in(self.network(torch.cat([inputs, inputs.flip(-1)])))
        number = inputs.shape[0]  # chunk(2) would fix the batch size of an ONNX export
        return (logits[:number] + logits[number:]) / 2
