"""Which weights to keep: those whose labels survive masks on images held out of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat

CRITERION_PAIRS = 24
"""Two-mask views per held-out image; an image survives if its label is right under all of them."""


class Normaliser:
    """Images in [0, 1] to the network's input: enlarged where asked, and normalised."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], size: tuple[int, int] | None, device: torch.device
    ) -> None:
        self.mean, self.std = (torch.tensor(v, device=device)[:, None, None] for v in (mean, std))
        self.size = size

    def __call__(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [0, 1] → inputs."""
        if self.size is not None and self.size != tuple(images.shape[2:]):
            images = functional.interpolate(images, size=self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return (images - self.mean) / self.std


class Judge:
    """Scores the averaged weights on the held-out part, without any augmentation."""

    def __init__(self, pixels: Tensor, labels: Tensor, held: Any, norm: Normaliser, threat: Threat) -> None:
        index = torch.as_tensor(held, device=pixels.device)
        self.inputs = norm(pixels[index].permute(0, 3, 1, 2).float() / 255)
        self.labels = labels[index]
        height, width = norm.size or pixels.shape[1:3]
        masks = MaskSet.build(threat, image=(int(height), int(width)), masks=6)
        draw = np.random.default_rng(0).integers(0, len(masks), (CRITERION_PAIRS, 2))
        kept = masks.visible()
        self.views = torch.from_numpy(kept[draw[:, 0]] & kept[draw[:, 1]]).to(pixels.device)

    def __call__(self, model: nn.Module) -> tuple[float, float] | None:
        """Shares of the held-out images right unmasked, and right under all views; None if there are none."""
        if not len(self.labels):
            return None
        right = self._right(model, self.inputs)
        survive = right.clone()
        for view in self.views:
            survive &= self._right(model, self.inputs * view)
        return float(right.float().mean()), float(survive.float().mean())

    def _right(self, model: nn.Module, inputs: Tensor) -> Tensor:
        found = torch.cat([model(part).argmax(1) for part in torch.split(inputs, 2000)])
        return found == self.labels
