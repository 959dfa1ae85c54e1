"""Time, work, memory and power of what a machine does."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from patchcleanser import TorchClassifier


def timed(work: Callable[[], Any], device: torch.device, repeats: int = 3, *, warm: bool = True) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    if warm:
        work()
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def in_turns(
    ours: Callable[[], Any], loop: Callable[[], Any], device: torch.device
) -> tuple[float, float, list[float]]:
    """Seconds of the fastest of eight calls of each, taken in turns, and the ratios of all turns in order of size.

    What else a machine does then slows both.
    """
    ours(), loop()
    turns = [(timed(ours, device, 1, warm=False), timed(loop, device, 1, warm=False)) for _ in range(8)]
    own, theirs = (min(seconds) for seconds in zip(*turns, strict=True))
    return own, theirs, sorted(round(b / a, 2) for a, b in turns)


def peak(device: torch.device) -> float | None:
    """Measured matrix peak in float16, FLOP/s; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.float16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: [a @ b for _ in range(10)], device) * 10


def flops(classifier: TorchClassifier, inputs: Tensor) -> int:
    """Of one forward pass of one image."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        classifier.module(inputs[:1])
    return int(counter.get_total_flops())


def memory_mb(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated() / 1e6)
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


@contextmanager
def power(device: torch.device) -> Iterator[list[float]]:
    """Watts of a GPU, asked for five times a second; none where they cannot be had."""
    watts: list[float] = []
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield watts
        return
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield watts
        process.terminate()
        output = (process.stdout.read() if process.stdout else "").split()
    watts += [float(word) for word in output if word.replace(".", "", 1).isdigit()]
