"""Training for one pass: local logits, or a head on features, under the worst pair of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling


def fields_of(module: Any, size: Size) -> ReceptiveFields | None:
    """The receptive fields of a network for one pass; None for any other network."""
    visible = isinstance(module, (VisiblePooling, VisibleFeatures))
    return ReceptiveFields.fields(size, module.field, module.jump) if visible else None


def visible_places(fields: ReceptiveFields, threat: Threat, device: torch.device) -> Tensor:
    """Which local logits or features are visible, bool [unions + 1, down, across].

    Each entry is for a union of two of the defense's masks, and the last one for no mask.
    """
    masks = MaskSet.build(threat, image=fields.size, fields=fields)
    return torch.from_numpy(fields.visible(masks.unions.boxes)).to(device)


def visible_weights(places: Tensor) -> Tensor:
    """The weight of each local logit in the mean of the visible ones, [unions + 1, scores]."""
    visible = places.flatten(1).float()
    return visible / visible.sum(1, keepdim=True).clamp_min(1.0)


@torch.no_grad()
def worst_of(tries: int, unions: int, losses: Callable[[Tensor], Tensor], like: Tensor, generator: Any) -> Tensor:
    """For each image the union of masks with the largest loss among a few random ones, [N] like `like`.

    `losses` gives the loss [N] of each image under its union.

    >>> generator = torch.Generator().manual_seed(0)
    >>> worst_of(50, 4, lambda union: -(union - 2.0).abs(), torch.tensor([0, 0, 0]), generator).tolist()
    [2, 2, 2]
    """
    drawn = torch.randint(unions, (tries, *like.shape), generator=generator, device=like.device)
    if tries == 1:
        return drawn[0]
    worst = torch.stack([losses(union) for union in drawn]).argmax(0)
    return drawn.gather(0, worst[None])[0]


def worst_logits(local: Tensor, labels: Tensor, weights: Tensor, masked: Tensor) -> Tensor:
    """Logits [N, classes] from local ones [N, classes, down, across].

    Images that are `masked` [N] get those under the pair of masks with the largest loss, the rest those under no mask.

    >>> local = torch.tensor([[3.0, 0.0], [1.0, 1.0]]).reshape(1, 2, 1, 2)  # the true class is seen on the left only
    >>> weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    >>> worst_logits(local, torch.tensor([0]), weights, torch.tensor([True])).tolist()
    [[0.0, 1.0]]
    >>> worst_logits(local, torch.tensor([0]), weights, torch.tensor([False])).tolist()
    [[1.5, 1.0]]
    """
    scores = local.flatten(2)
    number, unions = len(local), len(weights)
    with torch.no_grad():
        every = torch.einsum("us,ncs->nuc", weights, scores)
        losses = functional.cross_entropy(every.flatten(0, 1), labels.repeat_interleave(unions), reduction="none")
        union = torch.where(masked, losses.reshape(number, unions).argmax(1), unions - 1)
    return torch.einsum("ns,ncs->nc", weights[union], scores)
