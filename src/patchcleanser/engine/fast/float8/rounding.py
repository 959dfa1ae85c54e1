"""GPTQ (Frantar et al., 2022): FP8 weights that change a layer's outputs as little as possible.

Rounding each weight for itself adds its own error to the outputs. Inputs of a layer are correlated, though, so weights
that are not rounded yet can compensate for the error of those that are. Inference is no slower for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16_384
"""The most inputs of a layer that its statistics are computed from."""

DAMPING = 0.01
"""Share of the mean square of inputs that is added to each diagonal entry of the Hessian."""

COLUMNS = 128
"""Columns that are rounded before the errors are applied to all later ones, for speed alone."""


class InputStatistics(NamedTuple):
    """Statistics of a layer's inputs […, in]."""

    rms: float
    """The root mean square."""
    hessian: Tensor
    """The mean products of every two inputs [in, in]: the Hessian of the layer's squared output error."""

    @classmethod
    def of(cls, inputs: Tensor) -> InputStatistics:
        """The statistics of some inputs […, in]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        rms = float(rows.float().square().mean().sqrt())
        rows = rows[:: -(-len(rows) // ROWS)].float()
        return cls(rms, rows.T @ rows / len(rows))


def gptq_round(weight: Tensor, dtype: torch.dtype, hessian: Tensor | None) -> Tensor:
    """Weights [out, in] rounded to a shorter type and clamped to its range; None rounds each weight for itself."""
    largest = torch.finfo(dtype).max

    def nearest(numbers: Tensor) -> Tensor:
        return numbers.clamp(-largest, largest).to(dtype).to(numbers.dtype)

    factor = None if hessian is None else _inverse_factor(hessian)
    if factor is None:
        return nearest(weight).to(dtype)
    rest, rounded = weight.float().clone(), torch.empty_like(weight, dtype=torch.float32)
    for start in range(0, rest.shape[1], COLUMNS):
        columns = range(start, min(start + COLUMNS, rest.shape[1]))
        block, within = rest[:, columns.start : columns.stop], factor[columns.start : columns.stop]
        errors = torch.empty_like(block)
        for number, column in enumerate(columns):
            rounded[:, column] = nearest(block[:, number])
            errors[:, number] = (block[:, number] - rounded[:, column]) / within[number, column]
            block[:, number:] -= errors[:, number, None] * within[number, column : columns.stop]
        rest[:, columns.stop :] -= errors @ within[:, columns.stop :]
    return rounded.to(dtype)


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse Hessian, which spreads errors to later columns; None if singular."""
    mean_square = hessian.diagonal().mean()
    if not torch.isfinite(hessian).all() or mean_square <= 0:
        return None
    damped = hessian + DAMPING * mean_square * torch.eye(len(hessian), device=hessian.device)
    inverse, failed = torch.linalg.inv_ex(damped)
    factor, wrong = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if int(failed) or int(wrong) or not torch.isfinite(factor).all() else factor
