"""Which hardened copy to keep: of the most invariant ones, the one most like the original."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FEW = 100
"""Photos held out from which on chance is small enough to choose within it."""


@dataclass(frozen=True)
class Check:
    """How the copy stands, on photos held out of training."""

    epoch: int
    loss: float | None
    agreement: float
    """Unmasked label equal to the original's."""
    survived: tuple[bool, ...] = field(repr=False)
    """Of each photo, whether its label equals the original's unmasked one under all two-mask views."""
    seconds: float
    way: float = 1.0
    """How far its weights are from the original's to the trained ones."""

    @property
    def place(self) -> tuple[int, float]:
        """What tells it from others."""
        return self.epoch, self.way

    @property
    def invariance(self) -> float:
        """The share of photos that survived."""
        return sum(self.survived) / len(self.survived)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the share of photos that survived in place of each one."""
        values = asdict(self) | {"invariance": self.invariance}
        del values["survived"]
        return values

    def as_good_as(self, best: Check) -> bool:
        """Whether chance may explain that it is worse than `best` on the same photos.

        Photos that both lose, or neither, do not tell them apart. Of the others, the number lost less the number won
        has a standard error of the root of their sum. Of few photos only the same invariance counts.
        """
        lost = sum(there and not here for here, there in zip(self.survived, best.survived, strict=True))
        won = sum(here and not there for here, there in zip(self.survived, best.survived, strict=True))
        return lost <= won or (len(self.survived) >= FEW and lost - won <= math.sqrt(lost + won))


def eligible(checks: Sequence[Check]) -> list[Check]:
    """Those that may be chosen, and that no later one equals or beats in both measures; the first is the untouched."""
    untouched, *others = checks
    best = max(checks, key=lambda check: check.invariance)
    close = [check for check in others if check.invariance > untouched.invariance and check.as_good_as(best)]
    return [
        check
        for at, check in enumerate(close)
        if not any(c.invariance >= check.invariance and c.agreement >= check.agreement for c in close[at + 1 :])
    ]


def chosen(checks: Sequence[Check]) -> Check:
    """The copy to return; the untouched one, which comes first, if none has more invariance."""
    return max(eligible(checks), key=lambda check: (check.agreement, check.epoch), default=checks[0])
