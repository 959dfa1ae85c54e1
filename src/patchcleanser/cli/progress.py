"""Progress on standard error: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from patchcleanser.evaluation import AttackJob, Job
    from patchcleanser.evaluation.workloads import Progress as RunProgress

SECONDS_BETWEEN_LINES = 10.0
"""Between two lines of progress where there is no terminal."""


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[float, int, str], None]]:
    """A function of the steps done, their total and a status text, which shows them. Standard output stays clean."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda done, total, status: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total, status: bar.update(
                task, completed=done, total=total, description=f"{title}  {status}"
            )
    else:
        yield lambda done, total, status: console.print(f"{title} {done}/{total}  {status}", soft_wrap=True)


@contextmanager
def run_progress(job: Job | AttackJob, folder: Path, *, quiet: bool = False) -> Iterator[Callable[[RunProgress], None]]:
    """The `on_progress` of `evaluate`: shows accuracies, rate and remaining time, and what was done before."""
    if not quiet:
        _show_resumed(job, folder)
    started = shown = time.monotonic()
    with progress(_title(job), quiet=quiet) as show:

        def on_progress(state: RunProgress) -> None:
            nonlocal shown
            now = time.monotonic()
            if not sys.stderr.isatty() and now - shown < SECONDS_BETWEEN_LINES and state.done < state.total:
                return
            shown = now
            rate = state.here / max(now - started, 1e-9)
            left = time.strftime("%H:%M:%S", time.gmtime((state.total - state.done) / max(rate, 1e-9)))
            shares = [f"{name.replace('_', ' ')} {s.percent:.1f}%" for name, s in state.summary.shares.items()]
            skipped = [f"skipped {state.summary.skipped}"] if state.summary.skipped else []
            show(state.done, state.total, "  ".join([*shares, *skipped, f"{rate:.2f} images/s", f"{left} left"]))

        yield on_progress


def _title(job: Job | AttackJob) -> str:
    from patchcleanser.evaluation import AttackJob

    if isinstance(job, AttackJob):
        return f"{job.attack}, {job.job.threat}"
    masks = f"{grid_name(job)} masks, " if job.has_masks else ""
    return f"{job.threat}, {masks}{job.defense}"


def grid_name(job: Job) -> str:
    """6x6: the masks or strides of a job per axis."""
    return "x".join(map(str, job.identity["masks"] or job.identity["stride"]))


def _show_resumed(job: Job | AttackJob, folder: Path) -> None:
    """Say how much of a run is already done. If the folder holds another job's run, `evaluate` will refuse it."""
    from patchcleanser.records.provenance import MANIFEST
    from patchcleanser.records.run import Run

    if not (folder / MANIFEST).is_file():
        return
    run = Run.open(folder)
    ignored = {"device": "", "precision": ""}  # those of Ray's workers may differ from this machine's
    if {**run.job, **ignored} == {**job.identity, **ignored}:
        done = run.images - sum(len(run.indices(batch)) for batch in run.missing())
        print(f"{folder}: {done} of {run.images} images are already done", file=sys.stderr)
