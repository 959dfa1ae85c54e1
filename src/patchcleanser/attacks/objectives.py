"""What an attacker minimises: losses, and the undefended and the defended classifier as objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.attacks.patch_problem import LossValues, Placement, pixels_inside
from patchcleanser.classifiers.classifier import Classifier
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
    """The loss [N] that an attacker minimises."""
    if name == "margin":
        return goal_margin(logits, labels, target)
    if name == "ce":
        if target is None:
            return -functional.cross_entropy(logits, labels, reduction="none")
        return functional.cross_entropy(logits, torch.full_like(labels, target), reduction="none")
    # The logit margin, divided by how far the leading classes lie apart.
    need = 3 if target is None else 4
    if logits.shape[1] < need:
        raise InputError(f"the dlr loss needs at least {need} classes, got {logits.shape[1]}; use margin")
    top = logits.topk(need, dim=1).values
    if target is None:
        return goal_margin(logits, labels) / (top[:, 0] - top[:, 2] + 1e-12)
    ahead = logits.gather(1, labels[:, None])[:, 0] - logits[:, target]
    return ahead / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


class UndefendedObjective:
    """The objective of fooling the undefended classifier; gradients pass through resizing and cropping."""

    def __init__(
        self, classifier: Classifier, labels: Tensor, loss: Loss, target: int | None = None, chunk: int | None = None
    ) -> None:
        self.classifier, self.labels = classifier, labels
        self.loss: Loss = loss
        self.target, self.chunk = target, chunk

    def __call__(self, images: Tensor, *, gradient: bool) -> LossValues:
        size = self.chunk or gradient_chunk(self.classifier, images[:1])
        chunks = zip(torch.split(images, size), torch.split(self.labels, size), strict=True)
        parts = [self._chunk_values(images, labels, gradient) for images, labels in chunks]
        return LossValues(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _chunk_values(self, images: Tensor, labels: Tensor, gradient: bool) -> LossValues:
        images = images.detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            logits = class_logits(self.classifier, images)
            loss = attack_loss(self.loss, logits, labels, self.target)
            margin = goal_margin(logits, labels, self.target).detach()
        slope = torch.autograd.grad(loss.sum(), images)[0].nan_to_num(0.0) if gradient else images.new_empty(0)
        return LossValues(loss.detach(), margin, slope)


def class_logits(classifier: Classifier, images: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Logits [N, classes] of images on the threat's grid; mask-aware classifiers also get `hidden` [N, 1, H, W]."""
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
"""A label counts as changed when it is wrong by this many logits; more is not rewarded."""
CONFIDENCE = 10.0
"""How many logits a confidence of 1 is worth."""
SLACK = 0.02
"""Confidence is pushed this far below the threshold."""


@dataclass(frozen=True)
class AttackPlan:
    """One candidate: where the patches are, and the masks whose labels the attacker can change."""

    placement: Placement
    label: int
    """The true label."""
    unions: list[int]
    """Unions (single masks, or UNMASKED) that show the patch or a part of it."""
    pairs: list[tuple[int, int]]
    """Masks that hide a part of the patch, each with the union of two masks that refutes it most easily."""
    wrong_labels: list[int] = field(default_factory=list)
    """Wrong labels of the masks that hide the patch, which pixels of the patch cannot change."""
    rank: int = 0
    """Which of the promising wrong labels to aim for: another one at each restart."""


class MaskedObjective:
    """The objective of misleading a defense: make one wrong label the majority, and refute right disagreers.

    For candidate b with target t, over the masks i that do not hide its patch:

        mean over i of max(0, lead + how far label t is under mask i)
      + mean over partial i of min(max(0, lead + margin of the true label under i), the same under i and its partner)

    With a confidence threshold (Minority Reports) a mask may instead be made unconfident, and the second term is the
    unmasked image's.
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
        self.classifier, self.plans, self.threshold, self.chunk = classifier, plans, threshold, chunk
        singles = [(b, u) for b, plan in enumerate(plans) for u in plan.unions]
        number = {entry: n for n, entry in enumerate(singles)}
        entries = singles + [(b, u) for b, plan in enumerate(plans) for _, u in plan.pairs]
        used = sorted({u for _, u in entries})
        row = {u: n for n, u in enumerate(used)}

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, device=classifier.device, dtype=torch.long)

        windows = [masks.unions.masks[u] if u >= 0 else () for u in used]
        self.hidden = pixels_inside(windows, masks.image).to(classifier.device)
        # An entry is a candidate under a union: first all single masks, then the pairs.
        self.singles = len(singles)
        self.candidate = indices([b for b, _ in entries])
        self.union = indices([row[u] for _, u in entries])
        self.partner = indices([number[b, i] for b, plan in enumerate(plans) for i, _ in plan.pairs])
        self.unmasked = torch.tensor([u < 0 for _, u in singles], device=classifier.device)
        self.labels = indices([plan.label for plan in plans])
        self.target = self.labels

    def choose_targets(self, clean: Tensor, target: int | None) -> None:
        """Aim for the wrong labels of masks that hide the patch, then for the classes that the other masks favour."""
        logits = self._logits(clean, torch.arange(self.singles, device=clean.device))
        mean = torch.zeros(len(self.plans), logits.shape[1], device=clean.device)
        mean = mean.index_add(0, self.candidate[: self.singles], logits)
        mean.scatter_(1, self.labels[:, None], -torch.inf)
        targets = []
        for plan, favoured in zip(self.plans, mean.argsort(dim=1, descending=True).tolist(), strict=True):
            wrong = sorted(set(plan.wrong_labels), key=plan.wrong_labels.count, reverse=True)
            order = list(dict.fromkeys([*wrong, *favoured]))
            targets.append(order[plan.rank % (len(order) - 1)] if target is None else target)
        self.target = torch.tensor(targets, device=clean.device)

    def __call__(self, images: Tensor, *, gradient: bool) -> LossValues:
        """Two passes: labels of all masks, then gradients through those that can still be improved."""
        entries = torch.arange(len(self.candidate), device=images.device)
        logits = self._logits(images, entries).requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            loss = self._loss(logits)
        if not gradient:
            return LossValues(loss, loss, images.new_empty(0))
        (upstream,) = torch.autograd.grad(loss.sum(), logits)
        total = torch.zeros_like(images)
        for part in torch.split(entries[(upstream != 0).any(1)], self._chunk(images)):
            inputs = images[self.candidate[part]].detach().requires_grad_(True)
            (slopes,) = torch.autograd.grad(self._forward(inputs, part), inputs, upstream[part])
            total.index_add_(0, self.candidate[part], slopes)
        return LossValues(loss.detach(), loss.detach(), total.nan_to_num(0.0))

    def _loss(self, logits: Tensor) -> Tensor:
        singles, candidate = logits[: self.singles], self.candidate[: self.singles]
        change = (LEAD - goal_margin(singles, self.target[candidate])).clamp_min(0)
        if self.threshold is not None:
            unsure = CONFIDENCE * (singles.softmax(1).amax(1) - self.threshold + SLACK).clamp_min(0)
            # The undefended label itself must be wrong; a mask need only not contradict it confidently.
            change = torch.where(self.unmasked, change, torch.minimum(change, unsure))
            return self._mean(change, candidate) + self._mean(change[self.unmasked], candidate[self.unmasked])
        loss = self._mean(change, candidate)
        if len(self.partner):
            pair_candidate = self.candidate[self.singles :]
            labels = self.labels[pair_candidate]
            alone = (goal_margin(singles[self.partner], labels) + LEAD).clamp_min(0)
            refuted = (goal_margin(logits[self.singles :], labels) + LEAD).clamp_min(0)
            loss = loss + self._mean(torch.minimum(alone, refuted), pair_candidate)
        return loss

    def _mean(self, values: Tensor, candidate: Tensor) -> Tensor:
        """The mean of each candidate's values [B]; 0 where it has none."""
        zero = values.new_zeros(len(self.plans))
        count = zero.index_add(0, candidate, torch.ones_like(values)).clamp_min(1)
        return zero.index_add(0, candidate, values) / count

    def _logits(self, images: Tensor, entries: Tensor) -> Tensor:
        with torch.no_grad():
            parts = torch.split(entries, 2 * self._chunk(images))
            return torch.cat([self._forward(images[self.candidate[part]], part) for part in parts])

    def _forward(self, images: Tensor, entries: Tensor) -> Tensor:
        fill = self.classifier.preprocessing.source_fill(images.shape[1])
        colour = torch.tensor(fill, device=images.device)[:, None, None]
        hidden = self.hidden[self.union[entries]]
        return class_logits(self.classifier, torch.where(hidden, colour, images), hidden)

    def _chunk(self, images: Tensor) -> int:
        if self.chunk is None:
            self.chunk = gradient_chunk(self.classifier, images[:1])
        return self.chunk
