"""One job on this machine: batch after batch, each kept as soon as it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.core.metrics import COLUMNS, Summary, summary
from patchcleanser.core.records import Run
from patchcleanser.evaluation.gallery import keep_gallery
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import Loaded, load_batch, rows_of


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
    job.check(skip=skip)
    # Larger batches fill a GPU; on a CPU a stop should not cost more than a few seconds.
    size = batch or (256 if job.classifier.device.type == "cuda" else 32)
    run = Run.begin(folder, job.identity, images=len(job.dataset), batch=size, about=about or {})
    with run.locked():
        missing = run.missing()
        state = summary(run.read(COLUMNS))
        here = 0
        for number, loaded in _ahead(missing, lambda n: load_batch(job, run.indices(n), skip=skip)):
            run.write(number, rows_of(job, loaded))
            state += summary(run.read_batch(number, COLUMNS))
            here += len(loaded.rows)
            if watch is not None:
                watch(Progress(state.images + state.skipped, run.images, here, state))
        keep_gallery(run, job)
    return run


def _ahead(numbers: Sequence[int], load: Callable[[int], Loaded]) -> Iterator[tuple[int, Loaded]]:
    """Each batch, read while the one before it is worked on."""
    with ThreadPoolExecutor(1) as reader:
        coming = deque((number, reader.submit(load, number)) for number in numbers[:2])
        for following in [*numbers[2:], None, None][: len(numbers)]:
            number, loaded = coming.popleft()
            yield number, loaded.result()
            if following is not None:
                coming.append((following, reader.submit(load, following)))
