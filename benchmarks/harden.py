"""Measure an ImageNet classifier, untouched or hardened, on labelled photos in Parquet files.

    export PYTHONPATH=benchmarks PATCHCLEANSER_MODELS=FOLDER
    patchcleanser harden --model python:harden:resnet50 --images parquet:PHOTOS --patch 2% --out runs/resnet50
    python benchmarks/harden.py trained:runs/resnet50 --name resnet50 --data 'PATH/imagenet-val2000-*.parquet'

A row of the same model, side of its input, patch, kind of masks (grey, or filled in), way of asking (once, or with the
mirror image too) and way of hardening (none: untouched) is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torchvision
from torch import nn
from zoo import keep, measured

from patchcleanser import Threat, TorchClassifier, load_classifier
from patchcleanser.classifiers.registry import innermost, pick_device
from patchcleanser.classifiers.torch import input_size, load_weights
from patchcleanser.classifiers.trained import read_card
from patchcleanser.data import chosen, load_dataset
from patchcleanser.evaluation import Job
from patchcleanser.paper.models import models_folder
from patchcleanser.paper.resnet50 import file_preprocessing, resnet50

__all__ = ["mobilenet_v2", "resnet50"]  # as python:harden:NAME


def mobilenet_v2() -> TorchClassifier:
    """MobileNetV2 as torchvision has it."""
    return _classifier(torchvision.models.mobilenet_v2(weights=None), "mobilenet_v2")


def _classifier(module: nn.Module, name: str) -> TorchClassifier:
    """The module with the weights and normalisation in $PATCHCLEANSER_MODELS/NAME.safetensors."""
    path = models_folder() / f"{name}.safetensors"
    load_weights(module, path)
    return TorchClassifier(module.eval().to(pick_device("auto")), file_preprocessing(path), classes=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a classifier, as for load_classifier")
    parser.add_argument("--name", required=True, help="what to call it in the row")
    parser.add_argument("--data", required=True, help="Parquet file, folder or pattern with labels")
    parser.add_argument("--patch", default="2%")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/harden"))
    parser.add_argument("--out", type=Path, default=Path("results/harden.json"))
    given = parser.parse_args()
    inner = innermost(given.model)
    hardened = inner.startswith("trained:")
    card = read_card(Path(inner.partition(":")[2])) if hardened else {}
    data = f"parquet:{given.data}"
    job = Job(
        load_classifier(given.model, trust_code=True),  # cards name the functions of this file
        chosen(load_dataset(data), given.limit, subset="first"),
        Threat.parse(given.patch, grid="input"),
        masks=6,
        precision="fast",
    )
    described = given.model.removesuffix(inner) + str(card.get("model", inner))
    filled, mirror = "inpaint:" in described, "mirror:" in described
    row: dict[str, object] = {
        "model": given.name,
        "input": input_size(job.classifier)[0],
        "photos": card.get("photos", {}).get("number", 0),
        "patch": given.patch,
        "masks": "6x6",
        "grid": "input",
        "data": "imagenet",
        "at": input_size(job.classifier)[0],
        "hidden": "filled in" if filled else "grey",
        "asked": "with its mirror image" if mirror else "once",
    }
    words = [given.name, Path(inner).name if hardened else "untouched", *["filled-in"] * filled, *["mirrored"] * mirror]
    row |= measured(job, given.runs / "-".join(words))
    row |= {
        "seed": card.get("seed"),
        "weights": card.get("weights_sha256") or job.classifier.fingerprint,
        "harden_command": card.get("command"),
        "harden_settings": card.get("settings"),
        "checks": card.get("checks"),
        "kept": card.get("best"),
        "photos_sha256": card.get("photos", {}).get("sha256"),
    }
    print(json.dumps(row), flush=True)
    keep(row, given.out, ("model", "input", "patch", "hidden", "asked", "harden_command"))


if __name__ == "__main__":
    main()
