"""Training for one pass: one pass gives the logits under all pairs of masks, and the worst one counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.networks.visible_pooling import VisiblePooling


def fields_of(module: Any, size: Size) -> ReceptiveFields | None:
    """The receptive fields of a network that pools visible local logits; None for any other network."""
    pools = isinstance(module, VisiblePooling)
    return ReceptiveFields.fields(size, module.field, module.jump) if pools else None


def visible_weights(fields: ReceptiveFields, threat: Threat, device: torch.device) -> Tensor:
    """The weight of each local logit in the mean of the visible ones, [unions + 1, scores].

    Each row is for a union of two of the defense's masks, and the last one for no mask.
    """
    masks = MaskSet.build(threat, image=fields.size, fields=fields)
    visible = torch.from_numpy(fields.visible(masks.unions.boxes)).flatten(1).to(device, torch.float32)
    return visible / visible.sum(1, keepdim=True).clamp_min(1.0)


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
