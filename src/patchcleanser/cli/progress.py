"""What a command says while it works, on standard error: notes and progress."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from patchcleanser.progress import Show, progress_bar

LOGGER = logging.getLogger("patchcleanser")


class NoteHandler(logging.Handler):
    """Prints records as notes to the standard error of the moment: a live bar puts its own in place of it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)


@contextmanager
def notes(level: int) -> Iterator[None]:
    """Show what the package logs from this level on."""
    handler, before = NoteHandler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


def progress(title: str, *, quiet: bool = False) -> AbstractContextManager[Show]:
    """A function of the steps done, their total and a status text, which shows them. Standard output stays clean."""
    return progress_bar(title, not quiet)
