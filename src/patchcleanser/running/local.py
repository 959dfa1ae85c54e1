"""One job on this machine: batch after batch, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.core.metrics import COLUMNS, Summary, summary
from patchcleanser.core.records import Run
from patchcleanser.evaluation.gallery import keep_gallery
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import rows_of


@dataclass(frozen=True)
class Progress:
    """How far a run is: the rows so far, in this and in earlier sessions, and what they show."""

    done: int
    total: int
    here: int
    """Images done in this session."""
    summary: Summary


def evaluate(
    job: Job,
    folder: str | Path,
    *,
    batch: int | None = None,
    skip: bool = False,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Run:
    """Certify every image of a job, and keep the rows in a folder; a run that stopped goes on where it was.

    `skip` leaves out images that cannot be read, and says so in their rows. `about` is kept in the
    manifest but decides nothing.
    """
    # Larger batches fill a GPU; on a CPU a stop should not cost more than a few seconds.
    size = batch or (256 if job.classifier.device.type == "cuda" else 32)
    run = Run.begin(folder, job.identity, images=len(job.dataset), batch=size, about=about or {})
    with run.locked():
        missing = run.missing()
        state = summary(run.read(COLUMNS))
        here = 0
        for number in missing:
            indices = range(number * run.batch, min((number + 1) * run.batch, run.images))
            run.write(number, rows_of(job, indices, skip=skip))
            state += summary(run.read_batch(number, COLUMNS))
            here += len(indices)
            if watch is not None:
                watch(Progress(state.images + state.skipped, run.images, here, state))
        keep_gallery(run, job)
    return run
