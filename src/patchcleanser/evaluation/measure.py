"""Undefended, clean and certified accuracy of a defense on a labelled dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from patchcleanser.core.tables import UNMASKED, LabelTable
from patchcleanser.data.base import Dataset
from patchcleanser.defenses.base import Defense, Game
from patchcleanser.errors import DataError, InputError

Outcome = tuple[bool, bool, bool, bool]
"""Right undefended, right defended, certified, row-certified."""


@dataclass(frozen=True)
class Measured:
    """Shares of the images, in percent."""

    images: int
    undefended: float
    clean: float
    certified: float
    row_certified: float
    classifications: int


def measure(
    defense: Defense[Any, Any],
    dataset: Dataset,
    *,
    limit: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Measured:
    """All three accuracies from one table of labels per image; no label is computed twice."""
    if dataset.labels is None:
        raise DataError(f"{dataset.name} has no labels; accuracy needs them")
    if defense.may_alert:
        raise InputError("detection has metrics of its own; measure() takes a defense that always answers")
    number = len(dataset) if limit is None else min(limit, len(dataset))
    if number < 1:
        raise InputError(f"at least 1 image is needed, got limit={limit}")
    outcomes: list[Outcome] = []
    spent = 0

    def images() -> Iterator[Tensor]:
        for index in range(number):
            yield dataset.image(index)

    for group in defense._groups(images()):
        truths = [int(y) for y in dataset.labels[len(outcomes) : len(outcomes) + len(group)]]
        games = [_outcome(defense, s.table, y) for s, y in zip(group, truths, strict=True)]
        outcomes += defense._play(group, games)
        spent += sum(s.table.spent for s in group)
        if watch is not None:
            watch(len(outcomes))
    shares = 100 * np.array(outcomes, dtype=float).mean(axis=0)
    undefended, clean, certified, row_certified = (round(float(share), 2) for share in shares)
    return Measured(number, undefended, clean, certified, row_certified, spent)


def _outcome(defense: Defense[Any, Any], table: LabelTable, label: int) -> Game[Outcome]:
    yield np.array([UNMASKED, *table.masks()])
    verdict = yield from defense._verdict(table)
    certificate = yield from defense._certificate(table, label, False)
    right = int(table.labels[UNMASKED]) == label
    return right, verdict.label == label, certificate.certified, certificate.row_certified
