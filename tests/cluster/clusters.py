"""What tests of Ray share: rows without their times, and workers to kill."""

from __future__ import annotations

import contextlib

import psutil
import pyarrow as pa

from patchcleanser.records.run import TIMES, Run

STORE = 80_000_000
"""Bytes of each node's object store: the least that Ray accepts, nearly."""


def rows(run: Run) -> pa.Table:
    return run.read().drop_columns(list(TIMES))


def whole(run: Run, images: int) -> bool:
    """No row lost, none doubled."""
    return run.finished and run.read(["index"])["index"].to_pylist() == list(range(images))


def ray_workers() -> list[psutil.Process]:
    """The processes of our own clusters that hold a classifier."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::Worker" in " ".join(process.cmdline()):
                workers.append(process)
    return workers


def kill_one() -> bool:
    """Whether there was one to kill."""
    for process in ray_workers():
        with contextlib.suppress(psutil.Error):
            process.kill()
            return True
    return False
