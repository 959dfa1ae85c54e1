"""Rows of clean images: read a batch, then one row of columns per image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchcleanser.core.results import Verdict
from patchcleanser.defenses.defense import Examination
from patchcleanser.defenses.mask_defense import TableExamination
from patchcleanser.errors import DataError, ImageError, ThreatError
from patchcleanser.evaluation.dataset_jobs import DatasetJob, named_error
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
    job: DatasetJob,
    indices: Sequence[int],
    *,
    skip: bool = False,
    left_out: Mapping[int, str] | None = None,
) -> LoadedBatch:
    """Read these images. An unreadable one raises, or with `skip` is left out with the reason in its row.

    `left_out` maps images that must not be read to the reason: reading one of them kills the process.
    """
    rows: list[Row] = []
    images: list[Tensor] = []
    pin = job.device.type == "cuda"  # pinned memory is copied to the GPU while it works
    for index in indices:
        row: Row = {"index": index, "id": job.dataset.id(index), **job.truth(index), "skipped": None}
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


def audit_seed(job: DatasetJob, batch: LoadedBatch, entropy: int) -> tuple[int, ...]:
    """Seed of the choice of fast labels to audit: model, data, and a number drawn when the run began."""
    names = "\n".join(str(job.identity[name]) for name in ("classifier", "data"))
    return entropy, int(hashlib.sha256(names.encode()).hexdigest()[:16], 16), batch.rows[0]["index"]


def clean_columns(examined: Examination[Any, Any], *, table: bool = False) -> Row:
    """Columns of one clean image. Columns that its defense does not have stay null."""
    verdict, certificate = examined.verdict, examined.certificate
    placement = getattr(certificate, "failing_placement", None)
    names = ("margin", "certified", "row_certified", "failing_pair", "detection_certified")
    row: Row = {
        "height": examined.size[0],
        "width": examined.size[1],
        "undefended": examined.undefended,
        "answer": verdict.label,
        "alert": getattr(verdict, "alert", None),
        "case": verdict.case.value if isinstance(verdict, Verdict) else None,
        "deciding_mask": getattr(verdict, "deciding_mask", None),
        **{name: getattr(certificate, name, None) for name in names},
        "weakest": placement and [number for window in placement for number in window.numbers],
        "classifications": certificate.classifications,
    }
    if isinstance(examined, TableExamination):
        labels = examined.table
        masks = len(labels.mask_set)
        row |= {
            "one_mask_labels": labels.certain_labels[:masks],
            "one_mask_margins": labels.margins[:masks],
            "one_mask_confidences": labels.confidences[:masks],
            "table": labels.certain_labels if table else None,
            "coarse_labels": labels.coarse and labels.coarse.one_mask_labels(),
            "classifications": labels.spent,
            **{count: labels.total(count) for count in ("rechecked", "flipped", "audited", "caught", "unconfirmed")},
        }
    return row
