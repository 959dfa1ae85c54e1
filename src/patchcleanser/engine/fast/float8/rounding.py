"""Weights in few bits that change a layer's outputs as little as can be.

Each weight rounded for itself adds its own error to the outputs. A layer's inputs go together, though, so what rounding
one input's weights changes, those of inputs that are still to be rounded can make up for (GPTQ, Frantar et al., 2022).
Nothing is slower for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16_384
"""Inputs of a layer that are looked at, at most: how they go together is known well by then."""

DAMPED = 0.01
"""Of the mean square of inputs, added to each: where nothing was seen, nothing is made up for."""

COLUMNS = 128
"""Inputs that are rounded before the rest hears of it, for speed alone."""


class Seen(NamedTuple):
    """What a layer's inputs are like."""

    size: float
    """The root of their mean square."""
    together: Tensor
    """The mean of the products of every two inputs, [in, in]."""

    @classmethod
    def of(cls, inputs: Tensor) -> Seen:
        """Of some inputs […, in]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        size = float(rows.float().square().mean().sqrt())
        rows = rows[:: -(-len(rows) // ROWS)].float()
        return cls(size, rows.T @ rows / len(rows))


def rounded(weight: Tensor, dtype: torch.dtype, together: Tensor | None) -> Tensor:
    """A layer's weights [out, in], rounded to a shorter type; what is too large for that is its largest number.

    `together` says how the layer's inputs go together; None: each weight is rounded for itself.
    """
    largest = torch.finfo(dtype).max

    def short(numbers: Tensor) -> Tensor:
        return numbers.clamp(-largest, largest).to(dtype).to(numbers.dtype)

    shares = None if together is None else _shares(together)
    if shares is None:
        return short(weight).to(dtype)
    left, found = weight.float().clone(), torch.empty_like(weight, dtype=torch.float32)
    for start in range(0, left.shape[1], COLUMNS):
        columns = range(start, min(start + COLUMNS, left.shape[1]))
        block, within = left[:, columns.start : columns.stop], shares[columns.start : columns.stop]
        errors = torch.empty_like(block)
        for number, column in enumerate(columns):
            found[:, column] = short(block[:, number])
            errors[:, number] = (block[:, number] - found[:, column]) / within[number, column]
            rest = within[number, column : columns.stop]
            block[:, number:] -= errors[:, number, None] * rest
        left[:, columns.stop :] -= errors @ within[:, columns.stop :]
    return found.to(dtype)


def _shares(together: Tensor) -> Tensor | None:
    """How later inputs' weights take over what an earlier one's rounding changes; None if that cannot be found out."""
    usual = together.diagonal().mean()
    if not torch.isfinite(together).all() or usual <= 0:
        return None
    damped = together + DAMPED * usual * torch.eye(len(together), device=together.device)
    inverse, failed = torch.linalg.inv_ex(damped)
    shares, wrong = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if int(failed) or int(wrong) or not torch.isfinite(shares).all() else shares
