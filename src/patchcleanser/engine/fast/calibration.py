"""Which labels of a fast backend are uncertain: bounds on how far its logits move, learnt from clean images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from patchcleanser.engine.masking import ImageState, PairBatch
from patchcleanser.engine.numerics import nonfinite, sanitize, top2_margin

SAMPLE = 512
MIN_IMAGES = 8
"""About so many labels of a group of clean images, and of no fewer images, are computed both ways before any fast one
is trusted. What one image, or two, teach about others is too little: seen with `tiny` in bfloat16."""

POOL = 2048
"""Up to half of the sample are the closest calls of so many other labels: confident ones move least."""

SAFETY = 2.0
"""Labels are uncertain up to this many times the largest movement seen."""

MAX_UNCERTAIN_SHARE = 0.5
"""Where a larger share of the labels is uncertain, computing all of them exactly is cheaper."""


class ErrorBounds:
    """How far each class's logit may move against another's between a fast backend and a finer one.

    A label flips if some class gains more on the first than it lay behind. So a label is uncertain if some class lies
    no further behind the first than (twice) the most that just these two, or the first two of any label, were seen to
    move against each other, or than the backend can resolve at all. Bounds are learnt from clean images only and then
    fixed: neither the order of images nor the size of batches changes them, and an attacker's images teach nothing.
    They only ever widen, when a label turns out to have moved further.
    """

    def __init__(
        self, fast: Tensor, exact: Tensor, resolution: float, *, typical: Tensor | None = None, overflowed: int = 0
    ) -> None:
        """Learn from the same labels [N, C] by both; `typical` fast logits, and how many overflowed, give the share."""
        self._moved = fast.new_zeros(0, fast.shape[1])
        self._top2_moved = 0.0
        self._resolution = SAFETY * resolution
        self._typical, self._overflowed = fast if typical is None else typical, overflowed
        self.uncertain_share = self.widen(fast, exact)
        """The share of typical labels that is uncertain."""

    def widen(self, fast: Tensor, finer: Tensor) -> float:
        """Learn from these labels too; the share that is uncertain then."""
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(finer), 0.0, finer - fast)
        moved = moved.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        two = moved.gather(1, fast.topk(min(2, fast.shape[1]), dim=1).indices)
        self._top2_moved = max(self._top2_moved, float((two[:, 0] - two[:, -1]).abs().nan_to_num(nan=torch.inf).amax()))
        self._moved = torch.cat([self._moved, moved])
        self._by_label: dict[tuple[int, torch.device], Tensor] = {}
        uncertain, total = int(self.uncertain(self._typical).sum()), len(self._typical)
        self.uncertain_share = (uncertain + self._overflowed) / max(1, total + self._overflowed)
        return self.uncertain_share

    def uncertain(self, fast: Tensor) -> Tensor:
        """Which labels might be others in float32, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        behind = (fast.gather(1, first) - fast).nan_to_num(nan=0.0, posinf=torch.inf)
        return (behind <= self._limits(fast, first)).scatter(1, first, False).any(1)

    def exceeded(self, fast: Tensor, finer: Tensor) -> Tensor:
        """Labels of which some class gained more on the first than its bound, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        before, after = (logits.gather(1, first) - logits for logits in (fast, finer))
        gained = torch.where(torch.isposinf(before) & torch.isposinf(after), 0.0, before - after)
        return (gained > self._limits(fast, first)).any(1)

    def _limits(self, fast: Tensor, first: Tensor) -> Tensor:
        """How far behind the first each class must lie [N, C]."""
        scale = fast.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True)
        labels = first[:, 0].tolist()
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        which = torch.tensor([places[label] for label in labels], device=fast.device)
        return self._bounds([*places], fast.device)[which] + self._resolution * scale

    def _bounds(self, labels: list[int], device: torch.device) -> Tensor:
        """How near each class may come to each of these labels [len(labels), C].

        Of most pairs of classes the sample holds no close call: what the first two of any label moved counts for all.
        """
        for label in labels:
            if (label, device) not in self._by_label:
                apart = (self._moved - self._moved[:, label : label + 1]).abs().amax(0)
                apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
                self._by_label[label, device] = SAFETY * apart.clamp_min(self._top2_moved).to(device)
        return torch.stack([self._by_label[label, device] for label in labels])


def draw_sample(images: list[ImageState], rng: np.random.Generator) -> tuple[PairBatch, PairBatch]:
    """Labels to compare backends on, and the pool that close calls are chosen from, spread over all images."""
    orders = [rng.permutation(len(image.table.mask_set.unions)) for image in images]
    pooled = min(POOL, sum(map(len, orders)) // 10)
    wanted = SAMPLE - min(SAMPLE // 2, pooled // 4)
    # Of more images than that some have none in it, but each size of image has.
    firsts = np.diff(np.linspace(0, wanted, len(images) + 1).astype(int))
    firsts = np.maximum(firsts, -(-wanted // len(images))) if len(images) <= wanted else firsts
    each_size = list({tuple(image.pixels.shape): number for number, image in enumerate(images)}.values())
    firsts[each_size] = np.maximum(firsts[each_size], 1)
    more = -(-pooled // len(images))
    sample = [order[:first] for order, first in zip(orders, firsts, strict=True)]
    pool = [order[first : first + more] for order, first in zip(orders, firsts, strict=True)]
    return PairBatch.of(images, sample), PairBatch.of(images, pool)


def closest_calls(pool: PairBatch, fast: Sequence[Tensor]) -> PairBatch:
    """The labels of the pool with the smallest margins."""
    if not len(pool):
        return pool
    logits = torch.cat(list(fast))
    margins = torch.where(nonfinite(logits), torch.inf, top2_margin(sanitize(logits)))
    most = min(SAMPLE // 2, len(pool) // 4)
    return pool.pick(np.sort(margins.argsort(stable=True)[:most].cpu().numpy()))
