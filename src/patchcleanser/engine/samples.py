"""Which labels of a group of images the ways to them are compared on: any, and the closest calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from patchcleanser.core.tables import Indices
from patchcleanser.engine.batches import Piece, Subject
from patchcleanser.engine.precision import CALIBRATION, POOL, broken_rows, gaps, total


def drawn(subjects: list[Subject], draw: np.random.Generator) -> tuple[Piece, Piece]:
    """Labels to compare ways on, and the pool that close calls are chosen from, spread over all images."""
    orders = [draw.permutation(len(s.table.mask_set.unions)) for s in subjects]
    pooled = min(POOL, sum(map(len, orders)) // 10)
    wanted = CALIBRATION - min(CALIBRATION // 2, pooled // 4)
    # Of more images than that some have none in it, but each size of image has.
    firsts = np.diff(np.linspace(0, wanted, len(subjects) + 1).astype(int))
    firsts = np.maximum(firsts, -(-wanted // len(subjects))) if len(subjects) <= wanted else firsts
    ones = list({tuple(s.pixels.shape): number for number, s in enumerate(subjects)}.values())
    firsts[ones] = np.maximum(firsts[ones], 1)
    more = -(-pooled // len(subjects))
    picks = [order[:first] for order, first in zip(orders, firsts, strict=True)]
    others = [order[first : first + more] for order, first in zip(orders, firsts, strict=True)]
    return _spread_over(subjects, picks), _spread_over(subjects, others)


def _spread_over(subjects: list[Subject], unions: Sequence[Indices]) -> Piece:
    return Piece(subjects, np.repeat(np.arange(len(subjects)), [len(u) for u in unions]), np.concatenate(unions))


def closest(pool: Piece, fast: Sequence[Tensor]) -> Piece:
    """The labels of the pool that were closest calls."""
    if not len(pool):
        return pool
    logits = torch.cat(list(fast))
    margins = torch.where(broken_rows(logits), torch.inf, gaps(total(logits)))
    most = min(CALIBRATION // 2, len(pool) // 4)
    return pool.pick(np.sort(margins.argsort(stable=True)[:most].cpu().numpy()))
