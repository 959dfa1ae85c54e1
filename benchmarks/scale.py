"""What a Ray cluster costs and gives, measured on this machine, and 64 workers simulated with what was measured.

    python benchmarks/scale.py            # a few minutes; rows go into results/scale.json

Two workers of one thread are compared with one process of one thread (the same arithmetic, bit for bit) and with one
process of two threads (the same cores). Workers are started and warm before the clock runs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import torch
from pyarrow import parquet

from patchcleanser import CallableClassifier, Job, Run, Threat, evaluate, load_classifier, load_dataset
from patchcleanser.cluster.runner import RayRunner, connect
from patchcleanser.data import ArrayDataset, chosen
from patchcleanser.records.provenance import versions
from patchcleanser.records.run import TIMES

IMAGES = 16
BATCH = 2
SEED = 0


def heavy() -> Job:
    """Real images, the usual 36 masks, every label."""
    images = chosen(load_dataset("sample"), IMAGES)
    return Job(load_classifier("zoo:tiny", device="cpu"), images, Threat.square(5), table=True)


def light(number: int) -> Job:
    """Nearly no arithmetic, so that what is left is overhead."""
    draw = np.random.default_rng(SEED)
    pixels = draw.integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)
    weights = torch.randn(3, 192, generator=torch.Generator().manual_seed(SEED))
    classifier = CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint="linear")
    images = ArrayDataset("noise", pixels, draw.integers(0, 3, number), ("a", "b", "c"))
    return Job(classifier, images, Threat.square(2), masks=2)


class Took(NamedTuple):
    """Seconds of one run: of the clock, of this process' CPU time, and of the workers'."""

    clock: float
    here: float
    workers: float
    run: Run


def timed(job: Job, batch: int, runner: RayRunner | None, threads: int = 1) -> Took:
    torch.set_num_threads(threads)
    job.identity  # noqa: B018  # hashed before the clock runs
    if runner is not None:
        small = Job(job.classifier, chosen(job.dataset, 2 * batch), job.threat, masks=job.masks, table=job.table)
        evaluate(small, tempfile.mkdtemp(), batch=batch, runner=runner)
    before, own, started = of_workers(), time.process_time(), time.monotonic()
    run = evaluate(job, tempfile.mkdtemp(), batch=batch, runner=runner)
    return Took(time.monotonic() - started, time.process_time() - own, of_workers() - before, run)


def of_workers() -> float:
    """CPU seconds that our workers have had."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray::Worker" in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
    return total


def plain(run: Run) -> Any:
    return run.read().drop_columns(list(TIMES))


def speed(repeats: int) -> dict[str, Any]:
    """Seconds of each way to do the same work, and what follows."""
    job = heavy()
    times: dict[str, list[Took]] = {}
    with RayRunner("local", workers=2) as two:
        timed(job, BATCH, two)  # warm
        ways: dict[str, tuple[RayRunner | None, int]] = {
            "one process, 1 thread": (None, 1),
            "one process, 2 threads": (None, 2),
            "ray, 2 workers": (two, 1),
        }
        for _ in range(repeats):  # in turn, so that a busy minute harms all of them
            for name, (runner, threads) in ways.items():
                times.setdefault(name, []).append(timed(job, BATCH, runner, threads))
    with RayRunner("local", workers=1) as single:
        timed(job, BATCH, single)
        times["ray, 1 worker"] = [timed(job, BATCH, single) for _ in range(repeats)]
    clock = {name: statistics.median(t.clock for t in took) for name, took in times.items()}
    cpu = {name: statistics.median(t.here + t.workers for t in took) for name, took in times.items()}
    one_thread, two_workers = times["one process, 1 thread"][0].run, times["ray, 2 workers"][0].run
    return {
        "what": f"{IMAGES} images, zoo:tiny, 6×6 masks, every label, batches of {BATCH}",
        "seconds": {name: [round(t.clock, 2) for t in took] for name, took in times.items()},
        "cpu_seconds": {name: [round(t.here + t.workers, 2) for t in took] for name, took in times.items()},
        "rows_equal": plain(one_thread).equals(plain(two_workers)),
        "efficiency_1_to_2_workers": round(clock["ray, 1 worker"] / (2 * clock["ray, 2 workers"]), 3),
        "efficiency_against_one_thread": round(clock["one process, 1 thread"] / (2 * clock["ray, 2 workers"]), 3),
        "speedup_over_two_threads": round(clock["one process, 2 threads"] / clock["ray, 2 workers"], 3),
        "cpu_time_against_one_thread": round(cpu["ray, 2 workers"] / cpu["one process, 1 thread"], 3),
    }


def overhead(repeats: int) -> dict[str, Any]:
    """CPU time of the driver for a batch and an image, which no worker can take over; and a worker's start."""
    number, batch = 3200, 32
    starts, here, there = [], [], []
    for _ in range(repeats):
        with RayRunner("local", workers=1) as runner:
            connect("local")
            started = time.monotonic()
            evaluate(light(batch), tempfile.mkdtemp(), batch=batch, runner=runner)
            starts.append(round(time.monotonic() - started, 2))
            there.append(timed(light(number), batch, runner))
        here.append(timed(light(number), batch, None))
    driver = statistics.median(took.here for took in there)
    both = statistics.median(took.here + took.workers for took in there)
    alone = statistics.median(took.here for took in here)
    return {
        "what": f"{number} images of 8×8 px, a linear classifier, batches of {batch}, 1 worker",
        "cpu_seconds_one_process": [round(took.here, 3) for took in here],
        "cpu_seconds_driver": [round(took.here, 3) for took in there],
        "cpu_seconds_worker": [round(took.workers, 3) for took in there],
        "driver_ms_a_batch": round(1000 * driver / (number / batch), 2),
        "driver_ms_an_image": round(1000 * driver / number, 3),
        "extra_ms_an_image": round(1000 * (both - alone) / number, 3),
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
    seed: int = SEED,
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
        if draw.random() < 1 - math.exp(-deaths * took):  # dies somewhere in the middle
            half = took * draw.random()
            lost, busy = lost + 1, busy + half
            if batch not in ends:
                queue.append(batch)
            heapq.heappush(free, (driver + half + start, worker))
            continue
        busy += took
        end = driver + took
        begun.setdefault(batch, driver)
        ends[batch] = min(end, ends.get(batch, end))
        heapq.heappush(free, (end, worker))
    longest = max(ends.values())
    useful = batches * statistics.fmean(seconds)
    return {
        "seconds": round(longest, 1),
        "efficiency": round(useful / (workers * longest), 3),
        "batches_lost": lost,
        "driver_busy": round(batches * handing / longest, 4),
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
    # A driver that is killed costs what was under way, half done on average, and a new start of all workers.
    rows.append({"case": "driver killed once, started again at once", "extra_seconds": round(start + mean / 2, 1)})
    return rows


def storage(run: Run) -> dict[str, float]:
    """Bytes an image of a shard, with and without the table of two-mask labels."""
    rows, sizes = run.read(), {}
    for name, table in (
        ("with_table", rows),
        (
            "without_table",
            rows.set_column(
                rows.column_names.index("table"),
                rows.schema.field("table"),
                pa.nulls(len(rows), rows.schema.field("table").type),
            ),
        ),
    ):
        path = Path(tempfile.mkdtemp()) / "rows.parquet"
        parquet.write_table(table, path, compression="zstd")
        sizes[name] = round(path.stat().st_size / len(rows), 1)
    return {"images_in_the_shard": len(rows), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/scale.json"))
    given = parser.parse_args()
    # Ray gives workers the lowest priority; on a busy machine that would be no race.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its name is so
    before = os.getloadavg()
    measured, costs = speed(given.repeats), overhead(given.repeats)
    run = timed(heavy(), BATCH, None).run
    each = run.read(["seconds"])["seconds"].to_pylist()
    batches = [sum(each[at : at + BATCH]) for at in range(0, len(each), BATCH)]
    handing, start = costs["driver_ms_a_batch"] / 1000, statistics.median(costs["worker_start_seconds"])
    content = {
        "command": " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
        "versions": {**versions(), "ray": __import__("ray").__version__},
        "seed": SEED,
        "cores": os.cpu_count(),
        "load_before": [round(x, 2) for x in before],
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "speed": measured,
        "overhead": costs,
        "bytes_an_image": storage(run),
        "batch_seconds_one_core": [round(s, 3) for s in batches],
        "simulated_64_workers": scenarios(batches, handing, start),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
