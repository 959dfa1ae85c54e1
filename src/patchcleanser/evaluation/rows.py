"""One batch of a job's images: read, then examined into rows."""

from __future__ import annotations

import hashlib
import time
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
from patchcleanser.defenses.defense import Examination
from patchcleanser.defenses.mask_defense import TableExamination
from patchcleanser.errors import DataError, ImageError, ThreatError
from patchcleanser.evaluation.jobs import Job, named_error
from patchcleanser.records.run import Row


@dataclass(frozen=True)
class Loaded:
    """A batch of images, read: the beginnings of their rows, and the pixels of those that could be read."""

    rows: list[Row]
    images: list[Tensor]


def load_batch(
    job: Job, indices: Sequence[int], *, skip: bool = False, left_out: Mapping[int, str] | None = None
) -> Loaded:
    """Read these images. One that cannot be read is an error, or skipped, with the reason in its row.

    `left_out` are images not to be touched, with the reasons: reading one of them kills the process.
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
            _require_room(job, image)
            images.append(image.pin_memory() if pin else image.clone())  # a dataset may use its buffer again
        except (DataError, ImageError, ThreatError) as error:
            if not skip:
                raise named_error(error, row["id"]) from error
            row["skipped"] = str(error)
    return Loaded(rows, images)


def seed_of(job: Job, batch: Loaded, entropy: int) -> tuple[int, ...]:
    """What decides which fast labels are audited: model, data, and a number that nobody knew before the run."""
    names = "\n".join(str(job.identity[name]) for name in ("classifier", "data"))
    return entropy, int(hashlib.sha256(names.encode()).hexdigest()[:16], 16), batch.rows[0]["index"]


def rows_of(job: Job, batch: Loaded, entropy: int = 0) -> list[Row]:
    """The rows of a batch of images; `entropy` is the run's."""
    started = time.monotonic()
    kept = [row for row in batch.rows if row["skipped"] is None]
    job.built.reset(seed_of(job, batch, entropy))  # so that no batch's rows depend on the batches before it
    examined = job.built.examine(batch.images, [row["label"] for row in kept], maps=job.table) if kept else []
    seconds = (time.monotonic() - started) / max(1, len(kept))
    for row, found in zip(kept, examined, strict=True):
        row.update(facts(found, table=job.table), seconds=seconds)
    return batch.rows


def _require_room(job: Job, image: Tensor) -> None:
    """The threat must fit the image; on the input grid every image has the classifier's size."""
    if job.threat.grid == "source":
        job.threat.shapes((image.shape[1], image.shape[2]))


def facts(found: Examination[Any, Any], *, table: bool = False) -> Row:
    """What was found out about one clean image, by column; what its defense does not have stays null."""
    return {
        "height": found.size[0],
        "width": found.size[1],
        "undefended": found.undefended,
        "margin": found.certificate.margin,
        "classifications": found.certificate.classifications,
        **(_labels(found.table, table) if isinstance(found, TableExamination) else {}),
        **_verdict(found.verdict),
        **_certificate(found.certificate),
    }


def _labels(known: LabelTable, table: bool) -> Row:
    masks = len(known.mask_set)
    return {
        "one_mask_labels": known.labels[:masks],
        "one_mask_margins": known.margins[:masks],
        "one_mask_confidences": known.confidences[:masks],
        "table": known.labels[:-1].astype(np.int32) if table else None,
        "classifications": known.spent,
        "rechecked": known.rechecked,
        "flipped": known.flipped,
        "audited": known.audited,
        "caught": known.caught,
        "unconfirmed": known.unconfirmed,
    }


def _verdict(verdict: Verdict | DetectionVerdict | LocalVerdict) -> Row:
    if isinstance(verdict, DetectionVerdict):
        return {"answer": verdict.label, "alert": verdict.alert}
    if isinstance(verdict, LocalVerdict):
        return {"answer": verdict.label}
    return {"answer": verdict.label, "case": verdict.case.value, "deciding_mask": verdict.deciding_mask}


def _certificate(certificate: Certificate | DetectionCertificate | LocalCertificate) -> Row:
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
