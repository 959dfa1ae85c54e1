"""Workloads: the independent tasks of a job, who runs them, and `evaluate`, which writes their rows into a folder.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import is_integer
from patchcleanser.errors import ClassifierError, InputError
from patchcleanser.evaluation.dataset_jobs import RunJob
from patchcleanser.evaluation.rows import LoadedBatch, load_batch
from patchcleanser.progress import progress_bar
from patchcleanser.records.atomic import interruptible
from patchcleanser.records.columns import COLUMNS_OF
from patchcleanser.records.metrics import Summary, summary
from patchcleanser.records.run import Run

LOGGER = logging.getLogger("patchcleanser")

ENOUGH_IMAGES = 100
"""After so many, a run that is not finished is judged, too."""

Task = TypeVar("Task")
Result = TypeVar("Result")
AnyJob = TypeVar("AnyJob", bound=RunJob)


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

    job: RunJob

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
        work.job.base.check_unchanged()
        return work.identity

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        work.expect(tasks)
        sketch = work.job.base.sketch
        with ThreadPoolExecutor(1) as reader:
            reads = deque(reader.submit(work.read, task) for task in tasks[:2])
            for number, task in enumerate(tasks):
                result = work.process(task, reads.popleft().result())
                if work.job.base.sketch != sketch:
                    raise ClassifierError(
                        "the classifier changed while it was in use, so the results since the last batch are dropped; "
                        "go on with the weights as they were, or make a new job with a new folder"
                    )
                yield task, result
                reads.extend(reader.submit(work.read, later) for later in tasks[number + 2 : number + 3])


@dataclass(frozen=True)
class BatchWorkload(Workload[Batch, Result], Generic[AnyJob, Result]):
    """Work on batches of a job's images, whose results are rows."""

    job: AnyJob
    skip: bool = False
    """Leave out images that cannot be read, with the reason in their rows."""
    sizes: ClassVar[tuple[int, int]]
    """Images per batch on a GPU, which large batches fill, and elsewhere, where a stop should cost only seconds."""

    def batch_size(self, device: str) -> int:
        """Images per batch on this kind of device, unless another number is asked for."""
        on_gpu, elsewhere = self.sizes
        return on_gpu if device == "cuda" else elsewhere

    def check(self) -> None:
        self.job.base.check(skip=self.skip)

    def read(self, task: Batch) -> LoadedBatch:
        return load_batch(self.job.base, task.indices, skip=self.skip, left_out=task.left_out)

    def write(self, run: Run, task: Batch, result: Any) -> None:
        """Write the result of a batch: its rows."""
        run.write(task.number, result)

    def finish(self, run: Run) -> None:
        """Write what comes after the last batch."""


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
    job: RunJob,
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

    A run that was stopped goes on where it was. A job whose classifier changed is refused: make a new one. `batch` is
    the number of images per shard, `skip` leaves out images that cannot be read, with the reason in their rows; those
    of a torch dataset or of pairs are all read when the job is made, and there each must be readable. `metadata` goes
    into the manifest with that of the job, and decides nothing. `progress` shows a bar, or lines where there is no
    terminal; by default a bar on a terminal or in a notebook. Before the first batch ends, it shows `seconds` as left.
    Events go to the logger "patchcleanser".

    `runner` is where the work is done: here, or RayRunner(...). One may begin a run and the other finish it. Only this
    process writes.
    """
    if not isinstance(job, RunJob) or not isinstance(folder, str | Path):
        got = f"{type(job).__name__} and {type(folder).__name__}"
        raise InputError(
            f"evaluate takes a Job, AttackJob, DetectJob or MultiLabelJob, and the folder of the run; got {got}"
        )
    if batch is not None and (not is_integer(batch) or batch < 1):
        raise InputError(f"batch is a whole number of at least 1 image, got {batch!r}")
    runner, work = runner or LocalRunner(), job.workload(skip=skip)
    job.base.warn()
    identity = runner.begin(work)
    size = batch or work.batch_size(identity["device"])
    metadata = {"entropy": secrets.randbits(63), **job.base.metadata, **(metadata or {})}
    run = Run.begin(folder, identity, images=len(job.base.dataset), batch=size, metadata=metadata)
    if run.missing():
        _warn_of_other_versions(run.metadata.get("versions"), metadata.get("versions"))
    with run.locked():
        _compute_missing(run, work, runner, on_progress, progress, seconds)
        work.finish(run)
    LOGGER.debug("%s: all of %d images are done", run.folder, run.images)
    return run


def _compute_missing(
    run: Run,
    work: BatchWorkload[Any, Any],
    runner: Runner,
    on_progress: Callable[[Progress], None] | None,
    progress: bool | None,
    seconds: float | None,
) -> None:
    """Compute and write the rows of every batch that is missing, and say after each how far the run is."""
    state, here, entropy = run.summary(), 0, int(run.metadata.get("entropy", 0))
    before, started, judged = state.images + state.skipped, time.monotonic(), False
    level = logging.INFO if before else logging.DEBUG
    LOGGER.log(level, "%s: %d of %d images are already done", run.folder, before, run.images)
    batches = [Batch(number, run.indices(number), entropy=entropy) for number in run.missing()]
    bar = progress_bar(work.job.title, progress, total=run.images, done=before, seconds=seconds)
    with bar as show, interruptible(lambda: _keeps_some(run)):
        for task, result in runner.results(work, batches):
            work.write(run, task, result)
            rows = run.read_batch(task.number, [*COLUMNS_OF[run.kind], "id"])
            _log_left_out(rows)
            state += summary(rows)
            here += len(task.indices)
            update = Progress(state.images + state.skipped, run.images, here, state)
            show(update.done, update.total, f"{update}  {here / max(time.monotonic() - started, 1e-9):.2f} images/s")
            if not judged and (update.done == update.total or state.images >= ENOUGH_IMAGES):
                judged = True
                work.job.base.judge(state)
            if on_progress is not None:
                on_progress(update)


def _keeps_some(run: Run) -> bool:
    """Whether some batch of a stopped run was finished; a warning if none was: nothing is kept of it."""
    if len(run.missing()) < run.batches:
        return True
    LOGGER.warning(
        "stopped before the first batch of %s was finished; a smaller batch (--batch) loses less",
        counted(min(run.batch, run.images), "image"),
    )
    return False


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
