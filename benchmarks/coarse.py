"""Predictions with and without a coarse round in one run: images a second, classifications a prediction, accuracy.

    python benchmarks/coarse.py --precision fast
    python benchmarks/coarse.py --precision exact --images 1000

Each setting is one JSON line. On a CPU seconds are processor time, which other work changes less. Fast labels are
calibrated on 512 images that are not predicted.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from patchcleanser import ChallengerMasking, DoubleMasking, Threat, load_classifier, load_dataset

CALIBRATED_ON = 512
SETTINGS = [(DoubleMasking, 0), (DoubleMasking, 3), (ChallengerMasking, 0), (ChallengerMasking, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:cifar10-resnet")
    parser.add_argument("--patch", default="5")
    parser.add_argument("--precision", default="fast", choices=["fast", "exact"])
    parser.add_argument("--images", type=int, default=9000)
    parser.add_argument("--settings", type=int, nargs="+", default=range(len(SETTINGS)), help="numbers of SETTINGS")
    options = parser.parse_args()
    dataset, classifier = load_dataset("cifar10"), load_classifier(options.model)
    images, labels = [dataset.image(n) for n in range(options.images)], dataset.labels[: options.images]
    for kind, coarse in (SETTINGS[number] for number in options.settings):
        defense = kind(classifier, Threat.parse(options.patch), masks=6, coarse=coarse, precision=options.precision)
        if options.precision == "fast":
            defense.calibrate([dataset.image(len(dataset) - 1 - n) for n in range(CALIBRATED_ON)])
        defense.predict(images[:64])  # kernels are chosen
        clock = time.perf_counter if classifier.device.type == "cuda" else time.process_time
        started = clock()
        verdicts = defense.predict(images)
        seconds = clock() - started
        right = sum(verdict.label == label for verdict, label in zip(verdicts, labels, strict=True))
        row = {
            "defense": kind.__name__,
            "coarse": coarse,
            "precision": options.precision,
            "images": len(images),
            "images_per_second": round(len(images) / seconds, 2),
            "classifications": round(sum(verdict.classifications for verdict in verdicts) / len(images), 2),
            "clean": round(100 * right / len(images), 2),
            "device": torch.cuda.get_device_name() if classifier.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
