"""patchcleanser train: a classifier that survives masks, from labelled images."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from patchcleanser.errors import InputError


def train(
    model: Annotated[str, typer.Option(help="Network: net:resnet, net:vit, timm:NAME?…, trained:FOLDER, …")],
    out: Annotated[Path, typer.Option(help="Folder for weights, card and log; an unfinished run there goes on.")],
    data: Annotated[str, typer.Option(help="Labelled dataset.")] = "cifar10",
    root: Annotated[Path | None, typer.Option(help="Where the dataset's files lie; fetched if not given.")] = None,
    recipe: Annotated[str, typer.Option(help="paper, scratch-cifar or scratch-cifar-tokens.")] = "scratch-cifar",
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the recipe: epochs=30, cutout.count=0.")
    ] = None,
    patch: Annotated[str, typer.Option(help="Threat by which the best epoch is chosen, as for certify.")] = "2.4%",
    teacher: Annotated[str | None, typer.Option(help="A classifier whose answers are learned too.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first images.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON and nothing else.")] = False,
) -> None:
    """Train (or fine-tune) a network so that its labels survive masks."""
    # torch is imported here, not above, so that --help answers at once.
    import numpy as np
    import torch

    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier, input_size
    from patchcleanser.classifiers.trained import bare_spec
    from patchcleanser.cli.progress import progress
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import in_memory, load_dataset
    from patchcleanser.training.cards import versions, write_model
    from patchcleanser.training.fit import Epoch, fit, require_classes
    from patchcleanser.training.recipes import RECIPES

    if (out / "card.json").is_file():
        raise InputError(f"{out} holds a finished run; use another --out")
    if recipe not in RECIPES:
        raise InputError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    chosen = RECIPES[recipe].changed(_settings(change or []))
    torch.manual_seed(seed)  # the initial weights belong to the run
    classifier = load_classifier(model, device=device)
    if not isinstance(classifier, TorchClassifier) or classifier.preprocessing.mean is None:
        raise InputError(f"{model} cannot be trained: it is no torch network with a normalisation")
    dataset = in_memory(load_dataset(data, split="train", root=root), input_size(classifier))
    if limit is not None:
        dataset = dataset.subset(np.arange(min(limit, len(dataset))))
    require_classes(classifier.classes, len(dataset.classes))
    guide = load_classifier(teacher, device=device) if teacher else None
    if guide is not None and not isinstance(guide, TorchClassifier):
        raise InputError(f"the teacher {teacher} is no torch network")
    preprocessing = classifier.preprocessing
    with progress(f"training {model}", quiet=as_json) as report:

        def watch(epoch: Epoch, epochs: int) -> None:
            held = "" if epoch.survival is None else f"  held out: {epoch.clean:.3f}, under masks {epoch.survival:.3f}"
            report(epoch.epoch, epochs, f"loss {epoch.loss:.3f}  accuracy {epoch.accuracy:.3f}{held}")

        fitted = fit(
            classifier.module,
            dataset,
            chosen,
            mean=preprocessing.mean or (),
            std=preprocessing.std or (),
            out=out,
            seed=seed,
            threat=Threat.parse(patch),
            teacher=None if guide is None else guide.module,
            watch=watch,
        )
    if not fitted.main:
        return
    card = {
        "model": bare_spec(model),
        "preprocessing": asdict(preprocessing),
        "classes": list(dataset.classes),
        "data": {"name": dataset.name, "images": len(dataset), "sha256": dataset.fingerprint},
        "recipe": {"name": recipe, **chosen.to_json()},
        "teacher": teacher,
        "seed": seed,
        "criterion": f"most held-out images right under {patch} two-mask views",
        "best_epoch": asdict(fitted.best),
        "seconds": round(sum(e.seconds for e in fitted.history), 1),
        "command": "patchcleanser " + " ".join(sys.argv[1:]),
        "versions": versions(),
    }
    card = write_model(fitted.module, out, card)
    if as_json:
        print(json.dumps(card, indent=1))
    else:
        best = fitted.best
        print(f"wrote {out}/model.safetensors and card.json; held out: {best.clean}, under masks {best.survival}")
        print(f"use it as trained:{out}")


def _settings(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for word, (_, equals, _) in zip(words, pairs, strict=True):
        if not equals:
            raise InputError(f"--set takes name=value, got {word!r}")
    return {name: value for name, _, value in pairs}
