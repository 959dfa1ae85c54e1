"""When a label may be trusted: fast labels checked against exact ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Confirm = Literal["sampled", "all"]
"""Of a certificate by fast labels: the doubtful ones and a sample are computed again in float32, or all of them."""

Precision = Literal["exact", "fast"]
"""Float32 throughout, or a faster way (half precision, ONNX Runtime) with every doubtful label computed again."""

CALIBRATION = 512
FEWEST = 8
"""About so many labels of a group of clean images, and of no fewer images, are computed both ways before any fast one
is trusted. What one image, or two, teach about others is too little: seen with `tiny` in bfloat16."""

POOL = 2048
"""Up to half of them are the closest calls of so many others: images that a network is sure of move least."""

AUDIT = 1 / 512
"""The share of all further labels that are still computed both ways, whatever their margin."""

SAFETY = 2.0
"""Labels are doubtful up to this many times the largest movement seen."""

HOPELESS = 0.5
"""Where more than this share of the labels is doubtful, computing all of them exactly is cheaper."""


class SmallerBatchError(Exception):
    """Memory ran out and exact batches are smaller now: labels of the other shape are computed again."""


class WrongFastLabelError(Exception):
    """An audit caught a wrong fast label that was not doubtful: the group's labels are computed exactly."""


class TooFarError(WrongFastLabelError):
    """A doubtful label moved further than any was thought to: others may have, and are computed again."""


class _Movements:
    """How far logits moved between a fast way and the exact one, in a sample [N, C]."""

    def __init__(self, fast: Tensor, exact: Tensor) -> None:
        self._moved = fast.new_zeros(0, fast.shape[1])
        self._closest = 0.0
        self.add(fast, exact)

    def add(self, fast: Tensor, exact: Tensor) -> None:
        """More labels of both ways."""
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(exact), 0.0, exact - fast)
        moved = moved.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        two = moved.gather(1, fast.topk(min(2, fast.shape[1]), dim=1).indices)
        self._closest = max(self._closest, float((two[:, 0] - two[:, -1]).abs().nan_to_num(nan=torch.inf).amax()))
        self._moved = torch.cat([self._moved, moved])
        self._bounds: dict[tuple[int, torch.device], Tensor] = {}

    def bounds(self, labels: list[int], device: torch.device) -> Tensor:
        """How near each class may come to each of these before a label is doubtful [len(labels), C], on a device.

        Of most pairs of classes the sample holds no close call: what the first two of any label moved counts for all.
        """
        for label in labels:
            if (label, device) not in self._bounds:
                apart = (self._moved - self._moved[:, label : label + 1]).abs().amax(0)
                apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
                self._bounds[label, device] = SAFETY * apart.clamp_min(self._closest).to(device)
        return torch.stack([self._bounds[label, device] for label in labels])


@dataclass
class Recheck:
    """Which fast labels are doubtful, what they cost, and whether they were right.

    What is doubtful is learnt from clean images only, a sample of the whole group that is about to be
    certified, and then fixed: neither the order of the images nor the size of chunks changes it, and
    images that somebody hands in to be classified cannot teach it anything. Only if a label turns out to have moved
    further, that is learnt too, and the group is computed once more.
    """

    labels: int = 0
    rechecked: int = 0
    """Labels computed again in float32."""
    flipped: int = 0
    """Of the rechecked ones, those whose fast label was wrong."""
    audited: int = 0
    """Labels that would have been trusted, computed in float32 all the same; a wrong one stops the fast labels."""
    caught: int = 0
    """Of the audited ones, those that were wrong: then all labels of the group are computed exactly."""
    hopeless: bool = False
    """The fast way does not pay for this model on these images, or an audit caught a wrong label."""

    share: float = 0.0
    """Of the sample it was learnt from, the share that was doubtful."""

    seed: tuple[int, ...] | None = None
    """Decides which labels are compared and audited; None: nobody can know beforehand."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was learnt; the counts go on."""
        self._moved: _Movements | None = None
        self._precision = 0.0
        self.hopeless, self._draws = False, np.random.default_rng(self.seed)

    @property
    def ready(self) -> bool:
        """Whether fast labels may be used: it was learnt which ones are doubtful, and most are not."""
        return self._moved is not None and not self.hopeless

    def calibrate(
        self,
        fast: Tensor,
        exact: Tensor,
        resolution: float,
        *,
        common: Tensor | None = None,
        broken: int = 0,
        most: float = HOPELESS,
    ) -> None:
        """Learn how far classes move against each other, from the same labels computed both ways.

        A label flips if some class gains more on the first than it lay behind. A label is doubtful if some
        class lies no further behind than (twice) the most that just these two, or the first two of any label, were
        seen to move against each other, or than the fast way can tell apart at all. How many are doubtful is seen from
        the `common` ones, if the others were chosen; so many more were `broken`, and are doubtful anyway.
        """
        self.begin()
        self._moved = _Movements(fast, exact)
        self._precision = SAFETY * resolution
        self._common, self._broken = fast if common is None else common, broken
        self.hopeless = self._counted() > most

    def _counted(self) -> float:
        """How many of the common labels are doubtful."""
        doubtful, seen = int(self.doubt(self._common).sum()), len(self._common)
        self.share = (doubtful + self._broken) / max(1, seen + self._broken)
        return self.share

    def doubt(self, fast: Tensor) -> Tensor:
        """Which labels might be others in float32, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        behind = (fast.gather(1, first) - fast).nan_to_num(nan=0.0, posinf=torch.inf)
        return (behind <= self._limits(fast, first)).scatter(1, first, False).any(1)

    def too_far(self, fast: Tensor, finer: Tensor) -> Tensor:
        """Labels of which some class gained more on the first than was thought possible, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        ahead, now = (logits.gather(1, first) - logits for logits in (fast, finer))
        gained = torch.where(torch.isposinf(ahead) & torch.isposinf(now), 0.0, ahead - now)
        return (gained > self._limits(fast, first)).any(1)

    def widen(self, fast: Tensor, finer: Tensor) -> float:
        """Learn from these labels too; the share that is doubtful then."""
        if self._moved is not None:
            self._moved.add(fast, finer)
        return self._counted()

    def _limits(self, fast: Tensor, first: Tensor) -> Tensor:
        """How far behind the first each class is to lie [N, C]."""
        if self._moved is None:
            raise RuntimeError("nothing was learnt yet about fast labels")
        size = fast.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True)
        labels = first[:, 0].tolist()
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        which = torch.tensor([places[label] for label in labels], device=fast.device)
        return self._moved.bounds([*places], fast.device)[which] + self._precision * size

    def sampled(self, number: int) -> Tensor:
        """Which of the next labels are audited, bool [number]."""
        self.labels += number
        return torch.from_numpy(self._draws.random(number) < AUDIT)


def half_type(device: torch.device) -> torch.dtype | None:
    """The half precision this device is faster with, if any.

    float16 on CUDA: as fast as bfloat16 there and eight times as fine, so far fewer labels are
    doubtful. What overflows is computed again. bfloat16 on CPUs that have instructions for it.
    """
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return torch.bfloat16 if supported and supported() else None
    return torch.float16 if device.type == "cuda" else None


def total(logits: Tensor) -> Tensor:
    """Logits that are numbers: NaN counts as -inf and +inf as the largest number.

    A patch may drive a network into NaN under the masks that do not hide it. A fixed rule for
    that keeps the classifier a total function, and with it the theorem.
    """
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def broken_rows(logits: Tensor) -> Tensor:
    """Rows that overflowed, bool [N]."""
    return (torch.isnan(logits) | torch.isposinf(logits)).any(1)


def gaps(logits: Tensor) -> Tensor:
    """Top-two margins [N]; two infinities are a tie."""
    two = logits.topk(2, dim=1).values
    return (two[:, 0] - two[:, 1]).nan_to_num(nan=0.0, posinf=torch.inf)
