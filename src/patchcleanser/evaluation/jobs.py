"""Job: everything that decides the rows of images with one label each, and how they are computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.core.masks import PerAxis
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.data.inputs import AnyDataset, as_dataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import DataError, InputError
from patchcleanser.evaluation.dataset_jobs import DatasetJob, mask_identity
from patchcleanser.evaluation.rows import LoadedBatch, audit_seed, clean_columns
from patchcleanser.evaluation.saved_images import KINDS, PICTURED, save_examples
from patchcleanser.evaluation.workloads import Batch, BatchWorkload
from patchcleanser.records.metrics import Summary
from patchcleanser.records.run import Row, Run

LOGGER = logging.getLogger("patchcleanser")

LABELS = 3
"""Version of the labels. Raise it when a change of the code may change a label: old and new rows then never mix."""

FEW_IMAGES = 10
"""Accuracies of fewer images say little."""

SHARED = frozenset(("masks", "stride", "precision", "confirm"))
"""What all defenses with masks take, and a job says in fields of its own."""


@dataclass(frozen=True)
class Job(DatasetJob):
    """What to certify: images, classifier, threat, masks and defense. Jobs of equal identity have equal rows.

    `classifier` may also be a torch module, a function or a string for load_classifier; `dataset` a name for
    load_dataset, a torch dataset, a DataLoader or a list of (image, label); `threat` a text such as "2%".
    `table=True` computes and stores every two-mask label. Other defenses, smaller patches, vulnerability maps and
    thresholds can then be derived without the model.
    """

    classifier: Classifier
    dataset: Dataset
    threat: Threat
    defense: str = "double-masking"
    masks: PerAxis = None
    stride: PerAxis = None
    precision: Precision = "exact"
    table: bool = False
    confirm: Confirm = "sampled"
    """With fast labels: "all" recomputes every label of a certified image in float32, "sampled" a sample of labels."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this defense only, such as threshold= of Minority Reports or seed= of challenger masking."""

    if TYPE_CHECKING:  # what it takes; the fields say what it holds

        def __init__(
            self,
            classifier: AnyClassifier,
            dataset: AnyDataset,
            threat: AnyThreat,
            defense: str = "double-masking",
            masks: PerAxis = None,
            stride: PerAxis = None,
            precision: Precision = "exact",
            table: bool = False,
            confirm: Confirm = "sampled",
            options: Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        if not isinstance(self.defense, str) or self.defense not in DEFENSES:
            raise InputError.unknown("defense", self.defense, DEFENSES)
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise InputError(f"options is a dict of the defense's own options, got {self.options!r}")
        if misplaced := self.options.keys() & SHARED:
            raise InputError(
                f"options are the defense's own, got {', '.join(sorted(misplaced))}; these are fields of Job"
            )
        object.__setattr__(self, "classifier", as_classifier(self.classifier))
        object.__setattr__(self, "dataset", as_dataset(self.dataset))
        self.labels  # noqa: B018  # raises if there are none
        if self.table and DEFENSES[self.defense].load().may_alert:
            raise InputError(f"{self.defense} looks at one mask at a time and has no table; leave out the table")
        if not self.has_masks and (self.table or self.masks or self.stride or self.precision != "exact"):
            raise InputError(f"{self.defense} has no masks; leave out --masks, --stride, --table and --precision")

    @property
    def labels(self) -> NDArray[np.int64]:
        """True labels, int64 [images]."""
        if self.dataset.labels is None:
            raise DataError(
                f"{self.dataset.name} has no labels, and nothing can be certified without true labels; "
                "use predict for unlabelled images"
            )
        return self.dataset.labels

    @property
    def model(self) -> Classifier:
        """The classifier."""
        return self.classifier

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        return {"label": int(self.labels[index])}

    @property
    def has_masks(self) -> bool:
        """Whether the defense works with a mask set."""
        return issubclass(DEFENSES[self.defense].load(), MaskDefense)

    @property
    def grid(self) -> str:
        """The masks or strides per axis, as 6x6."""
        return "x".join(map(str, self.identity["masks"] or self.identity["stride"]))

    @property
    def title(self) -> str:
        """Threat, masks and defense."""
        coarse = self.options.get("coarse")
        grid = self.grid.replace("x", "×") if self.has_masks else ""
        masks = f"{grid} masks{f' after {coarse}×{coarse}' if coarse else ''}, " if grid else ""
        return f"{self.threat}, {masks}{self.defense}"

    @property
    def masking(self) -> MaskDefense[Any, Any]:
        """The defense; InputError if it has no masks."""
        if not isinstance(self.built, MaskDefense):
            raise InputError(f"only defenses with masks can be attacked, and {self.defense} has none")
        return self.built

    @cached_property
    def built(self) -> Defense[Any, Any]:
        """The defense."""
        masks: dict[str, Any] = {}
        if self.has_masks:
            masks = {"masks": self.masks, "stride": self.stride, "precision": self.precision}
            masks |= {"confirm": self.confirm} if self.confirm != "sampled" else {}
        try:
            defense: Defense[Any, Any] = DEFENSES[self.defense].load()(
                self.classifier, self.threat, **masks, **self.options
            )
            return defense
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise InputError(f"{self.defense} does not take {', '.join(self.options)}") from error

    @property
    def metadata(self) -> dict[str, Any]:
        """What a manifest says besides the job itself; of model and data only what was loaded by name."""
        names = list(self.classifier.names or ())
        return {**super().metadata, "classes": list(self.dataset.classes) or names, "model_classes": names}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        local = self.built.receptive_field if isinstance(self.built, MaskDefense) else None
        return {
            "labels": LABELS,
            "classifier": self.classifier.fingerprint,
            "device": self.classifier.device.type,  # kernels of another kind of device round differently
            "precision": "fast" if self.built.fast else "exact",
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "threat": self.threat.to_dict(),
            **mask_identity(self.masks, self.stride, default=6 if self.has_masks else None),
            "defense": self.defense,
            "options": dict(self.options),
            "table": self.table,
            **({"receptive_field": list(local)} if local else {}),
            **({"confirm": self.confirm} if self.confirm != "sampled" and self.built.fast else {}),
        }

    def workload(self, *, skip: bool = False) -> CertifyWorkload:
        """The batches to certify."""
        return CertifyWorkload(self, skip)

    def warn(self) -> None:
        """Warn if a class of the data has another name in the classifier. A job takes labels by number."""
        names, classes = self.classifier.names or (), self.dataset.classes
        for number, (name, other) in enumerate(zip(classes, names, strict=False)):
            if name.lower() != other.lower() and not name.isdigit():
                LOGGER.warning(
                    "label %d is %r in %s and %r in the classifier, and labels are taken by number "
                    "(--labels name, in Python patchcleanser.evaluation.match_labels, matches them by name)",
                    number,
                    name,
                    self.dataset.name,
                    other,
                )
                return

    def judge(self, state: Summary) -> None:
        """Warn if the undefended classifier is hardly better than chance: then its input or the labels are wrong."""
        classes, undefended = self.classifier.classes or len(self.dataset.classes), state.shares["undefended"]
        if classes and state.images >= FEW_IMAGES and undefended.percent < min(50.0, 200 / classes):
            LOGGER.warning(
                "only %s of %d images are classified correctly without any patch, and chance gives %.2g%%: usually "
                "the preprocessing is wrong (mean, std, size), or the labels have other numbers than the classifier's "
                "classes (--labels name, in Python patchcleanser.evaluation.match_labels, matches them by name)",
                undefended,
                state.images,
                100 / classes,
            )


class CertifyWorkload(BatchWorkload[Job, list[Row]]):
    """Batches of images to certify, into rows."""

    sizes = (512, 32)

    def expect(self, tasks: Sequence[Batch]) -> None:
        self.job.built.hint_total_images(sum(len(task.indices) for task in tasks))

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        started, job, rows = time.monotonic(), self.job, read.readable
        job.built.reset(audit_seed(job, read, task.entropy))  # so that no batch's rows depend on the batches before it
        examined = job.built.examine(read.images, [row["label"] for row in rows], maps=job.table) if rows else []
        seconds = (time.monotonic() - started) / max(1, len(rows))
        for row, result in zip(rows, examined, strict=True):
            row.update(clean_columns(result, table=job.table), seconds=seconds)
        return read.rows

    def finish(self, run: Run) -> None:
        save_examples(run, self.job, PICTURED, KINDS.values())
