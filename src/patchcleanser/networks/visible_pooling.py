"""Networks of small receptive fields that answer by what sees no hidden pixel: local logits, or features and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.networks.wrapper import Around


class VisibleOnly(Around):
    """A network of small receptive fields; one more channel says which pixels are hidden.

    What it computes at (i, j) sees the `field`×`field` px from (i * jump, j * jump).
    """

    mask_aware = True
    steady = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        inner: Any = network
        self.field, self.jump = int(inner.field), int(inner.jump)

    def visible(self, hidden: Tensor) -> Tensor:
        """[N, 1, H, W], above 0 where hidden → bool [N, 1, down, across], where no hidden pixel is seen."""
        visible: Tensor = functional.max_pool2d(hidden, self.field, self.jump) == 0
        return visible


class VisiblePooling(VisibleOnly):
    """The mean of a network's visible local logits; those that see a hidden pixel are left out.

    So the answer is a function of visible pixels and of the mask, whatever colour fills the mask. Where nothing is
    left, all logits are 0.
    """

    def local(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → local logits [N, classes, down, across]."""
        network: Any = self.network
        logits: Tensor = network.local(images)
        return logits

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C + 1, H, W] → logits."""
        visible = self.visible(inputs[:, -1:])
        sums = self.local(inputs[:, :-1]).masked_fill(~visible, 0.0).sum((2, 3))
        return sums / visible.sum((2, 3)).clamp_min(1)


class VisibleFeatures(VisibleOnly):
    """A network's head on the features of its trunk that see no hidden pixel; the others are 0."""

    def features(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → features [N, width, down, across]; except in training NaN is 0 and none is infinite."""
        network: Any = self.network
        features: Tensor = network.features(images)
        return features if self.training else features.nan_to_num(0.0)

    def head(self, features: Tensor, visible: Tensor) -> Tensor:
        """Logits from features of which only some, bool [N, down, across], are visible."""
        network: Any = self.network
        logits: Tensor = network.head(visible_only(features, visible))
        return logits

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C + 1, H, W] → logits."""
        return self.head(self.features(inputs[:, :-1]), self.visible(inputs[:, -1:])[:, 0])


def visible_only(features: Tensor, visible: Tensor) -> Tensor:
    """The input of a head [N, width + 1, down, across]: hidden features are 0, and the last channel is 1 there.

    They are replaced, not multiplied: 0 times NaN is NaN.
    """
    hidden = ~visible[:, None]
    return torch.cat([features.masked_fill(hidden, 0.0), hidden.to(features)], dim=1)
