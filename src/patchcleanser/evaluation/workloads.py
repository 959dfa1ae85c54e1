"""Work: tasks of one job that know nothing of each other, so that anyone can do them, in any order, even twice.

Batches of images are carried out into a run folder: each is kept by this process as soon as it is done.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from patchcleanser.evaluation.gallery import keep_gallery
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import Loaded, load_batch, rows_of
from patchcleanser.records.metrics import COLUMNS, Summary, summary
from patchcleanser.records.run import Row, Run

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
    """The run's: which fast labels are audited depends on it."""


class Workload(ABC, Generic[Task, Result]):
    """How to do a task: read what it needs, then work out its result. Neither depends on other tasks."""

    job: Job

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Everything that decides the results, as plain values."""

    @abstractmethod
    def check(self) -> None:
        """Refuse what can never work."""

    def expect(self, tasks: Sequence[Task]) -> None:
        """Told, where all tasks are done by one process, which are to come."""

    @abstractmethod
    def read(self, task: Task) -> Any:
        """What the task needs; it may be read while another task is worked on."""

    @abstractmethod
    def process(self, task: Task, read: Any) -> Result:
        """The task's result."""


class Runner(Protocol):
    """Where work is done."""

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """Refuse what can never work, and say what decides the results there: its identity."""

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """The result of every task, once, as soon as it is there."""


class LocalRunner:
    """In this process: one task after the other, each read while the one before it is worked on."""

    def begin(self, work: Workload[Any, Any]) -> dict[str, Any]:
        """As the work itself says."""
        work.check()
        return work.identity

    def results(self, work: Workload[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """In order."""
        work.expect(tasks)
        with ThreadPoolExecutor(1) as reader:
            coming = deque((task, reader.submit(work.read, task)) for task in tasks[:2])
            for following in [*tasks[2:], None, None][: len(tasks)]:
                task, read = coming.popleft()
                yield task, work.process(task, read.result())
                if following is not None:
                    coming.append((following, reader.submit(work.read, following)))


class BatchWorkload(Workload[Batch, Result]):
    """Work on batches of a job's images, whose results are rows."""

    skip: bool
    """Leave out images that cannot be read, and say so in their rows."""
    sizes: ClassVar[tuple[int, int]]
    """Images of a batch on a GPU, which larger ones fill, and elsewhere, where a stop should cost only seconds."""
    columns: ClassVar[Sequence[str] | None] = None
    """What a summary reads of the rows; None is everything."""

    def check(self) -> None:
        """As the job does."""
        self.job.check(skip=self.skip)

    def read(self, task: Batch) -> Loaded:
        """The images."""
        return load_batch(self.job, task.indices, skip=self.skip, left_out=task.left_out)

    @abstractmethod
    def write(self, run: Run, task: Batch, result: Result) -> None:
        """Write what a batch gave."""

    def finish(self, run: Run) -> None:
        """What is kept besides, once all batches are."""


@dataclass(frozen=True)
class CertifyWorkload(BatchWorkload[list[Row]]):
    """Batches of images to certify, into rows."""

    job: Job
    skip: bool = False
    sizes = (512, 32)
    columns = COLUMNS

    @property
    def identity(self) -> dict[str, Any]:
        """The job's."""
        return self.job.identity

    def expect(self, tasks: Sequence[Batch]) -> None:
        """The defense is told how many images."""
        self.job.built.hint_total_images(sum(len(task.indices) for task in tasks))

    def process(self, task: Batch, read: Loaded) -> list[Row]:
        """Their rows."""
        return rows_of(self.job, read, task.entropy)

    def write(self, run: Run, task: Batch, result: list[Row]) -> None:
        """The rows."""
        run.write(task.number, result)

    def finish(self, run: Run) -> None:
        """A few pictures."""
        keep_gallery(run, self.job)


@dataclass(frozen=True)
class Progress:
    """How far a run is: the rows so far, in this and in earlier sessions, and what they show."""

    done: int
    total: int
    here: int
    """Images done in this session."""
    summary: Summary


Watch = Callable[[Progress], None]


def run_workload(
    work: BatchWorkload[Any],
    folder: str | Path,
    *,
    batch: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Watch | None = None,
    runner: Runner | None = None,
) -> Run:
    """Do all batches that are not done, wherever the runner does them. This process alone writes."""
    runner = runner or LocalRunner()
    identity = runner.begin(work)
    on_gpu, elsewhere = work.sizes
    size = batch or (on_gpu if identity["device"] == "cuda" else elsewhere)
    metadata = {"entropy": secrets.randbits(63), **(metadata or {})}
    run = Run.begin(folder, identity, images=len(work.job.dataset), batch=size, metadata=metadata)
    with run.locked():
        state, here = summary(run.read(work.columns)), 0
        for task, result in runner.results(work, to_do(run)):
            work.write(run, task, result)
            state += summary(run.read_batch(task.number, work.columns))
            here += len(task.indices)
            if on_progress is not None:
                on_progress(Progress(state.images + state.skipped, run.images, here, state))
        work.finish(run)
    return run


def to_do(run: Run) -> list[Batch]:
    """The batches of a run that are not done."""
    entropy = int(run.metadata.get("entropy", 0))
    return [Batch(number, run.indices(number), entropy=entropy) for number in run.missing()]


def evaluate(
    job: Job,
    folder: str | Path,
    *,
    batch: int | None = None,
    skip: bool = False,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Watch | None = None,
    runner: Runner | None = None,
) -> Run:
    """Certify every image of a job, and keep the rows in a folder; a run that stopped goes on where it was.

    `skip` leaves out images that cannot be read, and says so in their rows. `about` is kept in the
    manifest but decides nothing. `runner` is where the work is done: here, if nothing is said, or
    RayRunner(...); a run may be begun by one and finished by the other. This process alone writes.
    """
    return run_workload(
        CertifyWorkload(job, skip), folder, batch=batch, metadata=metadata, on_progress=on_progress, runner=runner
    )
