"""Which weights to keep: those whose labels survive masks on images held out of training."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Grid, Threat
from patchcleanser.core.windows import Size

VIEWS = 24
"""Two-mask views per held-out image; an image survives if its label is right under all of them."""


def two_mask_views(threat: Threat, size: Size, device: torch.device) -> Tensor:
    """A fixed sample of what the defense looks at: pixels kept under two masks, bool [views, H, W]."""
    masks = MaskSet.build(threat, image=size, masks=6)
    draw = np.random.default_rng(0).integers(0, len(masks), (VIEWS, 2))
    kept = masks.visible()
    return torch.from_numpy(kept[draw[:, 0]] & kept[draw[:, 1]]).to(device)


def as_good(share: float, best: float, number: int) -> bool:
    """Whether a share of `number` images is within one standard error of the best: a difference that means nothing.

    >>> as_good(0.83, 0.84, 1000), as_good(0.82, 0.84, 1000)
    (True, False)
    """
    return share >= best - math.sqrt(best * (1 - best) / max(number, 1))


def mask_colour(preprocessing: Preprocessing, images: Tensor) -> Tensor:
    """What hides pixels of images as they came [C, 1, 1]."""
    return images.new_tensor(preprocessing.source_fill(images.shape[1]))[:, None, None]


class Judge:
    """Scores the averaged weights on the held-out part, without any augmentation."""

    def __init__(
        self, images: Tensor, labels: Tensor, preprocessing: Preprocessing, threat: Threat, grid: Grid = "input"
    ) -> None:
        self.labels, self.source = labels, grid == "source"
        self.images = images if self.source else preprocessing(images)
        self.preprocessing = preprocessing
        height, width = self.images.shape[2:]
        self.views = two_mask_views(threat, (height, width), images.device)

    def __call__(self, model: nn.Module) -> tuple[float, float] | None:
        """Shares of the held-out images right unmasked, and right under all views; None if there are none."""
        if not len(self.labels):
            return None
        right = self._right(model, torch.ones_like(self.views[0]))
        survive = right.clone()
        for view in self.views:
            survive &= self._right(model, view)
        return float(right.float().mean()), float(survive.float().mean())

    def _right(self, model: nn.Module, view: Tensor) -> Tensor:
        parts = torch.split(self.images, 2000)
        return torch.cat([model(self._seen(part, view)).argmax(1) for part in parts]) == self.labels

    def _seen(self, images: Tensor, view: Tensor) -> Tensor:
        if not self.source:
            return images * view
        return self.preprocessing(torch.where(view, images, mask_colour(self.preprocessing, images)))
