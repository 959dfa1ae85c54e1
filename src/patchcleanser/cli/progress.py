"""What a command says while it works, on standard error: notes, a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from patchcleanser.evaluation import AttackJob, Job
    from patchcleanser.evaluation.workloads import Progress as RunProgress

LOGGER = logging.getLogger("patchcleanser")
"""Its warnings and notes are shown as `note: …`; a command sets its level by --quiet and --json."""

SECONDS_BETWEEN_LINES = 10.0
"""Between two lines of progress where there is no terminal."""

SHOWN = ("robust", "certified", "detection_certified")
"""The share on the progress line: the first of these that a run has."""


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


class ClockColumn(ProgressColumn):
    """The remaining time, by the steps of this session; before the first and after the last the elapsed time."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        ends, elapsed = task.fields.get("ends"), clock(task.elapsed or 0)
        if task.finished or ends is None:
            return Text(f"in {elapsed}" if task.finished else f"{elapsed} so far")
        return Text(f"{clock(ends - time.monotonic())} left")


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(3725), clock(65), clock(-1)
    ('1:02:05', '1:05', '0:00')
    """
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextmanager
def progress(
    title: str, total: int | None = None, done: int = 0, *, console: Console | None = None
) -> Iterator[Callable[[float, int, str], None]]:
    """A function of the steps done, their total and a status text, which shows them. Standard output stays clean."""
    console = console or Console(stderr=True, highlight=False)
    started = time.monotonic()

    def ends(steps: float, of: int) -> float | None:
        now = time.monotonic()
        return now + (of - steps) * (now - started) / (steps - done) if done < steps < of else None

    if not shown():
        yield lambda steps, of, status: None
    elif console.is_terminal:
        console.print(title, soft_wrap=True)
        status_column = TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        count = TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True))
        clock_column = ClockColumn(Column(no_wrap=True))
        with Progress(BarColumn(None), count, status_column, clock_column, console=console, expand=True) as bar:
            count_before = "" if total is None else f"{done}/{total}"
            task = bar.add_task(title, total=total, completed=done, count=count_before, status="")
            yield lambda steps, of, status: bar.update(
                task, completed=steps, total=of, count=f"{steps:g}/{of}", status=status, ends=ends(steps, of)
            )
    else:

        def show(steps: float, of: int, status: str) -> None:
            end = ends(steps, of)
            left = "" if end is None else f"  {clock(end - time.monotonic())} left"
            console.print(f"{title} {steps:g}/{of}  {status}{left}", soft_wrap=True)

        yield show


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something without steps is being done."""
    console = Console(stderr=True, highlight=False)
    if shown() and console.is_terminal:
        with console.status(text):
            yield
    else:
        yield


@contextmanager
def run_progress(job: Job | AttackJob, folder: Path) -> Iterator[Callable[[RunProgress], None]]:
    """The `on_progress` of `evaluate`: shows how far a run is, what share is certified so far, and the rate."""
    done, total = resumed(job, folder), job.identity["images"]
    if done and shown():
        print(f"{folder}: {done} of {total} images are already done", file=sys.stderr)
    started = last = time.monotonic()
    with progress(title_of(job), total, done) as show:

        def on_progress(state: RunProgress) -> None:
            nonlocal last
            now = time.monotonic()
            if not sys.stderr.isatty() and now - last < SECONDS_BETWEEN_LINES and state.done < state.total:
                return
            last = now
            shares = state.summary.shares
            parts = [f"{name.replace('_', ' ')} {shares[name].percent:.1f}%" for name in SHOWN if name in shares][:1]
            parts += [f"{state.summary.skipped} skipped"] if state.summary.skipped else []
            show(state.done, state.total, "  ".join([*parts, f"{state.here / max(now - started, 1e-9):.2f} images/s"]))

        yield on_progress


def title_of(job: Job | AttackJob) -> str:
    """Threat, masks and defense, or attack."""
    from patchcleanser.evaluation import AttackJob

    if isinstance(job, AttackJob):
        return f"{job.attack}, {job.job.threat}"
    masks = f"{grid_name(job)} masks, " if job.has_masks else ""
    return f"{job.threat}, {masks}{job.defense}"


def grid_name(job: Job) -> str:
    """6x6: the masks or strides of a job per axis."""
    return "x".join(map(str, job.identity["masks"] or job.identity["stride"]))


def resumed(job: Job | AttackJob, folder: Path) -> int:
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
