"""MultiLabelJob: everything that decides the rows of images with several labels, and how they are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from patchcleanser.attacks.flip_classes import FlipResult, attack_classes
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import PerAxis
from patchcleanser.core.multilabel import Scores
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.data.multilabel_sets import MultiLabelDataset
from patchcleanser.defenses.multilabel_masking import MultiLabelExamination, MultiLabelMasking, ScoreKind
from patchcleanser.errors import DataError, InputError
from patchcleanser.evaluation.dataset_jobs import DatasetJob, RunJob, mask_identity
from patchcleanser.evaluation.rows import LoadedBatch
from patchcleanser.evaluation.saved_images import save_examples
from patchcleanser.evaluation.workloads import Batch, BatchWorkload
from patchcleanser.records.run import Row, Run

SCORES = 1
"""Version of the scores. Raise it when a change of the code may change one: old and new rows then never mix."""

CURVE: tuple[float, ...] = tuple(float(share) for share in np.round(1 / (1 + np.exp(-np.arange(-6, 6.01, 0.25))), 6))
"""The probabilities at which rows count answers, for curves of precision and recall: evenly spaced logits."""


@dataclass(frozen=True)
class MultiLabelJob(DatasetJob):
    """What to certify: images with their classes, classifier, threat and masks. Jobs of equal identity have equal rows.

    `outputs` are the classifier's numbers of the dataset's classes, by default all of them in order. `threshold` is a
    probability for all classes or one for each; rows also count answers at those of `curve`, one for all classes.
    """

    classifier: Classifier
    dataset: MultiLabelDataset
    threat: Threat
    masks: PerAxis = None
    stride: PerAxis = None
    threshold: float | Sequence[float] | None = None
    scores: ScoreKind | None = None
    outputs: Sequence[int] | None = None
    curve: Sequence[float] = CURVE

    has_masks = True

    if TYPE_CHECKING:  # what it takes; the fields say what it holds

        def __init__(
            self,
            classifier: AnyClassifier,
            dataset: MultiLabelDataset,
            threat: AnyThreat,
            masks: PerAxis = None,
            stride: PerAxis = None,
            threshold: float | Sequence[float] | None = None,
            scores: ScoreKind | None = None,
            outputs: Sequence[int] | None = None,
            curve: Sequence[float] = CURVE,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        object.__setattr__(self, "classifier", as_classifier(self.classifier))
        if not isinstance(self.dataset, MultiLabelDataset):
            raise InputError(f"images with several labels come from load_multilabel(…), got {self.dataset!r:.80}")
        if self.built.classes not in (0, len(self.dataset.classes)):
            raise DataError(
                f"{self.dataset.name} has {len(self.dataset.classes)} classes and {self.built.classes} outputs count; "
                "dataset.shared_with(classifier.names) gives the shared classes, and their outputs="
            )

    @classmethod
    def matched(
        cls, classifier: AnyClassifier, dataset: MultiLabelDataset, threat: AnyThreat, **options: Any
    ) -> MultiLabelJob:
        """A job on the classes that the classifier and the data share by name; by number if one has no names."""
        classifier = as_classifier(classifier)
        if not classifier.names or not dataset.classes:
            return cls(classifier, dataset, threat, **options)
        shared, outputs = dataset.shared_with(classifier.names)
        return cls(classifier, shared, threat, outputs=tuple(outputs.tolist()), **options)

    @property
    def model(self) -> Classifier:
        """The classifier."""
        return self.classifier

    @property
    def title(self) -> str:
        """Threat and masks."""
        masks = "×".join(map(str, self.identity["masks"] or self.identity["stride"]))
        return f"{self.threat}, {masks} masks, several labels"

    @cached_property
    def built(self) -> MultiLabelMasking:
        """The defense."""
        return MultiLabelMasking(
            self.classifier,
            self.threat,
            threshold=self.threshold,
            scores=self.scores,
            classes=self.outputs,
            masks=self.masks,
            stride=self.stride,
        )

    @property
    def masking(self) -> MultiLabelMasking:
        """The defense, which has masks."""
        return self.built

    @property
    def labels(self) -> Any:
        """True classes, bool [images, classes]."""
        return self.dataset.targets

    @property
    def thresholds(self) -> Scores:
        """[thresholds, classes]: the job's own, and those of the curve."""
        curve = self.built.on_scores(np.asarray(self.curve, dtype=np.float64))[:, None]
        classes = len(self.dataset.classes)
        own = np.broadcast_to(self.built.score_thresholds, (1, classes))
        return np.concatenate([own, np.broadcast_to(curve, (len(curve), classes))])

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        return {"classes": np.flatnonzero(self.dataset.targets[index]).tolist()}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        return {
            "kind": "multilabel",
            "scores": SCORES,
            "classifier": self.classifier.fingerprint,
            "device": self.device.type,
            "precision": "exact",
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "outputs": None if self.outputs is None else list(self.outputs),
            "threat": self.threat.to_dict(),
            **mask_identity(self.masks, self.stride),
            "defense": "multilabel-masking",
            "options": {
                "scores": self.built.scores,
                "threshold": [float(share) for share in self.built.threshold],
                "curve": list(self.curve),
            },
        }

    def workload(self, *, skip: bool = False) -> MultiLabelWorkload:
        """The batches to certify."""
        return MultiLabelWorkload(self, skip)


class MultiLabelWorkload(BatchWorkload[MultiLabelJob, list[Row]]):
    """Batches of images with several labels, into rows."""

    sizes = (256, 32)

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        started, job, rows = time.monotonic(), self.job, read.readable
        truths = [job.dataset.targets[row["index"]] for row in rows]
        examined = job.built.examine(read.images, truths) if rows else []
        seconds = (time.monotonic() - started) / max(1, len(rows))
        for row, result in zip(rows, examined, strict=True):
            row.update(label_columns(result, job.thresholds), seconds=seconds)
        return read.rows

    def finish(self, run: Run) -> None:
        save_examples(run, self.job, ["classes"], [lambda row: len(row["classes"]) > 1])


def label_columns(examined: MultiLabelExamination, thresholds: Scores) -> Row:
    """Columns of one image with several labels, counted at thresholds [n, classes], the job's own first."""
    certificate, bounds = examined.certificate, examined.bounds
    everywhere = bounds.placed(examined.hides).each_class()
    right = bounds.each_mask().right(examined.truth, thresholds[0])
    row: Row = {
        "height": examined.size[0],
        "width": examined.size[1],
        "undefended_scores": examined.undefended,
        "clean_scores": bounds.defended,
        "lowest_scores": everywhere.low[0],
        "highest_scores": everywhere.high[0],
        "unproved": np.flatnonzero(~right).tolist(),
        "weakest": [number for window in certificate.failing_placement or () for number in window.numbers],
        "margin": certificate.margin,
        "classifications": examined.table.spent,
    }
    for name, counts in examined.counts(thresholds).items():
        row |= {f"{name}_true": counts.true.tolist(), f"{name}_false": counts.false.tolist()}
    return row


@dataclass(frozen=True)
class MultiLabelAttackJob(RunJob):
    """Classes of certified images to attack, and with which budget. Jobs of equal identity have equal rows."""

    job: MultiLabelJob
    settings: AttackSettings = field(default_factory=AttackSettings)

    def __post_init__(self) -> None:
        plain = AttackSettings()
        unused = [name for name in ("places", "loss", "target") if getattr(self.settings, name) != getattr(plain, name)]
        if unused:
            raise InputError(
                f"the attack on classes chooses its places, loss and target itself; leave out {', '.join(unused)}"
            )

    @property
    def base(self) -> MultiLabelJob:
        return self.job

    @property
    def title(self) -> str:
        """Attack and threat."""
        return f"classes under attack, {self.job.threat}"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        budget = asdict(replace(self.settings, chunk=None))
        return {**self.job.identity, "kind": "multilabel-attack", "attack": "adaptive", "settings": budget}

    def workload(self, *, skip: bool = False) -> ClassAttackWorkload:
        """The batches to attack."""
        return ClassAttackWorkload(self, skip)


class ClassAttackWorkload(BatchWorkload[MultiLabelAttackJob, list[Row]]):
    """Batches of images of which single classes are attacked, into rows."""

    sizes = (16, 4)

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        job = self.job.base
        for row, image in zip(read.readable, read.images, strict=True):
            started, truth = time.monotonic(), job.dataset.targets[row["index"]]
            results = list(attack_classes(job.built, [image], [truth], self.job.settings))
            size = job.built.to_threat_grid(image).shape[-2:]
            row.update(class_attack_columns(results, (size[0], size[1])), seconds=time.monotonic() - started)
        return read.rows


def class_attack_columns(results: Sequence[FlipResult], size: Size) -> Row:
    """Columns of one image of which classes were attacked; a list holds one value for each of them."""
    least, most = results[0].promised
    names = ("certified", "undefended_wrong", "defended_wrong", "true_positives", "false_positives")
    return {
        "height": size[0],
        "width": size[1],
        "attacked": [result.label for result in results],
        **{name: [getattr(result, name) for result in results] for name in names},
        "promised_true": least,
        "promised_false": most,
        "classifications": sum(result.queries for result in results),
    }
