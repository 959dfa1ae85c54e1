"""Which weights to keep: those whose labels survive masks on held-out images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.networks.wrapper import logits_in
from patchcleanser.training.cutout import masked_inputs

VIEWS = 24
"""Two-mask views per held-out image; an image survives if its label is right under all of them."""

MIN_PHOTOS = 100
"""With fewer held-out photos, standard errors are too rough to choose by."""


def two_mask_views(
    threat: Threat, size: Size, device: torch.device, masks: int = 6, fields: ReceptiveFields | None = None
) -> Tensor:
    """A fixed sample of the defense's two-mask views: hidden pixels, bool [views, H, W]."""
    visible = MaskSet.build(threat, image=size, masks=masks, fields=fields).visible()
    pairs = np.random.default_rng(0).integers(0, len(visible), (VIEWS, 2))
    return torch.from_numpy(~(visible[pairs[:, 0]] & visible[pairs[:, 1]])).to(device)


def predict_labels(model: nn.Module, inputs: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Labels [N] of inputs [N, C, H, W] in which the same pixels, bool [H, W], are hidden."""
    hidden = None if hidden is None else hidden.expand(len(inputs), -1, -1)
    return logits_in(model(masked_inputs(model, inputs, hidden))).argmax(1)


class Selector:
    """Scores networks on held-out inputs [N, C, H, W], which go to the device of the views batch by batch."""

    criterion = "the last within one standard error of the highest survival"

    def __init__(self, inputs: Tensor, labels: Tensor, views: Tensor, *, batch: int) -> None:
        self.inputs, self.labels, self.views, self.batch = inputs, labels, views, batch

    def __call__(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Whether the label of each input is right unmasked, and right under all views too; bool [N] each."""
        right, survived = [], []
        for part, labels in zip(*(torch.split(t, self.batch) for t in (self.inputs, self.labels)), strict=True):
            inputs = part.to(self.views.device)
            right.append(predict_labels(model, inputs) == labels)
            survived.append(right[-1].clone())
            for hidden in self.views:
                survived[-1] &= predict_labels(model, inputs, hidden) == labels
        return torch.cat(right), torch.cat(survived)

    def near(self, score: float, best: float) -> bool:
        """Whether chance may explain that a share of surviving images is lower than the best one."""
        return within_standard_error(score, best, len(self.labels))


def within_standard_error(share: float, best: float, number: int) -> bool:
    """Whether a share of `number` images is within one standard error of the best share.

    >>> within_standard_error(0.83, 0.84, 1000), within_standard_error(0.82, 0.84, 1000)
    (True, False)
    """
    return share >= best - math.sqrt(best * (1 - best) / max(number, 1))


@dataclass(frozen=True)
class Check:
    """The scores of a copy in hardening on held-out photos."""

    epoch: int
    loss: float | None
    agreement: float
    """Share of photos whose unmasked label equals the original's."""
    survived: tuple[bool, ...] = field(repr=False)
    """Whether the label of each photo equals the original's unmasked one under all two-mask views."""
    seconds: float
    way: float = 1.0
    """Where the weights are between the original's (0) and the trained ones (1)."""

    @property
    def key(self) -> tuple[int, float]:
        """Identifies the weights that were checked."""
        return self.epoch, self.way

    @property
    def invariance(self) -> float:
        """Share of photos that survived."""
        return sum(self.survived) / len(self.survived)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the invariance in place of `survived`."""
        values = asdict(self) | {"invariance": self.invariance}
        del values["survived"]
        return values

    def as_good_as(self, best: Check) -> bool:
        """Whether it is within one paired standard error of `best` on the same photos.

        Only photos that exactly one of the two loses tell them apart. The number lost less the number won has a
        standard error of the root of their sum. With few photos only the same invariance counts.
        """
        pairs = list(zip(self.survived, best.survived, strict=True))
        lost, won = pairs.count((False, True)), pairs.count((True, False))
        return lost <= won or (len(pairs) >= MIN_PHOTOS and lost - won <= math.sqrt(lost + won))


def eligible(checks: Sequence[Check]) -> list[Check]:
    """The checks that may be chosen; the first one, of the untouched classifier, is not among them.

    They beat the untouched classifier, are within one standard error of the best invariance, and no later one equals
    or beats them in both invariance and agreement.
    """
    untouched, *trained = checks
    best = max(checks, key=lambda check: check.invariance)
    close = [check for check in trained if check.invariance > untouched.invariance and check.as_good_as(best)]
    return [
        check
        for number, check in enumerate(close, 1)
        if not any(c.invariance >= check.invariance and c.agreement >= check.agreement for c in close[number:])
    ]


def choose(checks: Sequence[Check]) -> Check:
    """Among the eligible checks, the one that agrees most with the original; the untouched one if there is none."""
    return max(eligible(checks), key=lambda check: (check.agreement, check.epoch), default=checks[0])
