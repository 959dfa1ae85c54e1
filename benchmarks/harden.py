"""Measure an ImageNet classifier, untouched or hardened, on labelled photos in Parquet files.

    export PYTHONPATH=benchmarks IMAGENET_WEIGHTS=FOLDER
    patchcleanser harden --model python:harden:resnet50 --images parquet:PHOTOS --patch 2% --out runs/resnet50
    python benchmarks/harden.py trained:runs/resnet50 --name resnet50 --data 'PATH/imagenet-val2000-*.parquet'

A row of the same model and number of photos (none: untouched) is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from patchcleanser import DoubleMasking, Preprocessing, Threat, TorchClassifier, load_classifier
from patchcleanser.classifiers.load import pick_device
from patchcleanser.classifiers.trained import read_card
from patchcleanser.data import load_dataset
from patchcleanser.evaluation import measure
from patchcleanser.training.cards import versions


def resnet50() -> TorchClassifier:
    """ResNet-50 with the strides of the paper that introduced it, which these weights were trained with."""
    module = torchvision.models.resnet50(weights=None)
    for layer in (module.layer2, module.layer3, module.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    return _classifier(module, "resnet50_v1_imagenet")


def mobilenet_v2() -> TorchClassifier:
    """MobileNetV2 as torchvision has it."""
    return _classifier(torchvision.models.mobilenet_v2(weights=None), "mobilenet_v2")


def _classifier(module: nn.Module, name: str) -> TorchClassifier:
    """The module with the weights and normalisation in $IMAGENET_WEIGHTS/NAME.safetensors."""
    path = Path(os.environ["IMAGENET_WEIGHTS"]) / f"{name}.safetensors"
    module.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in load_file(path).items()})
    with safe_open(path, "pt") as file:
        mean, std = (tuple(json.loads(file.metadata()[key])) for key in ("mean", "std"))
    preprocessing = Preprocessing(256, (224, 224), "bicubic", mean, std)
    return TorchClassifier(module.eval().to(pick_device("auto")), preprocessing, classes=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a classifier, as for load_classifier")
    parser.add_argument("--name", required=True, help="what to call it in the row")
    parser.add_argument("--data", required=True, help="Parquet file, folder or pattern with labels")
    parser.add_argument("--patch", default="2%")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/harden.json"))
    given = parser.parse_args()
    threat = Threat.parse(given.patch, grid="input")
    classifier = load_classifier(given.model)
    defense = DoubleMasking(classifier, threat, masks=6, precision="fast")
    started = time.monotonic()
    found = measure(defense, load_dataset(f"parquet:{given.data}"), limit=given.limit)
    hardened = given.model.startswith("trained:")
    card = read_card(Path(given.model.partition(":")[2])) if hardened else {}
    row = {
        "model": given.name,
        "photos": card.get("photos", {}).get("number", 0),
        "patch": given.patch,
        "masks": "6x6",
        "grid": "input",
        "images": found.images,
        "undefended": found.undefended,
        "clean": found.clean,
        "certified": found.certified,
        "row_certified": found.row_certified,
        "seed": card.get("seed"),
        "weights": card.get("weights_sha256") or classifier.fingerprint,
        "harden_command": card.get("command"),
        "seconds": round(time.monotonic() - started, 1),
        "labels_rechecked": defense.masked.recheck.rechecked,
        "labels_flipped_by_recheck": defense.masked.recheck.flipped,
        "flips_above_the_bound": defense.masked.recheck.audited_flips,
        "classifications": found.classifications,
        "command": f"python benchmarks/harden.py {given.model} --name {given.name} --data … --patch {given.patch}",
        "versions": versions(),
    }
    print(json.dumps(row), flush=True)
    rows = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else []
    rows = [old for old in rows if (old["model"], old["photos"]) != (row["model"], row["photos"])] + [row]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
