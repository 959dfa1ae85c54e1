"""Networks of small receptive fields whose answer is the mean of the local logits that see no hidden pixel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.networks.wrapper import Around


class VisiblePooling(Around):
    """The mean of a network's visible local logits; one more channel says which pixels are hidden.

    Local logit (i, j) sees the `field`×`field` px from (i * jump, j * jump), and is left out if one of them is hidden.
    So the answer is a function of visible pixels and of the mask, whatever colour fills the mask. Where nothing is
    left, all logits are 0.
    """

    mask_aware = True
    steady = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        inner: Any = network
        self.field, self.jump = int(inner.field), int(inner.jump)

    def local(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → local logits [N, classes, down, across]."""
        network: Any = self.network
        logits: Tensor = network.local(images)
        return logits

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C + 1, H, W] → logits."""
        visible = functional.max_pool2d(inputs[:, -1:], self.field, self.jump) == 0
        sums = self.local(inputs[:, :-1]).masked_fill(~visible, 0.0).sum((2, 3))
        return sums / visible.sum((2, 3)).clamp_min(1)
