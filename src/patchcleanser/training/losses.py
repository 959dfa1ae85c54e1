"""Losses of networks that are trained for their certificate."""

from __future__ import annotations

from typing import Any

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


def interval_loss(
    module: Any,
    inputs: Tensor,
    labels: Tensor,
    patches: Cutout,
    generator: torch.Generator,
    strength: float,
    ends: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the worst logits under a patch at random places, and the plain logits (IBP).

    `patches` draws one place at a time, as often as its count says, and the worst of them counts. Pixels of a
    patch reach from themselves to the `ends` [2, C] of what a pixel can be, by a `strength` that grows from 0 to 1,
    as does the share of this loss in the whole.
    """
    logits = module(inputs)
    behind: Tensor | None = None
    for _ in range(patches.count):
        height, width = inputs.shape[2:]
        hidden = patches.one(len(inputs), (height, width), generator, inputs.device)
        box = [torch.lerp(inputs, end, strength) for end in boxes(inputs, hidden, *ends)]
        found = module.behind(*box, labels)
        behind = found if behind is None else torch.maximum(behind, found)
    plain = functional.cross_entropy(logits, labels)
    if behind is None:
        return plain, logits
    return torch.lerp(plain, functional.cross_entropy(behind, labels), strength), logits


def pixel_ends(preprocessing: Preprocessing, channels: int, device: torch.device) -> Tensor:
    """The smallest and largest numbers [2, C] that a pixel can be after normalising."""
    ends = torch.stack([torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1)])
    return preprocessing.normalise(ends)[:, :, 0, 0].to(device)
