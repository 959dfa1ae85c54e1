"""Work: tasks of one job that know nothing of each other, so that anyone can do them, in any order, even twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from patchcleanser.core.records import Row, Run
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import Loaded, load_batch, rows_of

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """Images whose rows make one shard of a run."""

    number: int
    indices: Sequence[int]
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Images that must not even be read, and why."""


class Work(ABC, Generic[Task, Result]):
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
    def done(self, task: Task, read: Any) -> Result:
        """The task's result."""


class Runner(Protocol):
    """Where work is done."""

    def begin(self, work: Work[Any, Any]) -> dict[str, Any]:
        """Refuse what can never work, and say what decides the results there: its identity."""

    def results(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """The result of every task, once, as soon as it is there."""


class Here:
    """In this process: one task after the other, each read while the one before it is worked on."""

    def begin(self, work: Work[Any, Any]) -> dict[str, Any]:
        """As the work itself says."""
        work.check()
        return work.identity

    def results(self, work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """In order."""
        work.expect(tasks)
        with ThreadPoolExecutor(1) as reader:
            coming = deque((task, reader.submit(work.read, task)) for task in tasks[:2])
            for following in [*tasks[2:], None, None][: len(tasks)]:
                task, read = coming.popleft()
                yield task, work.done(task, read.result())
                if following is not None:
                    coming.append((following, reader.submit(work.read, following)))


class InBatches(Work[Batch, Result]):
    """Work on batches of a job's images."""

    skip: bool
    """Leave out images that cannot be read, and say so in their rows."""

    def check(self) -> None:
        """As the job does."""
        self.job.check(skip=self.skip)

    def read(self, task: Batch) -> Loaded:
        """The images."""
        return load_batch(self.job, task.indices, skip=self.skip, left_out=task.left_out)


@dataclass(frozen=True)
class Certification(InBatches[list[Row]]):
    """Batches of images to certify, into rows."""

    job: Job
    skip: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The job's."""
        return self.job.identity

    def expect(self, tasks: Sequence[Batch]) -> None:
        """The defense is told how many images."""
        self.job.built.expect(sum(len(task.indices) for task in tasks))

    def done(self, task: Batch, read: Loaded) -> list[Row]:
        """Their rows."""
        return rows_of(self.job, read)


def to_do(run: Run) -> list[Batch]:
    """The batches of a run that are not done."""
    return [Batch(number, run.indices(number)) for number in run.missing()]
