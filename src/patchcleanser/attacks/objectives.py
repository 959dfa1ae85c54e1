"""What an attacker makes small: losses, and the undefended and the defended classifier as objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.attacks.patch_problem import LossValues, Placement
from patchcleanser.classifiers.base import Classifier
from patchcleanser.core.masks import MaskSet
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


class UndefendedObjective:
    """The objective of fooling a classifier that nobody defends."""

    def __init__(
        self, classifier: Classifier, labels: Tensor, loss: Loss, target: int | None = None, chunk: int | None = None
    ) -> None:
        self.classifier, self.labels = classifier, labels
        self.loss: Loss = loss
        self.target, self.chunk = target, chunk

    def __call__(self, images: Tensor, *, slope: bool) -> LossValues:
        """Loss, margin and slope of every candidate; gradients pass through resizing and cropping."""
        size = self.chunk or gradient_chunk(self.classifier, images[:1])
        parts = [
            self._part(x, y, slope)
            for x, y in zip(torch.split(images, size), torch.split(self.labels, size), strict=True)
        ]
        losses, margins, slopes = zip(*parts, strict=True)
        return LossValues(torch.cat(losses), torch.cat(margins), torch.cat(slopes))

    def _part(self, images: Tensor, labels: Tensor, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
        images = images.detach().requires_grad_(slope)
        with torch.set_grad_enabled(slope):
            logits = class_logits(self.classifier, images)
            loss = attack_loss(self.loss, logits, labels, self.target)
            margin = goal_margin(logits, labels, self.target).detach()
        found = torch.autograd.grad(loss.sum(), images)[0].nan_to_num(0.0) if slope else images.new_empty(0)
        return loss.detach(), margin, found


def class_logits(classifier: Classifier, images: Tensor, hidden: Tensor | None = None) -> Tensor:
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


LEAD = 1.0
"""A label counts as turned when it is wrong by so many logits; further is not rewarded."""
CONFIDENCE = 10.0
"""How many logits a whole unit of confidence is worth."""
SLACK = 0.02
"""Confidence is pushed so far below the threshold."""


@dataclass(frozen=True)
class AttackPlan:
    """One candidate: where the patch is, and the masks whose labels the attacker can change."""

    place: Placement
    truth: int
    ones: list[int]
    """Unions (single masks, or UNMASKED) that show the patch or a part of it."""
    pairs: list[tuple[int, int]]
    """Masks that hide a part of the patch, each with the union of two masks that refutes it most easily."""
    wrong: list[int] = field(default_factory=list)
    """Wrong labels of the masks that hide the patch: what they say cannot be changed."""
    rank: int = 0
    """Which of the promising wrong labels to aim for: another one at each restart."""


class MaskedObjective:
    """The objective of misleading a defense: make one wrong label the majority, let no right disagreer stand.

    For candidate b with target t, over the masks i that do not hide its patch:

        mean over i of max(0, lead + how far label t is under mask i)
      + mean over partial i of min(max(0, lead + margin of the truth under i), the same under i and its partner)

    With a confidence threshold (Minority Reports) a mask may instead be made unsure, and the second
    term is the unmasked image's.
    """

    def __init__(
        self,
        classifier: Classifier,
        masks: MaskSet,
        plans: Sequence[AttackPlan],
        *,
        threshold: float | None = None,
        chunk: int | None = None,
    ) -> None:
        self.classifier, self.masks, self.plans = classifier, masks, plans
        self.threshold, self.chunk = threshold, chunk
        device = classifier.device
        ones = [(b, u) for b, plan in enumerate(plans) for u in plan.ones]
        at = {entry: n for n, entry in enumerate(ones)}
        pairs = [(b, u) for b, plan in enumerate(plans) for _, u in plan.pairs]
        partner = [at[b, i] for b, plan in enumerate(plans) for i, _ in plan.pairs]
        entries = ones + pairs
        used = sorted({u for _, u in entries})
        row = {u: n for n, u in enumerate(used)}
        self.hidden = _hidden(masks, used).to(device)
        self.owner = torch.tensor([b for b, _ in entries], device=device, dtype=torch.long)
        self.union = torch.tensor([row[u] for _, u in entries], device=device, dtype=torch.long)
        self.partner = torch.tensor(partner, device=device, dtype=torch.long)
        self.unmasked = torch.tensor([u < 0 for _, u in ones], device=device)
        self.ones = len(ones)
        self.truth = torch.tensor([plan.truth for plan in plans], device=device)
        self.target = self.truth
        self.colour: Tensor | None = None

    def choose_targets(self, clean: Tensor, target: int | None) -> None:
        """Aim for what hiding masks say wrongly already, then for the classes that visible masks favour."""
        logits = self._logits(clean, torch.arange(self.ones, device=clean.device))
        mean = torch.zeros(len(self.plans), logits.shape[1], device=clean.device)
        mean = mean.index_add(0, self.owner[: self.ones], logits)
        mean.scatter_(1, self.truth[:, None], -torch.inf)
        chosen = []
        for plan, favour in zip(self.plans, mean.argsort(dim=1, descending=True).tolist(), strict=True):
            said = sorted(set(plan.wrong), key=plan.wrong.count, reverse=True)
            order = list(dict.fromkeys([*said, *favour]))
            chosen.append(order[plan.rank % (len(order) - 1)] if target is None else target)
        self.target = torch.tensor(chosen, device=clean.device)

    def __call__(self, images: Tensor, *, slope: bool) -> LossValues:
        """Two passes: labels of all masks, then gradients through those that can still be improved."""
        every = torch.arange(len(self.owner), device=images.device)
        logits = self._logits(images, every).requires_grad_(slope)
        with torch.set_grad_enabled(slope):
            loss = self._loss(logits)
        if not slope:
            return LossValues(loss, loss, images.new_empty(0))
        (pull,) = torch.autograd.grad(loss.sum(), logits)
        found = torch.zeros_like(images)
        for part in torch.split(every[(pull != 0).any(1)], self._chunk(images)):
            x = images[self.owner[part]].detach().requires_grad_(True)
            out = self._forward(x, part)
            (mine,) = torch.autograd.grad(out, x, pull[part])
            found.index_add_(0, self.owner[part], mine)
        return LossValues(loss.detach(), loss.detach(), found.nan_to_num(0.0))

    def _loss(self, logits: Tensor) -> Tensor:
        ones, owner = logits[: self.ones], self.owner[: self.ones]
        far = -goal_margin(ones, self.target[owner])
        turn = (far + LEAD).clamp_min(0)
        if self.threshold is not None:
            unsure = CONFIDENCE * (ones.softmax(1).amax(1) - self.threshold + SLACK).clamp_min(0)
            # The undefended label itself must be wrong; a mask need only not contradict it surely.
            turn = torch.where(self.unmasked, turn, torch.minimum(turn, unsure))
            return self._mean(turn, owner) + self._mean(turn[self.unmasked], owner[self.unmasked])
        loss = self._mean(turn, owner)
        if len(self.partner):
            owners = self.owner[self.ones :]
            alone = (goal_margin(ones[self.partner], self.truth[owners]) + LEAD).clamp_min(0)
            refuted = (goal_margin(logits[self.ones :], self.truth[owners]) + LEAD).clamp_min(0)
            loss = loss + self._mean(torch.minimum(alone, refuted), owners)
        return loss

    def _mean(self, values: Tensor, owner: Tensor) -> Tensor:
        """The mean of each candidate's values [B]; 0 where it has none."""
        zero = values.new_zeros(len(self.plans))
        count = zero.index_add(0, owner, torch.ones_like(values)).clamp_min(1)
        return zero.index_add(0, owner, values) / count

    def _logits(self, images: Tensor, entries: Tensor) -> Tensor:
        with torch.no_grad():
            parts = torch.split(entries, 2 * self._chunk(images))
            return torch.cat([self._forward(images[self.owner[part]], part) for part in parts])

    def _forward(self, images: Tensor, entries: Tensor) -> Tensor:
        if self.colour is None:
            fill = self.classifier.preprocessing.source_fill(images.shape[1])
            self.colour = torch.tensor(fill, device=images.device)[:, None, None]
        hidden = self.hidden[self.union[entries]]
        return class_logits(self.classifier, torch.where(hidden, self.colour, images), hidden)

    def _chunk(self, images: Tensor) -> int:
        if self.chunk is None:
            self.chunk = gradient_chunk(self.classifier, images[:1])
        return self.chunk


def _hidden(masks: MaskSet, unions: Sequence[int]) -> Tensor:
    """[unions, 1, H, W]: True where a pixel is hidden; UNMASKED hides none."""
    hidden = torch.zeros(len(unions), 1, *masks.image, dtype=torch.bool)
    for n, union in enumerate(unions):
        for w in masks.unions.masks[union] if union >= 0 else ():
            hidden[n, :, w.top : w.bottom, w.left : w.right] = True
    return hidden
