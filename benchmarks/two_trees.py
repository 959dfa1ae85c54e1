"""What a change costs on a GPU: the same tasks by two trees of this project, on one network, in one run.

    git worktree add before 5c534db
    PYTHONPATH=src python benchmarks/two_trees.py --weights vit.pt --train
    PYTHONPATH=before/src python benchmarks/two_trees.py --weights vit.pt
    PYTHONPATH=src python benchmarks/two_trees.py --weights vit.pt
    PYTHONPATH=src python benchmarks/two_trees.py --weights vit.pt --exact-rows 6 9 12 18 36

The network is a ViT-B/16 that learns 300 CIFAR-10 photos by heart in half a minute, so that margins are those of a
trained network. Milliseconds an image, fastest call first, as one JSON line for each size of exact batches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch.nn import functional

import patchcleanser
from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_dataset

PHOTOS, TIMED, STEPS = 300, 128, 160


class Worst(DoubleMasking):
    """Double-masking as it goes when every mask disagrees: all second rounds are needed."""

    def _fine_flow(self, table: Any) -> Any:
        yield table, table.masks()
        yield table, table.rows(range(len(table.mask_set)))
        return (yield from super()._fine_flow(table))

    def _verdict(self, table: Any) -> Any:  # its name before the redesign
        yield table.masks()
        yield table.rows(range(len(table.mask_set)))
        return (yield from super()._verdict(table))


def train(module: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Learn the photos by heart, with a grey square on each."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-4 * min(1, (step + 1) / 20) * (1 - step / STEPS)
        batch = torch.randperm(len(images), device=images.device)[: len(images) // 2]
        inputs = images[batch].clone()
        top, left = torch.randint(0, 160, (2,)).tolist()
        inputs[:, :, top : top + 64, left : left + 64] = 0.5
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(module(inputs), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clocked(work: Callable[[], Any], images: int, repeats: int) -> list[float]:
    """Milliseconds an image of each call, in order."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started) / images)
    return [round(t, 2) for t in sorted(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="Make the weights first.")
    parser.add_argument(
        "--exact-rows", type=int, nargs="+", default=[0], help="rows of batches of exact labels; 0: what the tree has"
    )
    options = parser.parse_args()
    dataset = load_dataset("cifar10")
    photos = torch.stack([dataset.image(n) for n in range(PHOTOS)])
    images = functional.interpolate(photos, size=(224, 224), mode="bilinear").clamp(0, 1)
    labels = torch.as_tensor(dataset.labels[:PHOTOS])
    torch.manual_seed(0)
    module = timm.create_model("vit_base_patch16_224", pretrained=False, num_classes=10).cuda()
    if options.train:
        train(module, images.cuda(), labels.cuda())
        torch.save(module.state_dict(), options.weights)
    module.load_state_dict(torch.load(options.weights, weights_only=True))
    classifier, threat = TorchClassifier(module.eval()), Threat.parse("2%", grid="input")
    fast, worst, exact = (
        kind(classifier, threat, masks=6, precision=precision)
        for kind, precision in ((DoubleMasking, "fast"), (Worst, "fast"), (DoubleMasking, "exact"))
    )
    many, truth = list(images[:TIMED]), labels[:TIMED].tolist()
    hint = getattr(fast, "hint_total_images", None) or fast.expect  # `expect` before the redesign
    getattr(fast, "check_size", lambda size: fast.ready(size))((224, 224))
    hint(20_000)
    fast.certify(many[:16], truth[:16], maps=True)  # compiles
    for defense in (fast, worst):
        defense.calibrate(many)
    for defense in (fast, worst, exact):
        defense.predict(many[:1])
    agreed = next((image for image in many if fast.predict([image])[0].case.value == "agreed"), many[0])
    for rows in options.exact_rows:
        if rows:
            exact_engine = importlib.import_module("patchcleanser.engine.exact")  # absent before the redesign
            exact_engine.BATCH_NUMEL["cuda"] = rows * 3 * 224 * 224
        times = {
            "predict_worst": clocked(lambda: worst.predict(many[:1]), 1, 5),
            "predict_clean": clocked(lambda: fast.predict([agreed]), 1, 10),
            "table": clocked(lambda: fast.certify(many, truth, maps=True), TIMED, 2),
            "certify": clocked(lambda: fast.certify(many, truth), TIMED, 2),
            "exact_predict": clocked(lambda: exact.predict(many[:8]), 8, 3),
        }
        settings = {"tree": patchcleanser.__file__, "torch": torch.__version__, "exact_rows": rows}
        print(json.dumps(settings | times), flush=True)


if __name__ == "__main__":
    main()
