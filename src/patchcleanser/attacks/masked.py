"""The defended classifier as an objective: gradients through all masks at once, in chunks that fit memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchcleanser.attacks.losses import goal_margin, gradient_chunk, shown
from patchcleanser.attacks.places import Place
from patchcleanser.attacks.search import Found
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.masks import MaskSet

LEAD = 1.0
"""A label counts as turned when it is wrong by so many logits; further is not rewarded."""
CONFIDENCE = 10.0
"""How many logits a whole unit of confidence is worth."""
SLACK = 0.02
"""Confidence is pushed so far below the threshold."""


@dataclass(frozen=True)
class Plan:
    """One candidate: where the patch is, and the masks whose labels the attacker can change."""

    place: Place
    truth: int
    ones: list[int]
    """Unions (single masks, or UNMASKED) that show the patch or a part of it."""
    pairs: list[tuple[int, int]]
    """Masks that hide a part of the patch, each with the union of two masks that refutes it most easily."""
    wrong: list[int] = field(default_factory=list)
    """Wrong labels of the masks that hide the patch: what they say cannot be changed."""
    rank: int = 0
    """Which of the promising wrong labels to aim for: another one at each restart."""


class AgainstMasks:
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
        plans: Sequence[Plan],
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

    def __call__(self, images: Tensor, *, slope: bool) -> Found:
        """Two passes: labels of all masks, then gradients through those that can still be improved."""
        every = torch.arange(len(self.owner), device=images.device)
        logits = self._logits(images, every).requires_grad_(slope)
        with torch.set_grad_enabled(slope):
            loss = self._loss(logits)
        if not slope:
            return Found(loss, loss, images.new_empty(0))
        (pull,) = torch.autograd.grad(loss.sum(), logits)
        found = torch.zeros_like(images)
        for part in torch.split(every[(pull != 0).any(1)], self._chunk(images)):
            x = images[self.owner[part]].detach().requires_grad_(True)
            out = self._forward(x, part)
            (mine,) = torch.autograd.grad(out, x, pull[part])
            found.index_add_(0, self.owner[part], mine)
        return Found(loss.detach(), loss.detach(), found.nan_to_num(0.0))

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
        return shown(self.classifier, torch.where(hidden, self.colour, images), hidden)

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
