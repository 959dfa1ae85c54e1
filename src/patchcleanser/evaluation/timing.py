"""Latency of one image, undefended and defended, at batch size 1."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
WALL_CLOCK = "wall clock"
WARM_UP_IMAGES = 2
"""Images before the clock starts: the first calls choose kernels and fill caches."""
DEFENSES_TIMED = ("double-masking", "challenger-masking")


@dataclass(frozen=True)
class Latencies:
    """Mean latency per image at batch size 1, and how often the classifier was called."""

    images: int
    milliseconds: dict[str, float]
    """By defense; "undefended" is the classifier alone."""
    classifications: dict[str, float]
    metadata: dict[str, Any]
    """Which clock: processor time of one thread, which other processes do not lengthen, or the wall clock, with the
    machine's load average."""


def time_images(job: Job, folder: str | Path, *, metadata: dict[str, Any] | None = None) -> Latencies:
    """Time every image of a job, and write the result into a folder. A result of the same job is read instead."""
    path = Path(folder) / FILE
    key = key_of(job.identity)
    if path.is_file():
        return read_times(path, key)
    images = [job.dataset.image(index) for index in range(len(job.dataset))]
    clock_name, clock = _clock_for(job.classifier.device)
    milliseconds = {"undefended": _mean_milliseconds(lambda image: _classify(job, image), images, clock)}
    classifications = {"undefended": 1.0}
    for name in DEFENSES_TIMED:
        defense = DEFENSES[name].load()(job.classifier, job.threat, masks=job.masks, precision=job.precision)
        counts: list[int] = []

        def predict(image: Tensor, defense: Any = defense, counts: list[int] = counts) -> None:
            (verdict,) = defense.predict([image])
            counts.append(verdict.classifications if isinstance(verdict, Verdict) else 0)

        milliseconds[name] = _mean_milliseconds(predict, images, clock)
        classifications[name] = mean(counts[-len(images) :])
    load = {"load": round(os.getloadavg()[0], 1)} if clock_name == WALL_CLOCK and hasattr(os, "getloadavg") else {}
    about = {**(metadata or {}), "clock": clock_name, **load}
    with whole_file(path) as part:
        content = {"key": key, "images": len(images), "milliseconds": milliseconds}
        content |= {"classifications": classifications, "about": about}
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return Latencies(len(images), milliseconds, classifications, about)


def read_times(path: Path, key: str | None = None) -> Latencies:
    """The latencies in a file; RecordError if a key is given and the file is of another job."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("key") != key and key is not None:
            raise RecordError(f"{path} holds the times of another job; use another folder (--out)")
        return Latencies(metadata=content.pop("about"), **content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged ({error}); delete it and run again") from error


def _classify(job: Job, image: Tensor) -> None:
    with torch.inference_mode():
        job.classifier.logits(job.classifier.prepare(image[None].to(job.classifier.device)))


def _clock_for(device: torch.device) -> tuple[str, Callable[[], float]]:
    """Name and function of a clock in seconds: processor time for one thread on a CPU, else the wall clock."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return "processor time of one thread", time.process_time

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return WALL_CLOCK, read


def _mean_milliseconds(call: Callable[[Tensor], None], images: Sequence[Tensor], clock: Callable[[], float]) -> float:
    """Mean milliseconds of one call, after a few calls that do not count."""
    for image in images[:WARM_UP_IMAGES]:
        call(image)
    started = clock()
    for image in images:
        call(image)
    return 1000 * (clock() - started) / max(1, len(images))
