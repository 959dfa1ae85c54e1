"""One job: its batches, done here or elsewhere, each kept by this process as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.core.metrics import COLUMNS, Summary, summary
from patchcleanser.core.records import Run
from patchcleanser.evaluation.gallery import keep_gallery
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.work import Certification, Here, Runner, to_do


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
    runner: Runner | None = None,
) -> Run:
    """Certify every image of a job, and keep the rows in a folder; a run that stopped goes on where it was.

    `skip` leaves out images that cannot be read, and says so in their rows. `about` is kept in the
    manifest but decides nothing. `runner` is where the work is done: here, if nothing is said, or
    RayRunner(...); a run may be begun by one and finished by the other. This process alone writes.
    """
    runner = runner or Here()
    work = Certification(job, skip)
    identity = runner.begin(work)
    # Larger batches fill a GPU; on a CPU a stop should not cost more than a few seconds.
    size = batch or (256 if identity["device"] == "cuda" else 32)
    run = Run.begin(folder, identity, images=len(job.dataset), batch=size, about=about or {})
    with run.locked():
        state = summary(run.read(COLUMNS))
        here = 0
        for done, rows in runner.results(work, to_do(run)):
            run.write(done.number, rows)
            state += summary(run.read_batch(done.number, COLUMNS))
            here += len(rows)
            if watch is not None:
                watch(Progress(state.images + state.skipped, run.images, here, state))
        keep_gallery(run, job)
    return run
