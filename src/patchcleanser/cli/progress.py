"""What a command says while it works, on standard error: notes, a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from patchcleanser.progress import Show, progress_bar

if TYPE_CHECKING:
    from patchcleanser.evaluation.dataset_jobs import RunJob

LOGGER = logging.getLogger("patchcleanser")
"""Its warnings and notes are shown as `note: …`; a command sets its level by --quiet and --json."""


class NoteHandler(logging.Handler):
    """Prints records as notes to the standard error of the moment: a live bar puts its own in place of it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)


@contextmanager
def notes(level: int) -> Iterator[None]:
    """Show what the package logs from this level on; progress and costs are shown as notes (INFO) are."""
    handler, before = NoteHandler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


def shown() -> bool:
    """Whether progress is shown."""
    return LOGGER.isEnabledFor(logging.INFO)


def blank() -> str:
    """An empty line between progress and results, where progress is shown."""
    return "\n" if shown() else ""


def progress(title: str) -> AbstractContextManager[Show]:
    """A function of the steps done, their total and a status text, which shows them. Standard output stays clean."""
    return progress_bar(title, shown())


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something without steps is being done."""
    console = Console(stderr=True, highlight=False)
    if shown() and console.is_terminal:
        with console.status(text):
            yield
    else:
        yield


def resumed(job: RunJob, folder: Path) -> int:
    """How many images of this job the folder holds. `evaluate` refuses a folder of another job."""
    from patchcleanser.records.provenance import MANIFEST
    from patchcleanser.records.run import Run

    if not (folder / MANIFEST).is_file():
        return 0
    run = Run.open(folder)
    ignored = {"device": "", "precision": ""}  # those of Ray's workers may differ from this machine's
    if {**run.job, **ignored} != {**job.identity, **ignored}:
        return 0
    return run.images - sum(len(run.indices(batch)) for batch in run.missing())
