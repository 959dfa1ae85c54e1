"""What an attacker makes small, and the undefended classifier as an objective."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.attacks.search import Found
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.engine.masking import with_mask_channel
from patchcleanser.errors import InputError

Loss = Literal["margin", "ce", "dlr"]
"""Logit margin; cross-entropy; difference of logits ratio (Croce & Hein 2020), which no scaling of logits hides."""

GRADIENT_BYTES = 8_000
"""Memory a network is assumed to need per input number where gradients are kept (ResNet-18 needs about 3,400)."""
CPU_NUMBERS = 800_000
"""Input numbers per chunk on a CPU: 5 images at 224×224, 260 at 32×32."""


def goal_margin(logits: Tensor, labels: Tensor, target: int | None = None) -> Tensor:
    """How far the goal is, in logits [N]: true label before the best other one, or the best other before the target.

    >>> goal_margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item()
    1.0
    >>> goal_margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), target=1).item()
    2.0
    """
    if target is not None:
        return -goal_margin(logits, torch.full_like(labels, target))
    chosen = functional.one_hot(labels, logits.shape[1]).bool()
    return logits.gather(1, labels[:, None])[:, 0] - logits.masked_fill(chosen, -torch.inf).amax(1)


def attack_loss(name: Loss, logits: Tensor, labels: Tensor, target: int | None = None) -> Tensor:
    """The loss [N] that an attacker makes small."""
    if name == "margin":
        return goal_margin(logits, labels, target)
    if name == "ce":
        wanted = labels if target is None else torch.full_like(labels, target)
        away = functional.cross_entropy(logits, wanted, reduction="none")
        return -away if target is None else away
    return _ratio(logits, labels, target)


def _ratio(logits: Tensor, labels: Tensor, target: int | None) -> Tensor:
    """The logit margin, divided by how far the leading classes lie apart."""
    need = 3 if target is None else 4
    if logits.shape[1] < need:
        raise InputError(f"the dlr loss needs at least {need} classes, got {logits.shape[1]}; use margin")
    top = logits.topk(need, dim=1).values
    if target is None:
        return goal_margin(logits, labels) / (top[:, 0] - top[:, 2] + 1e-12)
    ahead = logits.gather(1, labels[:, None])[:, 0] - logits[:, target]
    return ahead / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


class Undefended:
    """The objective of fooling a classifier that nobody defends."""

    def __init__(
        self, classifier: Classifier, labels: Tensor, loss: Loss, target: int | None = None, chunk: int | None = None
    ) -> None:
        self.classifier, self.labels = classifier, labels
        self.loss: Loss = loss
        self.target, self.chunk = target, chunk

    def __call__(self, images: Tensor, *, slope: bool) -> Found:
        """Loss, margin and slope of every candidate; gradients pass through resizing and cropping."""
        size = self.chunk or gradient_chunk(self.classifier, images[:1])
        parts = [
            self._part(x, y, slope)
            for x, y in zip(torch.split(images, size), torch.split(self.labels, size), strict=True)
        ]
        losses, margins, slopes = zip(*parts, strict=True)
        return Found(torch.cat(losses), torch.cat(margins), torch.cat(slopes))

    def _part(self, images: Tensor, labels: Tensor, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
        images = images.detach().requires_grad_(slope)
        with torch.set_grad_enabled(slope):
            logits = shown(self.classifier, images)
            loss = attack_loss(self.loss, logits, labels, self.target)
            margin = goal_margin(logits, labels, self.target).detach()
        found = torch.autograd.grad(loss.sum(), images)[0].nan_to_num(0.0) if slope else images.new_empty(0)
        return loss.detach(), margin, found


def shown(classifier: Classifier, images: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Logits of images on the threat's grid; a mask-aware classifier is told which pixels are hidden [N, 1, H, W]."""
    inputs = classifier.prepare(images)
    if classifier.mask_aware:
        inputs = with_mask_channel(inputs, None if hidden is None else hidden[:, 0])
    return classifier.logits(inputs).float()


def gradient_chunk(classifier: Classifier, image: Tensor) -> int:
    """How many inputs to differentiate at once, for images like this one [1, C, H, W]."""
    with torch.no_grad():
        numbers = classifier.prepare(image).numel()
    if classifier.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(classifier.device)
        return max(1, min(4096, free // 2 // (numbers * GRADIENT_BYTES)))
    return max(1, min(256, CPU_NUMBERS // numbers))
