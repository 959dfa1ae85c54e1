"""Workloads: the independent tasks of a job, who runs them, and `evaluate`, which writes their rows into a run folder.

Tasks do not depend on each other: they may run anywhere, in any order, even twice.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from patchcleanser.attacks.flip_classes import attack_classes
from patchcleanser.core.counts import counted
from patchcleanser.errors import InputError
from patchcleanser.evaluation.attack_rows import attack_rows
from patchcleanser.evaluation.detect_jobs import DetectJob
from patchcleanser.evaluation.jobs import AttackJob, Job
from patchcleanser.evaluation.multilabel_jobs import MultiLabelAttackJob, MultiLabelJob
from patchcleanser.evaluation.rows import (
    LoadedBatch,
    audit_seed,
    class_attack_columns,
    clean_columns,
    label_columns,
    load_batch,
    object_columns,
)
from patchcleanser.evaluation.saved_images import save_examples, save_label_examples, save_object_examples, save_picture
from patchcleanser.progress import progress_bar
from patchcleanser.records.metrics import (
    CLASS_ATTACK_COLUMNS,
    COLUMNS,
    MULTILABEL_COLUMNS,
    OBJECT_COLUMNS,
    Summary,
    summary,
)
from patchcleanser.records.run import Row, Run

LOGGER = logging.getLogger("patchcleanser")

FEW_IMAGES, ENOUGH_IMAGES = 10, 100
"""Accuracies of fewer images say little; after enough, a run that is not finished is judged, too."""

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """Images whose rows make one shard of a run."""

    number: int
    indices: Sequence[int]
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Images that must not even be read, and why."""
    entropy: int = 0
    """The run's random number: it decides which fast labels are audited."""


class Workload(ABC, Generic[Task, Result]):
    """How to do a task: read what it needs, then compute its result."""

    job: Job

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the results, as plain values."""
        return self.job.identity

    def check(self) -> None:
        """Raise if the work can never succeed."""

    def expect(self, tasks: Sequence[Task]) -> None:
        """Prepare for these tasks, where one process does them all."""

    @abstractmethod
    def read(self, task: Task) -> Any:
        """What the task needs. It may be read while another task is computed."""

    @abstractmethod
    def process(self, task: Task, read: Any) -> Result:
        """The task's result."""


class Runner(Protocol):
    """Where work is done: in this process, or on a cluster."""

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """Check the work, and return its identity as it is where the work is done."""

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """Yield the result of every task once, as soon as it is there."""


class LocalRunner:
    """In this process: one task after the other. The next one is read while the current one is computed."""

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        work.check()
        return work.identity

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        work.expect(tasks)
        with ThreadPoolExecutor(1) as reader:
            reads = deque(reader.submit(work.read, task) for task in tasks[:2])
            for number, task in enumerate(tasks):
                yield task, work.process(task, reads.popleft().result())
                reads.extend(reader.submit(work.read, later) for later in tasks[number + 2 : number + 3])


class BatchWorkload(Workload[Batch, Result]):
    """Work on batches of a job's images, whose results are rows."""

    skip: bool
    """Leave out images that cannot be read, with the reason in their rows."""
    sizes: ClassVar[tuple[int, int]]
    """Images per batch on a GPU, which large batches fill, and elsewhere, where a stop should cost only seconds."""
    columns: ClassVar[Sequence[str] | None] = None
    """The columns that a summary reads; None is all."""

    def check(self) -> None:
        self.job.check(skip=self.skip)

    def read(self, task: Batch) -> LoadedBatch:
        return load_batch(self.job, task.indices, skip=self.skip, left_out=task.left_out)

    @property
    def title(self) -> str:
        """What is certified, for a progress bar."""
        return self.job.title

    @abstractmethod
    def write(self, run: Run, task: Batch, result: Result) -> None:
        """Write the result of a batch."""

    def judge(self, state: Summary) -> None:
        """Warn of results that say that the job itself is wrong."""
        warn_near_chance(state, self.job)

    def finish(self, run: Run) -> None:
        """Write what comes after the last batch."""


@dataclass(frozen=True)
class CertifyWorkload(BatchWorkload[list[Row]]):
    """Batches of images to certify, into rows."""

    job: Job
    skip: bool = False
    sizes = (512, 32)
    columns = COLUMNS

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

    def write(self, run: Run, task: Batch, result: list[Row]) -> None:
        run.write(task.number, result)

    def finish(self, run: Run) -> None:
        save_examples(run, self.job)


@dataclass(frozen=True)
class AttackWorkload(BatchWorkload[tuple[list[Row], dict[str, bytes]]]):
    """Batches of images to attack, into rows and pictures."""

    attack: AttackJob
    skip: bool = False
    sizes = (64, 4)

    @property
    def job(self) -> Job:  # type: ignore[override]
        return self.attack.job

    @property
    def identity(self) -> dict[str, Any]:
        return self.attack.identity

    @property
    def title(self) -> str:
        return self.attack.title

    def process(self, task: Batch, read: LoadedBatch) -> tuple[list[Row], dict[str, bytes]]:
        return attack_rows(self.attack, read, task.entropy)

    def write(self, run: Run, task: Batch, result: tuple[list[Row], dict[str, bytes]]) -> None:
        rows, pictures = result
        for name, content in pictures.items():  # before the rows: a batch that has rows is complete
            save_picture(run, name, content)
        run.write(task.number, rows)


@dataclass(frozen=True)
class DetectWorkload(BatchWorkload[list[Row]]):
    """Batches of images whose objects are certified, into rows."""

    job: DetectJob  # type: ignore[assignment]
    skip: bool = False
    sizes = (64, 8)
    columns = OBJECT_COLUMNS

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        for row, image in zip(read.readable, read.images, strict=True):
            started, objects = time.monotonic(), self.job.dataset.objects[row["index"]]
            examined = self.job.built.examine(image, objects.boxes, objects.classes)
            row.update(object_columns(examined, objects, image), seconds=time.monotonic() - started)
        return read.rows

    def write(self, run: Run, task: Batch, result: list[Row]) -> None:
        run.write(task.number, result)

    def judge(self, state: Summary) -> None:
        """Recall has no chance level."""

    def finish(self, run: Run) -> None:
        save_object_examples(run, self.job)


@dataclass(frozen=True)
class MultiLabelWorkload(BatchWorkload[list[Row]]):
    """Batches of images with several labels, into rows."""

    job: MultiLabelJob  # type: ignore[assignment]
    skip: bool = False
    sizes = (256, 32)
    columns = MULTILABEL_COLUMNS

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        started, job, rows = time.monotonic(), self.job, read.readable
        truths = [job.dataset.targets[row["index"]] for row in rows]
        examined = job.built.examine(read.images, truths) if rows else []
        seconds = (time.monotonic() - started) / max(1, len(rows))
        for row, result in zip(rows, examined, strict=True):
            row.update(label_columns(result, job.thresholds), seconds=seconds)
        return read.rows

    def write(self, run: Run, task: Batch, result: list[Row]) -> None:
        run.write(task.number, result)

    def judge(self, state: Summary) -> None:
        """Precision and recall have no chance level."""

    def finish(self, run: Run) -> None:
        save_label_examples(run, self.job)


@dataclass(frozen=True)
class ClassAttackWorkload(BatchWorkload[list[Row]]):
    """Batches of images of which single classes are attacked, into rows."""

    attack: MultiLabelAttackJob
    skip: bool = False
    sizes = (16, 4)
    columns = CLASS_ATTACK_COLUMNS

    @property
    def job(self) -> MultiLabelJob:  # type: ignore[override]
        return self.attack.job

    @property
    def identity(self) -> dict[str, Any]:
        return self.attack.identity

    @property
    def title(self) -> str:
        return self.attack.title

    def process(self, task: Batch, read: LoadedBatch) -> list[Row]:
        for row, image in zip(read.readable, read.images, strict=True):
            started, truth = time.monotonic(), self.job.dataset.targets[row["index"]]
            results = list(attack_classes(self.job.built, [image], [truth], self.attack.settings))
            size = self.job.built.to_threat_grid(image).shape[-2:]
            row.update(class_attack_columns(results, (size[0], size[1])), seconds=time.monotonic() - started)
        return read.rows

    def write(self, run: Run, task: Batch, result: list[Row]) -> None:
        run.write(task.number, result)

    def judge(self, state: Summary) -> None:
        """Attacked classes have no chance level."""


AnyJob = Job | AttackJob | DetectJob | MultiLabelJob | MultiLabelAttackJob


def workload_of(job: AnyJob, *, skip: bool = False) -> BatchWorkload[Any]:
    """The batches to certify or to attack."""
    if isinstance(job, DetectJob):
        return DetectWorkload(job, skip)
    if isinstance(job, MultiLabelAttackJob):
        return ClassAttackWorkload(job, skip)
    if isinstance(job, MultiLabelJob):
        return MultiLabelWorkload(job, skip)
    return AttackWorkload(job, skip) if isinstance(job, AttackJob) else CertifyWorkload(job, skip)


@dataclass(frozen=True)
class Progress:
    """How far a run is: the rows of this and of earlier sessions, and what they show."""

    done: int
    total: int
    here: int
    """Images done in this session."""
    summary: Summary

    def __str__(self) -> str:
        shares = self.summary.shares
        leads = ("robust", "certified", "detection_certified", "certified_far", "certified_recall")
        names = [name for name in leads if name in shares]
        parts = [f"{name.replace('_', ' ')} {shares[name].percent:.1f}%" for name in names[:1]]
        return "  ".join([*parts, *([f"{self.summary.skipped} skipped"] if self.summary.skipped else [])])


def evaluate(
    job: AnyJob,
    folder: str | Path,
    *,
    batch: int | None = None,
    skip: bool = False,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    seconds: float | None = None,
    runner: Runner | None = None,
) -> Run:
    """Certify or attack every image of a job, and write a row for each into a folder.

    A run that was stopped goes on where it was. `batch` is the number of images per shard, `skip` leaves out images
    that cannot be read, with the reason in their rows. `metadata` goes into the manifest with that of the job, and
    decides nothing. `progress` shows a bar, or lines where there is no terminal; by default a bar on a terminal or in a
    notebook. Before the first batch ends, it shows `seconds` as left. Events go to the logger "patchcleanser".

    `runner` is where the work is done: here, or RayRunner(...). One may begin a run and the other finish it. Only this
    process writes.
    """
    if not isinstance(job, AnyJob) or not isinstance(folder, str | Path):
        got = f"{type(job).__name__} and {type(folder).__name__}"
        raise InputError(
            f"evaluate takes a Job, AttackJob, DetectJob or MultiLabelJob, and the folder of the run; got {got}"
        )
    runner, work = runner or LocalRunner(), workload_of(job, skip=skip)
    if isinstance(work.job, Job):
        _warn_of_other_names(work.job)
    identity = runner.begin(work)
    on_gpu, elsewhere = work.sizes
    size = batch or (on_gpu if identity["device"] == "cuda" else elsewhere)
    metadata = {"entropy": secrets.randbits(63), **work.job.metadata, **(metadata or {})}
    run = Run.begin(folder, identity, images=len(work.job.dataset), batch=size, metadata=metadata)
    if run.missing():
        _warn_of_other_versions(run.metadata.get("versions"), metadata.get("versions"))
    with run.locked():
        _compute_missing(run, work, runner, on_progress, progress, seconds)
        work.finish(run)
    LOGGER.debug("%s: all of %d images are done", run.folder, run.images)
    return run


def _compute_missing(
    run: Run,
    work: BatchWorkload[Any],
    runner: Runner,
    on_progress: Callable[[Progress], None] | None,
    progress: bool | None,
    seconds: float | None,
) -> None:
    """Compute and write the rows of every batch that is missing, and say after each how far the run is."""
    state, here, entropy = summary(run.read(work.columns)), 0, int(run.metadata.get("entropy", 0))
    before, started, judged = state.images + state.skipped, time.monotonic(), False
    level = logging.INFO if before else logging.DEBUG
    LOGGER.log(level, "%s: %d of %d images are already done", run.folder, before, run.images)
    batches = [Batch(number, run.indices(number), entropy=entropy) for number in run.missing()]
    bar = progress_bar(work.title, progress, total=run.images, done=before, seconds=seconds)
    with bar as show, _warned_if_nothing_is_kept(run):
        for task, result in runner.results(work, batches):
            work.write(run, task, result)
            rows = run.read_batch(task.number, work.columns and [*work.columns, "id"])
            _log_left_out(rows)
            state += summary(rows)
            here += len(task.indices)
            update = Progress(state.images + state.skipped, run.images, here, state)
            show(update.done, update.total, f"{update}  {here / max(time.monotonic() - started, 1e-9):.2f} images/s")
            if not judged and (update.done == update.total or state.images >= ENOUGH_IMAGES):
                judged = True
                work.judge(state)
            if on_progress is not None:
                on_progress(update)


@contextmanager
def _warned_if_nothing_is_kept(run: Run) -> Iterator[None]:
    """Say on Ctrl-C if no batch was finished, so that nothing is kept."""
    try:
        yield
    except KeyboardInterrupt:
        if len(run.missing()) == run.batches:
            LOGGER.warning(
                "stopped before the first batch of %s was finished, so nothing is kept; "
                "a smaller batch (--batch) loses less",
                counted(min(run.batch, run.images), "image"),
            )
        raise


def _log_left_out(rows: pa.Table) -> None:
    for row in rows.select(["id", "skipped"]).to_pylist():
        if row["skipped"] is not None:
            LOGGER.info("image %s is left out: %s", row["id"], row["skipped"])


def _warn_of_other_versions(before: Any, now: Any) -> None:
    """Warn if a run goes on where rounding may be another: with other packages, hardware or threads."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return
    changes = [
        f"{name} {before[name]}, now {now[name]}" for name in before if now.get(name, before[name]) != before[name]
    ]
    if changes:
        LOGGER.warning(
            "the run was begun with %s: rounding may differ, and with it labels of a tiny margin; each certificate "
            "speaks of the setting in which it was computed",
            "; ".join(changes),
        )


def _warn_of_other_names(job: Job) -> None:
    """Warn if a class of the data has another name in the classifier. A job takes labels by number."""
    names, classes = job.classifier.names or (), job.dataset.classes
    for number, (name, other) in enumerate(zip(classes, names, strict=False)):
        if name.lower() != other.lower() and not name.isdigit():
            LOGGER.warning(
                "label %d is %r in %s and %r in the classifier, and labels are taken by number "
                "(patchcleanser.evaluation.match_labels matches them by name)",
                number,
                name,
                job.dataset.name,
                other,
            )
            return


def warn_near_chance(state: Summary, job: Job) -> None:
    """Warn if the undefended classifier is hardly better than chance: then its input or the labels are wrong."""
    classes, undefended = job.classifier.classes or len(job.dataset.classes), state.shares["undefended"]
    if classes and state.images >= FEW_IMAGES and undefended.percent < min(50.0, 200 / classes):
        LOGGER.warning(
            "only %s of %d images are classified correctly without any patch, and chance gives %.2g%%: usually the "
            "preprocessing is wrong (mean, std, size), or the labels have other numbers than the classifier's classes "
            "(in Python, patchcleanser.evaluation.match_labels matches them by name)",
            undefended,
            state.images,
            100 / classes,
        )
