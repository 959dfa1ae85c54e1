"""What a Ray cluster costs and gives, measured on this machine, and 64 workers simulated with what was measured.

    python benchmarks/scale.py            # a few minutes; rows go into results/scale.json

Two workers of one thread are compared with one process of one thread (the same arithmetic, bit for bit) and with one
process of two threads (the same cores). Workers are started and warm before the clock runs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchcleanser import CallableClassifier, Job, Run, Threat, evaluate, load_classifier, load_dataset
from patchcleanser.core.records import TIMES
from patchcleanser.data import ArrayDataset, chosen
from patchcleanser.running.ray import RayRunner, connect
from patchcleanser.training.cards import versions

IMAGES = 24
BATCH = 2


def heavy() -> Job:
    """Real images, the usual 36 masks, every label."""
    images = chosen(load_dataset("sample"), IMAGES)
    return Job(load_classifier("zoo:tiny", device="cpu"), images, Threat.square(5), table=True)


def light(number: int) -> Job:
    """Nearly no arithmetic, so that what is left is overhead."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)
    weights = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    classifier = CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint="linear")
    images = ArrayDataset("noise", pixels, draw.integers(0, 3, number), ("a", "b", "c"))
    return Job(classifier, images, Threat.square(2), masks=2)


def timed(job: Job, batch: int, runner: RayRunner | None, threads: int = 1) -> tuple[float, Run]:
    torch.set_num_threads(threads)
    job.identity  # noqa: B018  # hashed before the clock runs
    if runner is not None:
        folder = tempfile.mkdtemp()
        small = Job(job.classifier, chosen(job.dataset, 2 * batch), job.threat, masks=job.masks, table=job.table)
        evaluate(small, folder, batch=batch, runner=runner)
    started = time.monotonic()
    run = evaluate(job, tempfile.mkdtemp(), batch=batch, runner=runner)
    return time.monotonic() - started, run


def plain(run: Run) -> Any:
    return run.read().drop_columns(list(TIMES))


def speed(repeats: int) -> dict[str, Any]:
    """Seconds of each way to do the same work, and what follows."""
    job = heavy()
    ways: dict[str, Callable[[], tuple[float, Run]]] = {}
    with RayRunner("local", workers=2) as two:
        timed(job, BATCH, two)  # warm
        ways["one process, 1 thread"] = lambda: timed(job, BATCH, None)
        ways["one process, 2 threads"] = lambda: timed(job, BATCH, None, 2)
        ways["ray, 2 workers"] = lambda: timed(job, BATCH, two)
        found: dict[str, list[float]] = {name: [] for name in ways}
        runs: dict[str, Run] = {}
        for _ in range(repeats):  # in turn, so that a busy minute harms all of them
            for name, way in ways.items():
                seconds, runs[name] = way()
                found[name].append(round(seconds, 3))
    with RayRunner("local", workers=1) as one:
        timed(job, BATCH, one)
        found["ray, 1 worker"] = [round(timed(job, BATCH, one)[0], 3) for _ in range(repeats)]
    middle = {name: statistics.median(times) for name, times in found.items()}
    return {
        "what": f"{IMAGES} images, zoo:tiny, 6×6 masks, every label, batches of {BATCH}",
        "seconds": found,
        "rows_equal": plain(runs["one process, 1 thread"]).equals(plain(runs["ray, 2 workers"])),
        "efficiency_1_to_2_workers": round(middle["ray, 1 worker"] / (2 * middle["ray, 2 workers"]), 3),
        "efficiency_against_one_thread": round(middle["one process, 1 thread"] / (2 * middle["ray, 2 workers"]), 3),
        "speedup_over_two_threads": round(middle["one process, 2 threads"] / middle["ray, 2 workers"], 3),
    }


def overhead(repeats: int) -> dict[str, Any]:
    """What one batch, and one image, costs beyond its arithmetic; and how long a worker takes to come up."""
    number, batch = 3200, 32
    starts, here, there = [], [], []
    for _ in range(repeats):
        with RayRunner("local", workers=1) as runner:
            connect("local")
            started = time.monotonic()
            evaluate(light(batch), tempfile.mkdtemp(), batch=batch, runner=runner)
            starts.append(round(time.monotonic() - started, 2))
            there.append(timed(light(number), batch, runner)[0])
        here.append(timed(light(number), batch, None)[0])
    extra = statistics.median(there) - statistics.median(here)
    return {
        "what": f"{number} images of 8×8 px, a linear classifier, batches of {batch}",
        "seconds_here": [round(s, 3) for s in here],
        "seconds_ray_1_worker": [round(s, 3) for s in there],
        "ms_a_batch": round(1000 * extra / (number / batch), 2),
        "ms_an_image": round(1000 * extra / number, 3),
        "worker_start_seconds": starts,
    }


def simulate(
    batches: int,
    seconds: list[float],
    *,
    workers: int,
    handing: float,
    start: float,
    slow: dict[int, float] | None = None,
    deaths: float = 0.0,
    twice: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """The pool's rules with measured times: who is free takes the next batch; lost ones come back; late ones twice.

    `handing` is the driver's time for one batch, one after the other; `deaths` how often a worker dies in a second.
    """
    draw = random.Random(seed)
    usual = statistics.median(seconds)
    free = [(start, worker) for worker in range(workers)]
    heapq.heapify(free)
    ends: dict[int, float] = {}
    begun: dict[int, float] = {}
    queue, driver, lost, busy = list(range(batches))[::-1], 0.0, 0, 0.0
    while queue or free:
        now, worker = heapq.heappop(free)
        if queue:
            batch = queue.pop()
        else:  # nothing left to begin: look for one that is late
            late = [b for b, end in ends.items() if end > now and end - begun[b] > 1 + 4 * usual]
            if not twice or not late:
                continue
            batch = max(late, key=lambda b: ends[b])
            now = max(now, begun[batch] + 1 + 4 * usual)
        driver = max(driver, now) + handing
        took = draw.choice(seconds) * (slow or {}).get(worker, 1.0)
        if draw.random() < 1 - 2.718281828 ** (-deaths * took):  # dies somewhere in the middle
            half = took * draw.random()
            lost, busy = lost + 1, busy + half
            queue.append(batch) if batch not in ends else None
            heapq.heappush(free, (driver + half + start, worker))
            continue
        busy += took
        end = driver + took
        begun.setdefault(batch, driver)
        ends[batch] = min(end, ends.get(batch, end))
        heapq.heappush(free, (end, worker))
    whole = max(ends.values())
    useful = batches * statistics.fmean(seconds)
    return {
        "seconds": round(whole, 1),
        "efficiency": round(useful / (workers * whole), 3),
        "batches_lost": lost,
        "driver_busy": round(batches * handing / whole, 4),
    }


def scenarios(batch_seconds: list[float], handing: float, start: float) -> list[dict[str, Any]]:
    """64 workers on 50,000 images, whose batches of 32 take as long as measured here on one core, image by image."""
    unit = [s * 32 / BATCH for s in batch_seconds]
    mean = statistics.fmean(unit)
    common: dict[str, Any] = {"workers": 64, "handing": handing, "start": start}
    cases: list[tuple[str, int, list[float], dict[str, Any]]] = [
        ("batches of 32", 1563, unit, {}),
        ("batches of 256", 196, [8 * s for s in unit], {}),
        ("one worker four times slower, late batches twice", 1563, unit, {"slow": {0: 4.0}}),
        ("one worker a hundred times slower, late batches twice", 1563, unit, {"slow": {0: 100.0}}),
        ("the same, not twice", 1563, unit, {"slow": {0: 100.0}, "twice": False}),
        ("each worker dies once in 10 batches", 1563, unit, {"deaths": 1 / (10 * mean)}),
        ("each worker dies once in 100 batches", 1563, unit, {"deaths": 1 / (100 * mean)}),
    ]
    rows = [
        {"case": name, "batches": number, **simulate(number, times, **common, **more)}
        for name, number, times, more in cases
    ]
    # A driver that is killed costs what was in flight, half done on average and two to a worker, and a new start.
    again = start + mean * (0.5 + 0.0)
    rows.append({"case": "driver killed once and started again at once", "extra_seconds": round(again, 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/scale.json"))
    given = parser.parse_args()
    before = os.getloadavg()
    measured, costs = speed(given.repeats), overhead(given.repeats)
    _, run = timed(heavy(), BATCH, None)
    each = run.read(["seconds"])["seconds"].to_pylist()
    batches = [sum(each[at : at + BATCH]) for at in range(0, len(each), BATCH)]
    handing, start = max(0.0, costs["ms_a_batch"]) / 1000, statistics.median(costs["worker_start_seconds"])
    told = {
        "command": " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
        "versions": {**versions(), "ray": __import__("ray").__version__},
        "cores": os.cpu_count(),
        "load_before": [round(x, 2) for x in before],
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "speed": measured,
        "overhead": costs,
        "batch_seconds_one_core": [round(s, 3) for s in batches],
        "simulated_64_workers": scenarios(batches, handing, start),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
