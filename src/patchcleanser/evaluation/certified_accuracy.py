"""Accuracies of a defense in memory, without a run folder, in the manner of torchmetrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from patchcleanser.defenses.defense import Defense, number_of
from patchcleanser.errors import InputError
from patchcleanser.evaluation.rows import clean_columns
from patchcleanser.progress import tracked
from patchcleanser.records.columns import COLUMNS, SCHEMA
from patchcleanser.records.metrics import Summary, summary

LOGGER = logging.getLogger("patchcleanser")

COLUMN_TYPES = pa.schema([SCHEMA.field(name) for name in COLUMNS])


class CertifiedAccuracy:
    """Undefended, clean and certified accuracy of a defense, each with its 95% interval, over batches of clean images.

    As in torchmetrics, `update` adds a batch, `compute` sums up and `reset` forgets. There is no `.to`, for images go
    to the classifier's device by themselves, and no sync: add the summaries of several processes.

    Certificates that rest on labels of lower precision are counted, and warned of: they are statistical, no proofs.

    >>> import torch
    >>> from patchcleanser import CallableClassifier, DoubleMasking
    >>> brightness = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)
    >>> defense = DoubleMasking(CallableClassifier(brightness, array="torch"), "2", masks=4)
    >>> metric = CertifiedAccuracy(defense)
    >>> metric.update(torch.ones(3, 3, 16, 16), [0, 0, 1])
    >>> metric.compute()
    Summary(images=3, undefended=66.67%, clean=66.67%, certified=66.67%, row_certified=66.67%)
    >>> metric.compute().shares["certified"].interval
    (20.76..., 93.85...)
    """

    def __init__(self, defense: Defense[Any, Any]) -> None:
        if not isinstance(defense, Defense):
            got = type(defense).__name__
            raise InputError(f"a defense is DoubleMasking(classifier, threat) or the like, got {got}")
        self.defense = defense
        self.statistical = 0
        """Certificates that rest on labels of lower precision, since the beginning or the last reset."""
        self._total: Summary | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.defense!r})"

    def update(self, images: Any, labels: Iterable[int]) -> None:
        """Add a batch of clean images with their true labels."""
        self(images, labels)

    def __call__(self, images: Any, labels: Iterable[int]) -> Summary:
        """Add a batch, and return the accuracies of this batch alone."""
        started = time.monotonic()
        results = self.defense.examine(images, labels)
        seconds = (time.monotonic() - started) / len(results)
        self._count_statistical(sum(is_statistical(result.certificate) for result in results))
        rows = [{**clean_columns(result), "label": result.certificate.label, "seconds": seconds} for result in results]
        batch = summary(pa.Table.from_pylist(rows, schema=COLUMN_TYPES))
        self._total = batch if self._total is None else self._total + batch
        return batch

    def compute(self) -> Summary:
        """The accuracies of all batches since the beginning or the last reset."""
        if self._total is None:
            raise InputError("no images yet; call update(images, labels) first")
        return self._total

    def reset(self) -> None:
        """Forget all batches."""
        self._total, self.statistical = None, 0

    def _count_statistical(self, number: int) -> None:
        if number and not self.statistical:
            LOGGER.warning(
                "certificates by fast labels are statistical, no proofs; use confirm='all' or precision='exact'"
            )
        self.statistical += number

    def score(self, batches: Iterable[Any], *, progress: bool | None = None) -> Summary:
        """Add every batch (images, labels) of a DataLoader or another iterable, and return the accuracies of all."""
        for batch in tracked(_iterated(batches), "certify batches", progress, total=number_of(batches)):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise InputError(f"a batch is (images, labels), as a DataLoader gives it, got {type(batch).__name__}")
            self.update(*batch)
        return self.compute()


def is_statistical(certificate: Any) -> bool:
    """Whether a certificate promises something by labels that were computed in lower precision only."""
    return bool(getattr(certificate, "row_certified", False) and getattr(certificate, "unconfirmed", 0))


def _iterated(batches: Any) -> Iterable[Any]:
    if not isinstance(batches, Iterable):
        raise InputError(f"score takes a DataLoader or another iterable of batches, got {type(batches).__name__}")
    return batches
