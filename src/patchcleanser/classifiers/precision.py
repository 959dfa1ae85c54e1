"""When a label may be trusted: plain float32, ties, and fast labels checked against exact ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["exact", "fast"]
"""Float32 throughout, or half precision with every doubtful label computed again in float32."""

CALIBRATION = 512
"""So many labels are computed both ways before any fast one is trusted."""

AUDIT = 1 / 256
"""The share of all further labels that are still computed both ways, whatever their margin."""

SAFETY = 2.0
"""Labels are doubtful up to this many times the largest movement ever seen."""

HOPELESS = 0.5
"""Where more than this share of the labels is doubtful, computing all of them exactly is cheaper."""

LEADING = 5
"""How the first so many classes move against the first is always learnt from."""

TIE = 1e-5
"""Kernels round differently for other batch sizes. A margin below this share of the logits' size
(below 2e-2 for half-precision networks) is a tie, and its label is that of the image alone."""


@dataclass
class Recheck:
    """What fast labels cost, and whether they were right.

    `begin` starts anew from nothing learnt, so that what is rechecked in one batch of images does
    not depend on the batches before it; the counts go on.
    """

    labels: int = 0
    rechecked: int = 0
    flipped: int = 0
    """Of the rechecked ones, those whose fast label was wrong."""
    audited: int = 0
    """Labels above the bound that were computed both ways all the same."""
    audited_flips: int = 0
    """Of those, the wrong ones: reason to distrust the others."""
    bound: float = 0.0
    """Labels with a smaller margin are computed again; it grows with every movement seen."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Learn the bound anew, with the same sample."""
        self.bound, self._spread = 0.0, 0.0
        self._seen, self._doubtful, self._generator = 0, 0, torch.Generator().manual_seed(0)

    def sampled(self, number: int) -> Tensor:
        """Which of the next labels are computed both ways whatever their margin, bool [number]."""
        first = torch.arange(self._seen, self._seen + number) < CALIBRATION
        self._seen, self.labels = self._seen + number, self.labels + number
        return first | (torch.rand(number, generator=self._generator) < AUDIT)

    @property
    def hopeless(self) -> bool:
        """Whether half precision does not pay for this model on these images."""
        return self._seen >= CALIBRATION and self._doubtful > HOPELESS * self._seen

    def doubt(self, fast: Tensor) -> Tensor:
        """Which labels lie within the bound learnt so far, bool [N]."""
        return ~(gaps(fast) > self.bound)

    def count(self, doubtful: Tensor) -> None:
        """Take note of how many labels of a piece were doubtful in the end."""
        self._doubtful += int(doubtful.sum())

    def learn(self, fast: Tensor, exact: Tensor) -> Tensor:
        """Take note of how far logits moved, and which labels flipped.

        A label flips if some class gains more on the first than it lay behind. No class moves
        against another by more than the spread of all movements, so only classes within (twice) the
        largest spread ever seen can overtake. The bound is (twice) the most that such a class, or one
        of the leading ones, ever moved against the first.
        """
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(exact), 0.0, exact - fast)
        moved = moved.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        first = fast.argmax(1, keepdim=True)
        self._spread = max(
            self._spread, float((moved.amax(1) - moved.amin(1)).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
        )
        near = fast.gather(1, first) - fast <= SAFETY * self._spread
        near = near.scatter(1, fast.topk(min(LEADING, fast.shape[1]), dim=1).indices, True)
        against = (moved - moved.gather(1, first)).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        flips = exact.argmax(1) != first[:, 0]
        if self._seen > CALIBRATION:
            above = ~self.doubt(fast)
            self.audited += int(above.sum())
            self.audited_flips += int((flips & above).sum())
        self.rechecked += len(fast)
        self.flipped += int(flips.sum())
        self.bound = max(self.bound, SAFETY * float(against.where(near, 0.0).amax()))
        return flips

    @property
    def flip_rate(self) -> float:
        """With 95% confidence at most this share of the labels that were not computed again is wrong.

        The exact (Clopper-Pearson) bound on the audited ones; 3 / n if none of n was wrong.
        """
        if not self.audited:
            return 1.0
        low, high = self.audited_flips / self.audited, 1.0
        for _ in range(60):  # the share at which so few flips would be seen in 5 of 100 audits
            middle = (low + high) / 2
            low, high = (middle, high) if _at_most(self.audited_flips, self.audited, middle) > 0.05 else (low, middle)
        return high


def _at_most(hits: int, number: int, share: float) -> float:
    """The chance of at most `hits` among `number` draws, each a hit with this chance."""
    if share >= 1:
        return float(hits >= number)
    ways = [lgamma(number + 1) - lgamma(k + 1) - lgamma(number - k + 1) for k in range(hits + 1)]
    return sum(exp(w + k * log(share or 1e-300) + (number - k) * log1p(-share)) for k, w in enumerate(ways))


def half_type(device: torch.device) -> torch.dtype | None:
    """The half precision this device is faster with, if any.

    float16 on CUDA: as fast as bfloat16 there and eight times as fine, so far fewer labels are
    doubtful (1% instead of 34% for MobileNetV2). What overflows is computed again. bfloat16 on CPUs
    that have instructions for it.
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


def gaps(logits: Tensor) -> Tensor:
    """Top-two margins [N]; two infinities are a tie."""
    two = logits.topk(2, dim=1).values
    return (two[:, 0] - two[:, 1]).nan_to_num(nan=0.0, posinf=torch.inf)


def ties(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows whose margin is within rounding of zero, bool [N]."""
    size = logits.topk(2, dim=1).values.abs().nan_to_num(posinf=0.0).amax(1).clamp_min(1.0)
    return gaps(logits) <= (TIE if dtype == torch.float32 else 2e-2) * size


_lock = threading.Lock()
_inside = 0
_kept: list[tuple[Any, str, Any]] = []


@contextmanager
def plain_float32(device: torch.device) -> Iterator[None]:
    """Float32 without TF32 or autocast, whatever the program's settings; they are put back.

    The settings are global, so they are changed when the first thread comes in and put back
    when the last one leaves.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _kept[:] = [(place, name, getattr(place, name)) for place, name, _ in _settings()]
            for place, name, value in _settings():
                setattr(place, name, value)
        _inside += 1
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for place, name, value in _kept:
                    setattr(place, name, value)


def _settings() -> list[tuple[Any, str, Any]]:
    """What makes float32 plain: place, name and value. Newer torch has one switch per kind of operation."""
    backends = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        kinds = (
            (backends.cuda, "matmul"),
            (backends.cudnn, "conv"),
            (backends.mkldnn, "matmul"),
            (backends.mkldnn, "conv"),
        )
        return [(getattr(room, kind), "fp32_precision", "ieee") for room, kind in kinds]
    return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
