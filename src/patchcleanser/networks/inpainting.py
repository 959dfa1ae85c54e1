"""Hidden pixels filled in from visible ones: a network made for whole pictures then meets no grey squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.networks.base import Around


class Inpainting(Around):
    """A network behind a filling-in, told by one more channel which pixels are hidden.

    It is mask-aware: its answers depend on the visible pixels and on the union of masks, so certificates
    hold, but they are its own, not those of the network alone. Where nothing is hidden it answers as the network does.
    """

    mask_aware = True
    steady = True

    def forward(self, inputs: Tensor) -> Any:
        """[N, C + 1, H, W], the last channel 1 where hidden → the network's output."""
        return self.network(filled_in(inputs[:, :-1], 1 - inputs[:, -1:]))


def filled_in(images: Tensor, visible: Tensor) -> Tensor:
    """Images [N, C, H, W] whose hidden pixels (0 in `visible` [N, 1, H, W]) are blended from the nearest visible ones.

    Means of the visible pixels are taken over squares of twice the side, again and again, until each square
    has one; what is hidden is then read from the coarser picture. An image hidden whole becomes 0, the mean colour.
    """
    covered = images * visible
    if max(images.shape[-2:]) == 1:
        return covered
    known = functional.avg_pool2d(visible, 2, ceil_mode=True)
    some = (known > 0).to(images.dtype)
    means = functional.avg_pool2d(covered, 2, ceil_mode=True) / torch.where(known > 0, known, 1.0)
    coarse = filled_in(means, some)
    wider = functional.interpolate(coarse, size=images.shape[-2:], mode="bilinear", align_corners=False)
    return covered + wider * (1 - visible)
