"""Where a GPU's time goes in a block of labels in FP8: the kernels it runs, and what each takes.

    python benchmarks/parts.py vit_base_patch16_224 resmlp_24_224

Networks are timm's, with random weights; a block is what `certify` gives a GPU at once (320 images at 224×224).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator

import torch
from measuring import timed
from speed import loaded
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from patchcleanser.engine.fast.backends import block_size, candidates_for
from patchcleanser.engine.fast.float8.backend import Float8Backend

SIDE = 224
UNIONS = 666
ROUNDS = 20


def kernels(work: Callable[[], object], most: int) -> list[dict[str, object]]:
    """The kernels that take longest, in one of the rounds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "kernel": event.key[:100],
            "times": event.count / ROUNDS,
            "ms": round(event.self_device_time_total / ROUNDS / 1000, 3),
        }
        for event in events[:most]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", help="names of timm's networks for 224×224 images")
    parser.add_argument("--kernels", type=int, default=20, help="how many are shown")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("parts.py: error: this needs a CUDA device")
    for name in given.models:
        (way, *_), *_ = candidates_for(loaded(f"timm:{name}?weights=none", "cuda"))
        if not isinstance(way, Float8Backend):
            sys.exit("parts.py: error: this GPU has no FP8 products")
        way.expected = way.half.expected = 10**9
        number = block_size(3 * SIDE * SIDE)
        images = torch.randn(number, 3, SIDE, SIDE, device="cuda").half()
        for row in block_rows(name, way, images.contiguous(memory_format=torch.channels_last), given.kernels):
            print(json.dumps(row), flush=True)


def block_rows(name: str, way: Float8Backend, images: Tensor, most: int) -> Iterator[dict[str, object]]:
    """A block's time, and then its kernels'."""

    def blocks() -> None:
        for _ in range(ROUNDS):
            way.logits(images)

    with torch.inference_mode():
        prepared = timed(lambda: way.logits(images), images.device, 1, warm=False)
        block = 1000 * timed(blocks, images.device) / ROUNDS
        yield {
            "model": name,
            "images": len(images),
            "ms_a_block": round(block, 3),
            "ms_a_table": round(block * UNIONS / len(images), 2),
            "prepared_in_s": round(prepared, 1),
        }
        yield from kernels(blocks, most)


if __name__ == "__main__":
    main()
