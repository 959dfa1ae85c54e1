"""Losses of networks that are trained for their certificate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.networks.interval import boxes
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

    Logits are clipped to at least 0 and averaged, as robust masking does. The true class loses the `window`×`window`
    places that speak most for it, and every other class keeps what it has.

    >>> there = torch.tensor([[8.0, 0.0], [0.0, 0.0]])
    >>> local = torch.stack([there, torch.ones(2, 2)])[None]
    >>> round(window_loss(local, torch.tensor([0]), 1).item(), 3)  # 0 is left for the true class, 1 for the other
    1.313
    """
    clipped = local.clamp_min(0.0)
    places = clipped.shape[2] * clipped.shape[3]
    mine = clipped[torch.arange(len(labels), device=local.device), labels]
    high, wide = (min(window, side) for side in mine.shape[1:])
    best = functional.avg_pool2d(mine[:, None], (high, wide), stride=1).amax((1, 2, 3)) * high * wide / places
    rest = clipped.mean((2, 3))
    return functional.cross_entropy(rest.scatter_add(1, labels[:, None], -best[:, None]), labels)


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
