"""Losses of networks that are trained for their certificate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.classifiers.interval import boxes
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.training.cutout import Cutout


def margin_loss(shares: Tensor, labels: Tensor, margin: float) -> Tensor:
    """How far each class's share of votes [N, classes] comes within `margin` of the true one's, or beyond (BagCert).

    >>> round(margin_loss(torch.tensor([[0.9, 0.1], [0.5, 0.4]]), torch.tensor([0, 0]), 0.3).item(), 3)
    0.1
    """
    behind = margin + shares - shares.gather(1, labels[:, None])
    behind = behind.scatter(1, labels[:, None], 0.0).clamp_min(0.0)
    return behind.sum(1).mean()


def window_loss(local: Tensor, labels: Tensor, window: int) -> Tensor:
    """Cross-entropy of local logits [N, classes, down, across] once the true class's best window is gone (PatchGuard).

    As robust masking sees them: clipped to at least 0, without the `window`×`window` places that speak most for the
    true class, and averaged.

    >>> there = torch.tensor([[8.0, 0.0], [0.0, 0.0]])
    >>> local = torch.stack([there, torch.ones(2, 2)])[None]
    >>> round(window_loss(local, torch.tensor([0]), 1).item(), 3)  # 0 is left for the true class, 3/4 for the other
    1.137
    """
    number, _, height, width = local.shape
    side = min(window, height - 1, width - 1)
    clipped = local.clamp_min(0.0)
    with torch.no_grad():
        mine = clipped[torch.arange(number, device=local.device), labels]
        sums = functional.avg_pool2d(mine[:, None], side, stride=1)
        best = sums.flatten(1).argmax(1)
        top, left = best // sums.shape[3], best % sums.shape[3]
        rows, columns = (torch.arange(n, device=local.device)[None] for n in (height, width))
        down = (rows >= top[:, None]) & (rows < top[:, None] + side)
        across = (columns >= left[:, None]) & (columns < left[:, None] + side)
    rest = clipped.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0.0).mean((2, 3))
    return functional.cross_entropy(rest, labels)


Behind = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Boxes from low to high [N, C, H, W] and labels → the most by which each class can exceed the label [N, classes]."""


def interval_loss(
    behind: Behind,
    inputs: Tensor,
    labels: Tensor,
    patches: Cutout,
    generator: torch.Generator,
    strength: float,
    ends: Tensor,
) -> Tensor:
    """Cross-entropy of the worst logits under a patch at random places (IBP).

    `patches` draws as many places for each image as its count says, and the worst of them counts. Pixels of a patch
    reach from themselves to the `ends` [2, C] of what a pixel can be, by a `strength` that grows from 0 to 1.
    """
    number, _, height, width = inputs.shape
    # All places of all images in one pass: a small network spends its time starting kernels.
    many = inputs.repeat(patches.count, 1, 1, 1)
    hidden = patches.one(len(many), (height, width), generator, inputs.device)
    low, high = (torch.lerp(many, end, strength) for end in boxes(many, hidden, *ends))
    worst = behind(low, high, labels.repeat(patches.count)).reshape(patches.count, number, -1).amax(0)
    return functional.cross_entropy(worst, labels)


def pixel_ends(preprocessing: Preprocessing, channels: int, device: torch.device) -> Tensor:
    """The smallest and largest numbers [2, C] that a pixel can be after normalising."""
    ends = torch.stack([torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1)])
    return preprocessing.normalise(ends)[:, :, 0, 0].to(device)
