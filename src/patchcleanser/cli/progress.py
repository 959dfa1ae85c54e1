"""Progress people can read: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Report(Protocol):
    """Tell how far the work is."""

    def __call__(self, done: float, total: int, words: str) -> None:
        """`done` of `total` steps are over; `words` say how it stands."""


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Report]:
    """A reporter on standard error, so that standard output stays clean for results."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda done, total, words: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total, words: bar.update(
                task, completed=done, total=total, description=f"{title}  {words}"
            )
    else:
        yield lambda done, total, words: console.print(f"{title} {done}/{total}  {words}", soft_wrap=True)
