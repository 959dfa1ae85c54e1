"""When a label may be trusted: plain float32, ties, and fast labels checked against exact ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["exact", "fast"]
"""Float32 throughout, or bfloat16 with every doubtful label computed again in float32."""

CALIBRATION = 512
"""So many labels are computed both ways before any fast one is trusted."""

AUDIT = 64
"""From then on every so manieth label is still computed both ways."""

SAFETY = 2.0
"""Labels are doubtful up to this many times the largest movement ever seen."""

TIE = 1e-5
"""Kernels round differently for other batch sizes. A margin below this share of the logits' size
(below 2e-2 for half-precision networks) is a tie, and its label is that of the image alone."""


@dataclass
class Recheck:
    """What fast labels cost, and whether they were right."""

    labels: int = 0
    rechecked: int = 0
    flipped: int = 0
    """Of the rechecked ones, those whose fast label was wrong."""
    audited_flips: int = 0
    """Labels above the bound that were wrong all the same: reason to distrust the others."""
    bound: float = 0.0
    """Labels with a smaller margin are computed again; it grows with every movement seen."""

    def sampled(self, number: int) -> Tensor:
        """Which of the next labels are computed both ways whatever their margin, bool [number]."""
        at = torch.arange(self.labels, self.labels + number)
        return (at < CALIBRATION) | (at % AUDIT == 0)

    def learn(self, fast: Tensor, exact: Tensor) -> None:
        """Take note of how far logits moved; no label with a margin above the movement can flip."""
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(exact), 0.0, exact - fast)
        spread = (moved.amax(1) - moved.amin(1)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        flips = exact.argmax(1) != fast.argmax(1)
        self.audited_flips += int((flips & (gaps(fast) > self.bound)).sum()) if self.labels >= CALIBRATION else 0
        self.rechecked += len(fast)
        self.flipped += int(flips.sum())
        self.bound = max(self.bound, SAFETY * float(spread.max()))


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
