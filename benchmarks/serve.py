"""The service under load on loopback: every answer checked against the library's, memory watched.

    python benchmarks/serve.py                    # about four minutes
    python benchmarks/serve.py --seconds 10       # a glance

A server in a process of its own, bound to --cores cores, and clients in this one. One client, then 64, each sending
the next image as soon as it has an answer; half of the images carry a printed patch, so that second rounds happen.
Then a server with a short queue is flooded, and asked again when that is over. Writes results/serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from patchcleanser import DoubleMasking, Threat, Window, load_classifier, load_dataset
from patchcleanser.attacks.universal import PrintedPatch, apply_patch
from patchcleanser.data.codec import as_picture, decode
from patchcleanser.records.provenance import versions

CLIENTS = 64
IMAGES = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/serve.json"))
    options = parser.parse_args()
    contents = images(options.seed)
    torch.set_num_threads(options.cores)
    results: dict[str, Any] = {
        "36 masks": under_load(contents, 6, options.seconds, options.cores),
        "4 masks": under_load(contents, 2, options.seconds // 3, options.cores),
        "short queue": flooded(contents, options.cores),
    }
    settings = {"clients": CLIENTS, "images": IMAGES, "seconds": options.seconds, "cores": options.cores}
    row = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": options.seed,
        "settings": settings,
        "versions": versions() | {name: version(name) for name in ("fastapi", "uvicorn", "httpx")},
        "machine": {"cores": os.cpu_count(), "cpu": cpu(), "system": platform.system(), "shared": True},
        **results,
    }
    options.out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


def under_load(contents: list[bytes], masks: int, seconds: int, cores: int) -> dict[str, Any]:
    """One client, then many; between them, what batching gives the library itself."""
    expected, floor = offline(contents, masks)
    results: dict[str, Any] = {"offline_images_per_cpu_second": floor}
    with server(cores, "--masks", str(masks)) as (address, process):
        load = Load(address, process, contents, expected)
        asyncio.run(load.run(1, seconds / 3))  # kernels for batches of every size are made once
        asyncio.run(load.run(CLIENTS, seconds / 3))
        results["one_client"] = asyncio.run(load.run(1, seconds / 2))
        results["many_clients"] = asyncio.run(load.run(CLIENTS, seconds))
        results["batches"] = batches(address)
    for measure in ("images_per_second", "images_per_cpu_second"):
        results[f"ratio_{measure}"] = round(results["many_clients"][measure] / results["one_client"][measure], 2)
    return results


def flooded(contents: list[bytes], cores: int) -> dict[str, Any]:
    """A short queue, many clients that do not wait as they are told, and one afterwards."""
    expected, _ = offline(contents, 6)
    with server(cores, "--queue", "16") as (address, process):
        load = Load(address, process, contents, expected)
        return {"overload": asyncio.run(load.run(CLIENTS, 15)), "after": asyncio.run(load.run(1, 5))}


def images(seed: int) -> list[bytes]:
    """Sample images; every second one with a printed patch somewhere."""
    sample = load_dataset("sample")
    patch = PrintedPatch.load(str(files("patchcleanser.service") / "page" / "patch.png"))
    draw = np.random.default_rng(seed)
    contents = []
    for number, index in enumerate(draw.choice(len(sample), IMAGES, replace=False)):
        pixels = sample.image(int(index))
        if number % 2:
            top, left = (int(v) for v in draw.integers(0, 28, 2))
            pixels = apply_patch(pixels, patch.pixels, Window(top, left, 5, 5))
        file = BytesIO()
        as_picture(pixels).save(file, format="PNG")
        contents.append(file.getvalue())
    return contents


def offline(contents: list[bytes], masks: int) -> tuple[list[tuple[Any, ...]], dict[str, float]]:
    """What the library says, and how fast, one image at a time and 64 together, on the same number of threads."""
    pixels = [decode(content, "x") for content in contents]
    defense = DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.share(0.02), masks=masks)
    defense.predict(pixels[:2])
    defense.predict(pixels)
    began = time.process_time()
    verdicts = [defense.predict([image])[0] for image in pixels]
    alone = len(pixels) / (time.process_time() - began)
    began = time.process_time()
    together = defense.predict(pixels[:64]) + defense.predict(pixels[64:])
    both = len(pixels) / (time.process_time() - began)
    if together != verdicts:
        raise SystemExit("batching changed an answer")
    facts = [(v.label, v.case.value, list(v.disagreers), v.classifications) for v in verdicts]
    print(Counter(case for _, case, _, _ in facts))
    return facts, {"one_by_one": round(alone, 2), "64_together": round(both, 2)}


@contextmanager
def server(cores: int, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "patchcleanser", "serve", "--port", str(port), "--device", "cpu"]
    command += ["--deadline", "120", *options]  # the machine may be busy with other things
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, range(cores))
    )
    try:
        yield wait_until_ready(f"http://127.0.0.1:{port}", process), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(60)
    if ended != 0:
        raise SystemExit("the server did not end well")


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        try:
            if httpx.get(f"{address}/readyz").status_code == 200:
                return address
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


class Load:
    """Clients that ask as fast as they are answered, and check every answer."""

    def __init__(
        self, address: str, process: psutil.Process, contents: list[bytes], expected: list[tuple[Any, ...]]
    ) -> None:
        self.address, self.process, self.contents, self.expected = address, process, contents, expected

    async def run(self, clients: int, seconds: float) -> dict[str, Any]:
        """So many clients for so long."""
        self.statuses: Counter[int] = Counter()
        self.wrong = 0
        self.times: list[float] = []
        self.retry_after: list[int] = []
        memory: list[float] = []
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.address, timeout=130, limits=limits) as http:
            began, worked = time.monotonic(), self._worked()
            until = began + seconds
            asking = [asyncio.create_task(self._client(http, number, until)) for number in range(clients)]
            while time.monotonic() < until:
                memory.append(self.process.memory_info().rss / 2**20)
                await asyncio.sleep(1)
            await asyncio.gather(*asking)
            spent, worked = time.monotonic() - began, self._worked() - worked
        return self._facts(clients, spent, worked, memory)

    def _worked(self) -> float:
        """CPU seconds of the server: what others do on this machine does not count."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    async def _client(self, http: httpx.AsyncClient, number: int, until: float) -> None:
        at = number
        while time.monotonic() < until:
            at = (at + 7) % len(self.contents)
            began = time.monotonic()
            answer = await http.post("/v1/predict", files={"image": ("x.png", self.contents[at], "image/png")})
            self.times.append(time.monotonic() - began)
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                (prediction,) = answer.json()["predictions"]
                facts = tuple(prediction[name] for name in ("label", "case", "disagreers", "classifications"))
                self.wrong += facts != self.expected[at]
            else:
                self.retry_after += [int(answer.headers["retry-after"])] if answer.status_code == 503 else []
                await asyncio.sleep(0.1)  # ruder than asked

    def _facts(self, clients: int, spent: float, worked: float, memory: list[float]) -> dict[str, Any]:
        quarter = max(1, len(memory) // 4)
        facts: dict[str, Any] = {
            "clients": clients,
            "seconds": round(spent, 1),
            "statuses": {str(status): number for status, number in sorted(self.statuses.items())},
            "answers_checked": self.statuses[200],
            "answers_wrong": self.wrong,
            "images_per_second": round(self.statuses[200] / spent, 2),
            "images_per_cpu_second": round(self.statuses[200] / worked, 2),
            "milliseconds": {f"p{q}": round(1000 * float(np.percentile(self.times, q)), 1) for q in (50, 95, 99)},
            "rss_mib": {
                "first_quarter": round(float(np.mean(memory[:quarter])), 1),
                "last_quarter": round(float(np.mean(memory[-quarter:])), 1),
                "most": round(max(memory), 1),
            },
        }
        if self.retry_after:
            facts["retry_after_seconds"] = {"least": min(self.retry_after), "most": max(self.retry_after)}
        return facts


def batches(address: str) -> dict[str, float]:
    """What the server says of its batches."""
    metrics = dict(line.rsplit(" ", 1) for line in httpx.get(f"{address}/metrics").text.splitlines() if line[0] != "#")
    number = float(metrics["patchcleanser_batch_images_count"])
    return {
        "images_a_batch": round(float(metrics["patchcleanser_batch_images_sum"]) / number, 1),
        "labels_a_batch": round(float(metrics["patchcleanser_batch_labels_sum"]) / number, 1),
        "model_seconds": round(float(metrics["patchcleanser_model_seconds_total"]), 1),
        "cpu_seconds": round(float(metrics["process_cpu_seconds_total"]), 1),
    }


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
