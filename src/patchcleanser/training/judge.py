"""Which weights to keep: those whose labels survive masks on images held out of training."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.training.cutout import shown

VIEWS = 24
"""Two-mask views per held-out image; an image survives if its label is right under all of them."""


def two_mask_views(threat: Threat, size: Size, device: torch.device, masks: int = 6) -> Tensor:
    """A fixed sample of what the defense looks at: pixels kept under two masks, bool [views, H, W]."""
    kept = MaskSet.build(threat, image=size, masks=masks).visible()
    draw = np.random.default_rng(0).integers(0, len(kept), (VIEWS, 2))
    return torch.from_numpy(kept[draw[:, 0]] & kept[draw[:, 1]]).to(device)


def as_good(share: float, best: float, number: int) -> bool:
    """Whether a share of `number` images is within one standard error of the best one.

    >>> as_good(0.83, 0.84, 1000), as_good(0.82, 0.84, 1000)
    (True, False)
    """
    return share >= best - math.sqrt(best * (1 - best) / max(number, 1))


class Judge:
    """Scores the averaged weights on the held-out part, without any augmentation."""

    def __init__(self, images: Tensor, labels: Tensor, preprocessing: Preprocessing, threat: Threat) -> None:
        self.inputs, self.labels = preprocessing(images), labels
        height, width = self.inputs.shape[2:]
        self.views = two_mask_views(threat, (height, width), images.device)

    def __call__(self, model: nn.Module) -> tuple[float, float] | None:
        """Shares of the held-out images right unmasked, and right under all views; None if there are none."""
        if not len(self.labels):
            return None
        right = self._right(model, None)
        survive = right.clone()
        for view in self.views:
            survive &= self._right(model, ~view)
        return float(right.float().mean()), float(survive.float().mean())

    def _right(self, model: nn.Module, hidden: Tensor | None) -> Tensor:
        found = [model(viewed(model, part, hidden)).argmax(1) for part in torch.split(self.inputs, 2000)]
        return torch.cat(found) == self.labels


def viewed(model: nn.Module, inputs: Tensor, hidden: Tensor | None) -> Tensor:
    """Inputs as a network gets them with the same pixels hidden in all, bool [H, W]; None hides none."""
    return shown(model, inputs, None if hidden is None else hidden.expand(len(inputs), -1, -1))
