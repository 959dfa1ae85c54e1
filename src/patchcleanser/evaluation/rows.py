"""Rows of clean images: read a batch, then one row of columns per image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import (
    Certificate,
    DetectionCertificate,
    DetectionVerdict,
    LocalCertificate,
    LocalVerdict,
    Verdict,
)
from patchcleanser.defenses.base import TableExamined
from patchcleanser.defenses.contract import Examined
from patchcleanser.errors import DataError, ImageError, ThreatError
from patchcleanser.evaluation.jobs import Job, named_error
from patchcleanser.records.run import Row


@dataclass(frozen=True)
class LoadedBatch:
    """A batch of images in memory: the first columns of every row, and the pixels of the readable images."""

    rows: list[Row]
    images: list[Tensor]

    @property
    def readable(self) -> list[Row]:
        """The rows of `images`."""
        return [row for row in self.rows if row["skipped"] is None]


def load_batch(
    job: Job, indices: Sequence[int], *, skip: bool = False, left_out: Mapping[int, str] | None = None
) -> LoadedBatch:
    """Read these images. An unreadable one raises, or with `skip` is left out with the reason in its row.

    `left_out` maps images that must not be read to the reason: reading one of them kills the process.
    """
    rows: list[Row] = []
    images: list[Tensor] = []
    pin = job.classifier.device.type == "cuda"  # pinned memory is copied to the GPU while it works
    for index in indices:
        row: Row = {"index": index, "id": job.dataset.id(index), "label": int(job.labels[index]), "skipped": None}
        rows.append(row)
        if left_out and index in left_out:
            row["skipped"] = left_out[index]
            continue
        try:
            image = job.dataset.image(index)
            if job.threat.grid == "source":  # on the input grid every image has the classifier's size
                job.threat.shapes((image.shape[1], image.shape[2]))  # raises if the patch does not fit
            images.append(image.pin_memory() if pin else image.clone())  # a dataset may use its buffer again
        except (DataError, ImageError, ThreatError) as error:
            if not skip:
                raise named_error(error, row["id"]) from error
            row["skipped"] = str(error)
    return LoadedBatch(rows, images)


def audit_seed(job: Job, batch: LoadedBatch, entropy: int) -> tuple[int, ...]:
    """Seed of the choice of fast labels to audit: model, data, and a number drawn when the run began."""
    names = "\n".join(str(job.identity[name]) for name in ("classifier", "data"))
    return entropy, int(hashlib.sha256(names.encode()).hexdigest()[:16], 16), batch.rows[0]["index"]


def clean_columns(examined: Examined[Any, Any], *, table: bool = False) -> Row:
    """Columns of one clean image. Columns that its defense does not have stay null."""
    return {
        "height": examined.size[0],
        "width": examined.size[1],
        "undefended": examined.undefended,
        "margin": examined.certificate.margin,
        "classifications": examined.certificate.classifications,
        **(_label_columns(examined.table, table) if isinstance(examined, TableExamined) else {}),
        **_verdict_columns(examined.verdict),
        **_certificate_columns(examined.certificate),
    }


def _label_columns(labels: LabelTable, table: bool) -> Row:
    masks = len(labels.mask_set)
    return {
        "one_mask_labels": labels.labels[:masks],
        "one_mask_margins": labels.margins[:masks],
        "one_mask_confidences": labels.confidences[:masks],
        "table": labels.labels[:-1].astype(np.int32) if table else None,
        "classifications": labels.spent,
        "rechecked": labels.rechecked,
        "flipped": labels.flipped,
        "audited": labels.audited,
        "caught": labels.caught,
        "unconfirmed": labels.unconfirmed,
    }


def _verdict_columns(verdict: Verdict | DetectionVerdict | LocalVerdict) -> Row:
    if isinstance(verdict, DetectionVerdict):
        return {"answer": verdict.label, "alert": verdict.alert}
    if isinstance(verdict, LocalVerdict):
        return {"answer": verdict.label}
    return {"answer": verdict.label, "case": verdict.case.value, "deciding_mask": verdict.deciding_mask}


def _certificate_columns(certificate: Certificate | DetectionCertificate | LocalCertificate) -> Row:
    if isinstance(certificate, DetectionCertificate):
        return {"detection_certified": certificate.detection_certified}
    weakest = certificate.failing_placement
    row = {
        "certified": certificate.certified,
        "weakest": weakest and [n for window in weakest for n in window.numbers],
    }
    if isinstance(certificate, LocalCertificate):
        return row
    return {**row, "row_certified": certificate.row_certified, "failing_pair": certificate.failing_pair}
