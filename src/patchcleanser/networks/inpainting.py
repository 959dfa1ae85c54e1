"""Inpainting: hidden pixels are filled from visible ones, so a network sees no grey squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.networks.wrapper import Around


class Inpainting(Around):
    """A network whose inputs are inpainted; one more channel says which pixels are hidden.

    It is mask-aware: its logits depend on the visible pixels and on the union of masks, so certificates hold. They are
    certificates of the wrapped network, not of the network alone. Without hidden pixels both have the same logits.
    """

    mask_aware = True
    steady = True

    def forward(self, inputs: Tensor) -> Any:
        """[N, C + 1, H, W], the last channel 1 where hidden → the network's output."""
        return self.network(inpaint(inputs[:, :-1], 1 - inputs[:, -1:]))


def inpaint(images: Tensor, visible: Tensor) -> Tensor:
    """Fill hidden pixels (0 in `visible` [N, 1, H, W]) of images [N, C, H, W] with colours of visible pixels nearby.

    The image is halved by averaging its visible pixels, and inpainted itself (recursively, down to one pixel). Hidden
    pixels are then read from it by bilinear interpolation. An image without visible pixels becomes 0, the mean colour.
    """
    covered = images * visible
    if max(images.shape[-2:]) == 1:
        return covered
    share = functional.avg_pool2d(visible, 2, ceil_mode=True)
    means = functional.avg_pool2d(covered, 2, ceil_mode=True) / torch.where(share > 0, share, 1.0)
    coarse = inpaint(means, (share > 0).to(images.dtype))
    upsampled = functional.interpolate(coarse, size=images.shape[-2:], mode="bilinear", align_corners=False)
    return covered + upsampled * (1 - visible)
