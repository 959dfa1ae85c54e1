"""CertifyTask: what certify does differently for each kind of labels. It works on all of them in one way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from patchcleanser.cli.options import RunnerOptions, RunOptions
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation.dataset_jobs import DatasetJob
    from patchcleanser.records.metrics import Summary
    from patchcleanser.records.run import Run


@dataclass(frozen=True)
class CertifyTask(ABC):
    """The options of certify, read for one kind of labels. To add a task, add a subclass to TASKS (cli/certify.py)."""

    options: RunOptions
    cluster: RunnerOptions
    texts: Sequence[str]
    """What --option says."""
    table: bool
    confirm: str
    lines: int

    name: ClassVar[str]
    refused: ClassVar[Sequence[str]] = ()
    """Options that mean nothing here, without dashes."""
    timed: ClassVar[bool] = True
    """Whether the cost is said before the work."""

    @abstractmethod
    def jobs(self) -> Sequence[DatasetJob]:
        """A job for each combination of what a comma list holds."""

    def job_name(self, job: Any) -> str:
        """What tells a job of these from the others, for the name of its folder."""
        return str(job.threat.shape)

    @staticmethod
    @abstractmethod
    def described(run: Run, result: Summary) -> Iterator[str]:
        """A headline, and then a line for each share."""

    def refuse(self, flags: Mapping[str, bool]) -> None:
        """InputError for options that mean nothing for this task; `flags` are given or not."""
        refuse(self.name, self.options, self.refused, flags)


def refuse(task: str, options: RunOptions, refused: Sequence[str], flags: Mapping[str, bool]) -> None:
    """InputError if options of these names are given, or one of the flags of these names."""
    plain, given = RunOptions(), []
    for name in refused:
        if flags.get(name, hasattr(plain, name) and getattr(options, name) != getattr(plain, name)):
            given.append(f"--{name}")
    if given:
        these = "these" if len(given) > 1 else "it"
        raise InputError(f"--task {task} does not take {', '.join(given)}; leave {these} out")
