"""Rules for logits: NaN and infinity, and the margin between the two largest."""

from __future__ import annotations

import torch
from torch import Tensor


def sanitize(logits: Tensor) -> Tensor:
    """Replace NaN by -inf and +inf by the largest finite number.

    A patch may drive a network into NaN under masks that do not hide it. A fixed rule for that keeps the classifier a
    total function, and with it the theorem.
    """
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def nonfinite(logits: Tensor) -> Tensor:
    """Rows that hold NaN or +inf, bool [N]. A logit of -inf is allowed: it rules a class out."""
    return (torch.isnan(logits) | torch.isposinf(logits)).any(1)


def top2_margin(logits: Tensor) -> Tensor:
    """The difference of the two largest logits [N]; two infinities are a tie."""
    two = logits.topk(2, dim=1).values
    return (two[:, 0] - two[:, 1]).nan_to_num(nan=0.0, posinf=torch.inf)
