"""One job: its batches, done here or elsewhere, each kept by this process as soon as it is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchcleanser.core.records import Run
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.work import Certification, Runner, Watch, carry_out


def evaluate(
    job: Job,
    folder: str | Path,
    *,
    batch: int | None = None,
    skip: bool = False,
    about: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    runner: Runner | None = None,
) -> Run:
    """Certify every image of a job, and keep the rows in a folder; a run that stopped goes on where it was.

    `skip` leaves out images that cannot be read, and says so in their rows. `about` is kept in the
    manifest but decides nothing. `runner` is where the work is done: here, if nothing is said, or
    RayRunner(...); a run may be begun by one and finished by the other. This process alone writes.
    """
    return carry_out(Certification(job, skip), folder, batch=batch, about=about, watch=watch, runner=runner)
