"""patchcleanser harden: a copy of a finished classifier whose labels survive masks, without labels."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from patchcleanser.errors import InputError


def harden(
    model: Annotated[
        str, typer.Option(help="Classifier to harden: timm:NAME, torchvision:NAME, python:module:make, …")
    ],
    images: Annotated[list[str], typer.Option(help="Unlabelled photos: a folder, folder:PATH, parquet:PATH, cifar10.")],
    out: Annotated[Path, typer.Option(help="Folder for weights, card and log.")],
    patch: Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1%.")] = "2%",
    epochs: Annotated[int, typer.Option(help="At most so many passes over the photos.")] = 60,
    batch: Annotated[int, typer.Option(help="Photos per step.")] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 5e-5,
    tries: Annotated[int, typer.Option(help="Places tried for each mask to find the worst.")] = 2,
    unmasked: Annotated[float, typer.Option(help="Share of the loss that keeps unmasked answers.")] = 0.3,
    patience: Annotated[int, typer.Option(help="Stop after so many checks without improvement.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Only so many photos.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON and nothing else.")] = False,
) -> None:
    """Harden a classifier with unlabelled photos; the original is not changed."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.classifiers.trained import bare_spec
    from patchcleanser.cli.progress import progress
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import load_dataset, together
    from patchcleanser.training.cards import versions, write_model
    from patchcleanser.training.harden import Check, HardenSettings
    from patchcleanser.training.harden import harden as run

    if (out / "card.json").is_file():
        raise InputError(f"{out} holds a finished run; use another --out")
    settings = HardenSettings(epochs=epochs, batch=batch, rate=rate, tries=tries, unmasked=unmasked, patience=patience)
    classifier = load_classifier(model, device=device)
    if not isinstance(classifier, TorchClassifier):
        raise InputError(f"{model} cannot be hardened: only torch networks can")
    names = [name if ":" in name or not Path(name).is_dir() else f"folder:{name}" for name in images]
    photos = together([load_dataset(name, split="train") for name in names], limit=limit, seed=seed)
    with progress(f"hardening {model}", quiet=as_json) as report:

        def watch(check: Check, most: int) -> None:
            words = f"loss {check.loss:.3f}  agreement {check.agreement:.3f}  invariance {check.invariance:.3f}"
            report(check.epoch, most, words)

        done = run(classifier, photos, Threat.parse(patch), settings=settings, seed=seed, watch=watch)
    card = {
        "model": bare_spec(model),
        "preprocessing": asdict(classifier.preprocessing),
        "hardened_from": classifier.fingerprint,
        "photos": {"names": names, "number": len(photos), "sha256": photos.fingerprint},
        "patch": patch,
        "settings": asdict(settings),
        "seed": seed,
        "criterion": "most held-out photos with the original's label under all two-mask views",
        "before": asdict(done.checks[0]),
        "best": asdict(done.best),
        "checks": [asdict(check) for check in done.checks],
        "command": "patchcleanser " + " ".join(sys.argv[1:]),
        "versions": versions(),
    }
    card = write_model(done.classifier.module, out, card)
    if as_json:
        print(json.dumps(card, indent=1))
    else:
        before, best = done.checks[0], done.best
        print(f"invariance under masks {before.invariance:.3f} → {best.invariance:.3f}, agreement {best.agreement:.3f}")
        print(f"wrote {out}/model.safetensors and card.json; use it as trained:{out}")
