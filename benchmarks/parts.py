"""Where a GPU's time goes in a block of labels in eight bits: the kernels it runs, and what each takes.

    python benchmarks/parts.py vit_base_patch16_224 resmlp_24_224

Networks are timm's, with random weights; a block is what `certify` gives a GPU at once (320 images at 224×224).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import timm
import torch
from torch.profiler import ProfilerActivity, profile

from patchcleanser import TorchClassifier
from patchcleanser.classifiers.copied import Copied, block_size
from patchcleanser.classifiers.eighth import Eighth
from patchcleanser.classifiers.split import Split

SIDE = 224
UNIONS = 666
ROUNDS = 20


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call, the mean of twenty after five."""
    for _ in range(5):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(ROUNDS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / ROUNDS


def kernels(work: Callable[[], object], most: int) -> list[dict[str, object]]:
    """The kernels of one call that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(ROUNDS):
            work()
        torch.cuda.synchronize()
    found = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    found.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "kernel": event.key[:100],
            "times": event.count / ROUNDS,
            "ms": round(event.self_device_time_total / ROUNDS / 1000, 3),
        }
        for event in found[:most]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", help="names of timm's networks for 224×224 images")
    parser.add_argument("--kernels", type=int, default=20, help="how many are shown")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("parts.py: error: this needs a CUDA device")
    for name in given.models:
        torch.manual_seed(0)
        module = timm.create_model(name, pretrained=False, num_classes=10).eval().cuda()
        torch.nn.init.normal_(module.get_classifier().weight, std=0.02)
        classifier = TorchClassifier(module, classes=10)
        way = Eighth(classifier, finer=Copied(classifier, finer=Split(classifier)))
        way.expected = way.finer.expected = 10**9
        number = block_size(3 * SIDE * SIDE)
        images = torch.randn(number, 3, SIDE, SIDE, device="cuda").half()
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            started = time.monotonic()
            way.logits(images)
            torch.cuda.synchronize()
            made = time.monotonic() - started
            block = milliseconds(lambda w=way, i=images: w.logits(i))  # type: ignore[misc]
            row = {"model": name, "images": number, "ms_a_block": round(block, 3)}
            row |= {"ms_a_table": round(block * UNIONS / number, 2), "prepared_in_s": round(made, 1)}
            print(json.dumps(row), flush=True)
            for kernel in kernels(lambda w=way, i=images: w.logits(i), given.kernels):  # type: ignore[misc]
                print(json.dumps(kernel), flush=True)


if __name__ == "__main__":
    main()
