"""DetectJob: everything that decides the rows of objects, and how they are computed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchcleanser.core.detections import Detections
from patchcleanser.core.hiding import PLACES
from patchcleanser.core.masks import PerAxis
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.data.object_sets import ObjectDataset
from patchcleanser.defenses.object_seeker import FILL, ObjectExamination, ObjectSeeker, best_coverage
from patchcleanser.detectors.detector import Detector, require_detector
from patchcleanser.errors import InputError
from patchcleanser.evaluation.dataset_jobs import DatasetJob, mask_identity
from patchcleanser.evaluation.rows import LoadedBatch
from patchcleanser.evaluation.saved_images import save_examples
from patchcleanser.evaluation.workloads import Batch, BatchWorkload
from patchcleanser.records.metrics import OVERLAP
from patchcleanser.records.run import Row, Run

DETECTIONS = 1
"""Version of the detections. Raise it when a change of the code may change a box: old and new rows then never mix."""


@dataclass(frozen=True)
class DetectJob(DatasetJob):
    """Which objects to certify: images with boxes, detector, threat and masks. Jobs of equal identity have equal rows.

    `dataset` has the detector's class numbers. With `lines`, masks are also both sides of that many rows and columns.
    Rows hold what every mask promises, so that smaller patches and others can be derived without the detector.
    """

    detector: Detector
    dataset: ObjectDataset
    threat: Threat
    masks: PerAxis = None
    stride: PerAxis = None
    lines: int = 0
    score: float = 0.3
    masked_score: float = 0.5
    prune: float = 0.8
    spec: str | None = None
    """The string that loads the detector; it decides no row."""

    if TYPE_CHECKING:  # what it takes; the fields say what it holds

        def __init__(
            self,
            detector: Detector,
            dataset: ObjectDataset,
            threat: AnyThreat,
            masks: PerAxis = None,
            stride: PerAxis = None,
            lines: int = 0,
            score: float = 0.3,
            masked_score: float = 0.5,
            prune: float = 0.8,
            spec: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        require_detector(self.detector)
        if not isinstance(self.dataset, ObjectDataset):
            raise InputError(f"objects come from load_objects(…), got {type(self.dataset).__name__}")
        if self.dataset.classes != tuple(self.detector.classes):
            raise InputError("the dataset's classes are not the detector's; use dataset.renumbered(detector.classes)")
        self.built  # noqa: B018  # raises if it cannot be built

    @property
    def model(self) -> Detector:
        """The detector."""
        return self.detector

    @property
    def title(self) -> str:
        """Threat and masks."""
        return f"objects, {self.threat}"

    @property
    def options(self) -> dict[str, float]:
        """The defense's thresholds."""
        return {"score": self.score, "masked_score": self.masked_score, "prune": self.prune}

    @cached_property
    def built(self) -> ObjectSeeker:
        """The defense."""
        return ObjectSeeker(
            self.detector, self.threat, masks=self.masks, stride=self.stride, lines=self.lines, **self.options
        )

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        objects = self.dataset.objects[index]
        return {"classes": objects.classes.tolist(), "boxes": objects.boxes.ravel().tolist()}

    def check_image(self, image: Tensor) -> None:
        """Raise if the masks cannot be built for an image."""
        self.built.mask_set((image.shape[1], image.shape[2]))

    @property
    def sketch(self) -> str:
        """Changes if the detector does."""
        return self.detector.fingerprint

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        return {
            "kind": "detect",
            "detections": DETECTIONS,
            "classifier": self.detector.fingerprint,
            "device": self.device.type,
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "threat": self.threat.to_dict(),
            **mask_identity(self.masks, self.stride),
            "lines": self.lines,
            "fill": FILL,
            "defense": "object-seeker",
            "options": self.options,
        }

    def workload(self, *, skip: bool = False) -> DetectWorkload:
        """The batches to certify."""
        return DetectWorkload(self, skip)


class DetectWorkload(BatchWorkload[DetectJob, list[Row]]):
    """Batches of images whose objects are certified, into rows."""

    sizes = (64, 8)

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        for row, image in zip(read.readable, read.images, strict=True):
            started, objects = time.monotonic(), self.job.dataset.objects[row["index"]]
            examined = self.job.built.examine(image, objects.boxes, objects.classes)
            row.update(object_columns(examined, objects, image), seconds=time.monotonic() - started)
        return read.rows

    def finish(self, run: Run) -> None:
        save_examples(run, self.job, ["undefended"], [lambda row: max(row["undefended"], default=0.0) >= OVERLAP])


def object_columns(examined: ObjectExamination, objects: Detections, image: Tensor) -> Row:
    """Columns of one image with objects; a list holds one value for each object, NaN where there is none."""
    row: Row = {
        "height": image.shape[1],
        "width": image.shape[2],
        "undefended": examined.undefended.tolist(),
        "defended": examined.defended.tolist(),
        "promises": examined.promises.ravel().tolist(),
        "classifications": 1 + examined.masks,
    }
    for name, boxes in (("undefended", examined.base), ("defended", examined.merged)):
        row[f"{name}_boxes"] = len(boxes)
        row[f"{name}_matched"] = int((best_coverage(boxes, objects) >= OVERLAP).sum())
    for place in PLACES:
        shares = [getattr(certificate, place) for certificate in examined.certificates]
        row[place] = [math.nan if share is None else share for share in shares]
    return row
