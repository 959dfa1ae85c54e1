"""Which hardened copy to keep: of the most invariant ones, the one most like the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from patchcleanser.training.judge import as_good

FEW = 100
"""Photos held out from which on one standard error is small enough to choose within."""


@dataclass(frozen=True)
class Check:
    """How the copy stands, on photos held out of training."""

    epoch: int
    loss: float | None
    agreement: float
    """Unmasked label equal to the original's."""
    invariance: float
    """Label equal to the original's unmasked one under all two-mask views."""
    seconds: float
    way: float = 1.0
    """How far its weights are from the original's to the trained ones."""

    @property
    def place(self) -> tuple[int, float]:
        """What tells it from others."""
        return self.epoch, self.way


def eligible(checks: Sequence[Check], photos: int) -> list[Check]:
    """Those that may be chosen, and that no later one equals or beats in both measures; the most only ever grows.

    Of few photos one standard error is so much that only the most invariance counts.
    """
    untouched, *others = checks
    most = max(check.invariance for check in checks)
    close = [
        check
        for check in others
        if check.invariance > untouched.invariance
        and (check.invariance == most or (photos >= FEW and as_good(check.invariance, most, photos)))
    ]
    return [
        check
        for at, check in enumerate(close)
        if not any(c.invariance >= check.invariance and c.agreement >= check.agreement for c in close[at + 1 :])
    ]


def chosen(checks: Sequence[Check], photos: int) -> Check:
    """The copy to return; the untouched one, which comes first, if none has more invariance."""
    return max(eligible(checks, photos), key=lambda check: (check.agreement, check.epoch), default=checks[0])
