"""How long one image takes, undefended and defended, one at a time as a service would ask."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from patchcleanser.core.results import Verdict
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import RecordError
from patchcleanser.evaluation.jobs import Job
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.provenance import key_of

FILE = "times.json"
WALL = "wall clock"
WARM = 2
"""Images before the clock starts: the first calls choose kernels and fill caches."""
TIMED = ("double-masking", "challenger-masking")


@dataclass(frozen=True)
class Times:
    """Mean milliseconds an image, with batch size one, and what was asked of the classifier."""

    images: int
    milliseconds: dict[str, float]
    """By defense; "undefended" is the classifier alone."""
    classifications: dict[str, float]
    metadata: dict[str, Any]
    """Circumstances, with the clock: processor time of one thread, which other people's work does not lengthen, or the
    wall's, with how many processes wanted the machine's cores."""


def time_images(job: Job, folder: str | Path, *, metadata: dict[str, Any] | None = None) -> Times:
    """Time every image of a job, and keep it in a folder; times that are there for the same job are read."""
    path = Path(folder) / FILE
    key = key_of(job.identity)
    if path.is_file():
        return read_times(path, key)
    images = [job.dataset.image(index) for index in range(len(job.dataset))]
    clock = _clock_for(job.classifier.device)
    found: dict[str, float] = {"undefended": _timed(lambda image: _plain(job, image), images, clock)}
    spent: dict[str, float] = {"undefended": 1.0}
    for name in TIMED:
        defense = DEFENSES[name].load()(job.classifier, job.threat, masks=job.masks, precision=job.precision)
        counts: list[int] = []

        def ask(image: Tensor, defense: Any = defense, counts: list[int] = counts) -> None:
            (verdict,) = defense.predict([image])
            counts.append(verdict.classifications if isinstance(verdict, Verdict) else 0)

        found[name] = _timed(ask, images, clock)
        spent[name] = mean(counts[-len(images) :])
    times = Times(len(images), found, spent, {**(metadata or {}), **_circumstances(clock)})
    with whole_file(path) as part:
        facts = asdict(times)
        facts["about"] = facts.pop("metadata")
        part.write_text(json.dumps({"key": key, **facts}, indent=1) + "\n", encoding="utf-8")
    return times


def read_times(path: Path, key: str | None = None) -> Times:
    """The times in a file; of this job only, if its key is given."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("key") != key and key is not None:
            raise RecordError(f"{path} holds the times of another job; use another --out")
        return Times(metadata=found.pop("about"), **found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged ({error}); delete it and run again") from error


def _plain(job: Job, image: Tensor) -> None:
    with torch.inference_mode():
        job.classifier.logits(job.classifier.prepare(image[None].to(job.classifier.device)))


@dataclass(frozen=True)
class Clock:
    """What is read, and what must be waited for before."""

    words: str
    read: Callable[[], float]
    wait: Callable[[], None]


def _clock_for(device: torch.device) -> Clock:
    """One thread on a CPU is timed by what it used of the processor; everything else by the wall clock."""
    if device.type == "cuda":
        return Clock(WALL, time.perf_counter, torch.cuda.synchronize)
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return Clock("processor time of one thread", time.process_time, lambda: None)
    return Clock(WALL, time.perf_counter, lambda: None)


def _circumstances(clock: Clock) -> dict[str, Any]:
    busy = {"load": round(os.getloadavg()[0], 1)} if clock.words == WALL and hasattr(os, "getloadavg") else {}
    return {"clock": clock.words, **busy}


def _timed(ask: Callable[[Tensor], None], images: Sequence[Tensor], clock: Clock) -> float:
    """Mean milliseconds of one call, after a few that do not count."""
    for image in images[:WARM]:
        ask(image)
    clock.wait()
    started = clock.read()
    for image in images:
        ask(image)
    clock.wait()
    return 1000 * (clock.read() - started) / max(1, len(images))
