"""A progress bar on standard error: live on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

T = TypeVar("T")
Show = Callable[[float, "int | None", str], None]
"""Shows the steps done, their total if it can be counted, and a status text."""

SECONDS_BETWEEN_LINES = 10.0
"""Between two plain lines."""


class ClockColumn(ProgressColumn):
    """The remaining time: by an estimate at first, then by the steps of this session. Otherwise the elapsed time."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        ends, elapsed = task.fields["ends"], clock(task.elapsed or 0)
        if task.finished:
            return Text(f"in {elapsed}")
        if ends is None or (task.completed == task.fields["done"] and ends < time.monotonic()):
            return Text(f"{elapsed} so far")  # the estimate was too short
        return Text(f"{clock(ends - time.monotonic())} left")


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(3725), clock(65), clock(-1)
    ('1:02:05', '1:05', '0:00')
    """
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextmanager
def progress_bar(
    title: str,
    progress: bool | None = None,
    *,
    total: int | None = None,
    done: int = 0,
    seconds: float | None = None,
    console: Console | None = None,
) -> Iterator[Show]:
    """A function that shows how far something is. By default (None) it does so on a terminal and in a notebook only.

    `done` of the `total` steps were done before; if all were, nothing is shown. `seconds` estimates the time of the
    others, until the first of them is done.
    """
    console = console or Console(stderr=True, highlight=False)
    live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    started = last = time.monotonic()

    def ends(steps: float, of: int | None) -> float | None:
        now = time.monotonic()
        return now + (of - steps) * (now - started) / (steps - done) if of is not None and steps > done else None

    def print_line(steps: float, of: int | None, status: str) -> None:
        nonlocal last
        now, end = time.monotonic(), ends(steps, of)
        if now - last >= SECONDS_BETWEEN_LINES or steps == of:
            last = now
            left = "" if end is None or steps == of else f"  {clock(end - now)} left"
            console.print(f"{title} {_count(steps, of)}  {status}{left}", soft_wrap=True)

    if progress is False or done == total or (progress is None and not live and not console.is_jupyter):
        yield lambda steps, of, status: None
    elif live:
        console.print(title, soft_wrap=True)
        columns = (TextColumn(f"{{task.fields[{name}]}}", table_column=_column()) for name in ("count", "status"))
        with Progress(BarColumn(None), *columns, ClockColumn(_column()), console=console, expand=True) as bar:
            fields: dict[str, Any] = {"count": _count(done, total), "status": "", "done": done}
            fields["ends"] = started + seconds if seconds else None
            task = bar.add_task(title, total=total, completed=done, **fields)
            yield lambda steps, of, status: bar.update(
                task, completed=steps, total=of, count=_count(steps, of), status=status, ends=ends(steps, of)
            )
    else:
        yield print_line


def tracked(results: Iterable[T], title: str, progress: bool | None, *, total: int | None) -> Iterator[T]:
    """The same results, with a progress bar that counts them."""
    with progress_bar(title, progress, total=total) as show:
        for number, result in enumerate(results, 1):
            yield result
            show(number, total, "")


def _column() -> Column:
    return Column(no_wrap=True, overflow="ellipsis")


def _count(steps: float, of: int | None) -> str:
    return f"{steps:g}" if of is None else f"{steps:g}/{of}"
