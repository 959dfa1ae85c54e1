"""patchcleanser train: a classifier that survives masks, from labelled images."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import (
    AsJson,
    Device,
    Limit,
    Out,
    Patch,
    Seed,
    TrustCode,
    require_outside,
    tell,
    trainable,
)
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.data import ArrayDataset
    from patchcleanser.training.recipes import Recipe


def train(
    model: Annotated[
        str,
        typer.Option(help="Network: net:resnet, net:tiny, timm:NAME?…, trained:FOLDER, or inpaint: and one of these."),
    ],
    out: Out,
    data: Annotated[str, typer.Option(help="Labelled images: cifar10, folder:PATH, parquet:PATH.")] = "cifar10",
    root: Annotated[Path | None, typer.Option(help="Where the dataset's files lie; fetched if not given.")] = None,
    recipe: Annotated[
        str, typer.Option(help="paper, scratch-cifar, scratch-cifar-tokens, or of a baseline: ds-cifar, …")
    ] = "scratch-cifar",
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the recipe: epochs=30, cutout.count=0.")
    ] = None,
    patch: Patch = "2.4%",
    teacher: Annotated[
        str | None, typer.Option(help="A classifier to learn from too; see the setting teacher_weight.")
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Train (or fine-tune) a network so that its labels survive masks; the same command goes on after a stop."""
    import torch

    from patchcleanser.classifiers.trained import bare_spec, weights_of
    from patchcleanser.cli.progress import progress
    from patchcleanser.core.threats import Threat
    from patchcleanser.records.provenance import origin
    from patchcleanser.training.artifacts import write_model
    from patchcleanser.training.fit import fit

    chosen = _recipe(recipe, change or [])
    threat = Threat.parse(patch)
    require_outside(out, data)
    torch.manual_seed(seed)  # the initial weights belong to the run
    classifier = trainable(model, device, out, trust_code=trust_code)
    dataset = _images(classifier, data, root, limit)
    start = weights_of(model, classifier)
    preprocessing = classifier.preprocessing.uncropped  # trained without a crop, and so used without one
    guide = _teacher(teacher, chosen, device, len(dataset.classes), trust_code=trust_code)
    with progress(f"training {model}", quiet=as_json) as report:
        fitted = fit(
            classifier.module,
            dataset,
            chosen,
            preprocessing=preprocessing,
            out=out,
            seed=seed,
            threat=threat,
            teacher=guide,
            on_progress=report,
        )
    if not fitted.is_main_process:
        return
    card = {
        "model": bare_spec(model),
        "start": {"model": model, "weights_sha256": start},
        "preprocessing": asdict(preprocessing),
        "classes": list(dataset.classes),
        "data": {"name": dataset.name, "images": len(dataset), "sha256": dataset.fingerprint},
        "recipe": {"name": recipe, **chosen.to_json()},
        "teacher": teacher,
        "teacher_weights_sha256": None if guide is None else weights_of(teacher or "", guide),
        "seed": seed,
        "criterion": "the last weights"
        if fitted.best.survival is None
        else f"the last within one standard error of most held-out images right under {patch} two-mask views",
        "best_epoch": asdict(fitted.best),
        "seconds": round(sum(e.seconds for e in fitted.history), 1),
        **origin(),
    }
    card = write_model(fitted.module, out, card)
    best = fitted.best
    held = "nothing held out" if best.clean is None else f"held out: {best.clean:.3f}, under masks {best.survival:.3f}"
    tell(card, out, held, as_json=as_json)


def _recipe(name: str, words: list[str]) -> Recipe:
    from patchcleanser.training.recipes import RECIPES

    if name not in RECIPES:
        raise InputError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    pairs = [word.partition("=") for word in words]
    for word, (_, equals, _) in zip(words, pairs, strict=True):
        if not equals:
            raise InputError(f"--set takes name=value, got {word!r}")
    return RECIPES[name].changed({key: value for key, _, value in pairs})


def _images(classifier: TorchClassifier, data: str, root: Path | None, limit: int | None) -> ArrayDataset:
    import numpy as np

    from patchcleanser.classifiers.torch import input_size
    from patchcleanser.data import ArrayDataset, in_memory, load_dataset
    from patchcleanser.training.fit import require_classes

    size = input_size(classifier)
    found = load_dataset(data, split="train", root=root)
    dataset = found if isinstance(found, ArrayDataset) else in_memory(found, size)
    require_classes(_classes(classifier), len(dataset.classes))
    if limit is None:
        return dataset
    if limit < 1:
        raise InputError(f"at least 1 image is needed, got --limit {limit}")
    return dataset.subset(np.arange(min(limit, len(dataset))))


def _classes(classifier: TorchClassifier) -> int | None:
    """How many classes it knows; one that does not say so is asked about an empty image."""
    import torch

    from patchcleanser.classifiers.torch import input_size
    from patchcleanser.training.cutout import masked_inputs

    if classifier.classes is None:
        nothing = torch.zeros(1, 3, *input_size(classifier), device=classifier.device)
        with torch.inference_mode():
            classifier.checked_logits(masked_inputs(classifier.module, nothing))
    return classifier.classes


def _teacher(
    spec: str | None, recipe: Recipe, device: str, classes: int, *, trust_code: bool
) -> TorchClassifier | None:
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier

    if spec is None:
        for name in ("teacher_weight", "guidance"):
            if getattr(recipe, name) > 0:
                raise InputError(f"{name} is above 0 but there is no teacher; name one with --teacher")
        return None
    if recipe.teacher_weight == recipe.guidance == 0:
        raise InputError("a teacher counts for nothing at teacher_weight=0; add --set teacher_weight=0.7")
    guide = load_classifier(spec, device=device, trust_code=trust_code)
    if not isinstance(guide, TorchClassifier):
        raise InputError(f"the teacher {spec} is no torch network")
    if guide.classes not in (None, classes):
        raise InputError(f"the teacher {spec} knows {guide.classes} classes, the data has {classes}; name another")
    return guide
