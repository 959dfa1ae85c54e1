"""patchcleanser train: train or fine-tune a classifier whose labels survive masks, on labelled images."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, Limit, Patch, Seed, TrustCode, require_outside
from patchcleanser.core.counts import counted
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.data import ArrayDataset
    from patchcleanser.training.artifacts import Epoch
    from patchcleanser.training.recipes import Recipe

Out = Annotated[Path, typer.Option(help="Folder for weights, card and checkpoint.")]


def train(
    model: Annotated[str, typer.Option(help="Network: net:resnet, timm:NAME?…, trained:FOLDER, inpaint:SPEC, …")],
    out: Out,
    data: Annotated[
        str, typer.Option(help="Labelled images: cifar10, folder:PATH, parquet:PATH; or boxes: coco:FILE.")
    ] = "cifar10",
    root: Annotated[Path | None, typer.Option(help="Folder of the dataset's files; fetched if not given.")] = None,
    recipe: Annotated[str, typer.Option(help="Recipe: paper, scratch-cifar, multilabel, …")] = "scratch-cifar",
    change: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe: epochs=30.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the images; the same as --set epochs=.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images per step; the same as --set batch=.")] = None,
    patch: Patch = "2.4%",
    teacher: Annotated[str | None, typer.Option(help="Classifier to distill from, with teacher_weight.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Train (or fine-tune) a network so that its labels survive masks; the same command goes on after a stop."""
    import torch  # late, as everything that imports torch, so that --help answers at once

    from patchcleanser.classifiers.trained import bare_spec, weights_of
    from patchcleanser.cli.progress import progress
    from patchcleanser.core.threats import Threat
    from patchcleanser.records.atomic import interruptible
    from patchcleanser.records.provenance import origin
    from patchcleanser.training.artifacts import CHECKPOINT, write_model
    from patchcleanser.training.fit import fit
    from patchcleanser.training.several_labels import THRESHOLD

    short = [f"{name}={value}" for name, value in (("epochs", epochs), ("batch", batch)) if value is not None]
    settings = _recipe(recipe, [*(change or []), *short])
    threat = Threat.parse(patch)
    require_outside(out, data)
    torch.manual_seed(seed)  # of the initial weights
    several = settings.loss == "binary"
    classifier = load_trainable(model, device, out, trust_code=trust_code, several=several)
    dataset = (_load_targets if several else _load_images)(classifier, data, root, limit)
    _check_classes(classifier, dataset)
    start = weights_of(model, classifier)
    preprocessing = classifier.preprocessing.uncropped  # trained without a crop, and so used without one
    teaching = _load_teacher(teacher, settings, device, len(dataset.classes), trust_code=trust_code)
    with progress(f"training {model}") as show, interruptible((out / CHECKPOINT).is_file):
        fitted = fit(
            classifier.module,
            dataset,
            settings,
            preprocessing=preprocessing,
            out=out,
            seed=seed,
            threat=threat,
            teacher=teaching,
            on_progress=show,
        )
    if not fitted.is_main_process:
        return
    card = {
        "model": bare_spec(model),
        "start": {"model": model, "weights_sha256": start},
        "preprocessing": asdict(preprocessing),
        "classes": list(dataset.classes),
        **({"task": "multilabel", "threshold": THRESHOLD} if several else {}),
        "data": {"name": dataset.name, "images": len(dataset), "sha256": dataset.fingerprint},
        "recipe": {"name": recipe, **settings.to_dict()},
        "teacher": teacher,
        "teacher_weights_sha256": None if teaching is None else weights_of(teacher or "", teaching),
        "seed": seed,
        "criterion": _criterion(fitted.best, patch, several=several),
        "best_epoch": asdict(fitted.best),
        "seconds": round(sum(e.seconds for e in fitted.history), 1),
        **origin(),
    }
    card = write_model(fitted.module, out, card)
    few = f"{settings.holdout:.0%} of {counted(len(dataset), 'image')} is none" if settings.holdout else "holdout=0"
    print_card(card, out, _outcome(fitted.best, few, several=several), as_json=as_json)


def _outcome(best: Epoch, few: str, *, several: bool) -> str:
    """What the selected weights reach on held-out images; `few` says why there are none, if so."""
    if best.clean is None:
        return f"nothing held out ({few})"
    precision = "mean average precision, " if several else ""
    return f"{precision}held out: {best.clean:.3f}, under masks {best.survival:.3f}"


def _criterion(best: Epoch, patch: str, *, several: bool) -> str:
    """Which weights were selected, for the card."""
    if best.survival is None:
        return "the last weights"
    if several:
        return f"the highest mean average precision of the worst scores of held-out images under {patch} two-mask views"
    return f"the last within one standard error of most held-out images right under {patch} two-mask views"


def load_trainable(
    model: str, device: str, out: Path, *, trust_code: bool = False, several: bool = False
) -> TorchClassifier:
    """The torch classifier to train or harden into `out`, which must be writable and hold no finished model."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.networks.ensemble import Mean
    from patchcleanser.records.leftovers import require_free
    from patchcleanser.training.artifacts import CHECKPOINT

    if (out / "card.json").is_file():
        raise InputError(f"{out} holds a finished run; use it as trained:{out}, or use another --out")
    require_free(out, ours=CHECKPOINT)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror}; use another --out") from error
    classifier = load_classifier(model, device=device, trust_code=trust_code)
    if not isinstance(classifier, TorchClassifier):
        raise InputError(f"{model} cannot be trained: only torch networks can")
    if not several:
        classifier.require_one_label("this command trains for")
    if classifier.mask_aware and not getattr(classifier.module, "mask_aware", False):
        raise InputError(
            f"{model} cannot be trained: it would learn and be kept as the plain network; train that instead"
        )
    if any(isinstance(part, Mean) for part in classifier.module.modules()):
        raise InputError(
            f"{model} is several networks, which learn one by one; train each, and ask for their mean then"
        )
    if (out / CHECKPOINT).is_file():
        print(f"going on from the checkpoint in {out}", file=sys.stderr)
    return classifier


def print_card(card: dict[str, Any], out: Path, outcome: str, *, as_json: bool) -> None:
    """Print the outcome of training and how to use the model, or the card."""
    from patchcleanser.classifiers.registry import names_code

    if as_json:
        print(json.dumps(card, indent=1))
    else:
        flag = " with --trust-code" if names_code(card["model"]) else ""
        print(f"{outcome}\nwrote {out}/model.safetensors and card.json; use it as trained:{out}{flag}")


def _recipe(name: str, changes: list[str]) -> Recipe:
    from patchcleanser.training.recipes import RECIPES

    if name not in RECIPES:
        raise InputError.unknown("recipe", name, RECIPES)
    for change in changes:
        if "=" not in change:
            raise InputError(f"--set takes name=value, got {change!r}")
    return RECIPES[name].changed(dict(change.split("=", 1) for change in changes))


def _load_images(classifier: TorchClassifier, data: str, root: Path | None, limit: int | None) -> ArrayDataset:
    import numpy as np

    from patchcleanser.classifiers.torch import input_size
    from patchcleanser.data import ArrayDataset, chosen, in_memory, load_dataset

    size = input_size(classifier)
    if limit is not None and limit < 1:
        raise InputError(f"at least 1 image is needed, got --limit {limit}")
    images = load_dataset(data, split="train", root=root)
    if not isinstance(images, ArrayDataset):
        return in_memory(chosen(images, limit, subset="first"), size)
    return images if limit is None else images.subset(np.arange(min(limit, len(images))))


def _load_targets(classifier: TorchClassifier, data: str, root: Path | None, limit: int | None) -> ArrayDataset:
    """Images with several labels each, of the classifier's input size."""
    from patchcleanser.classifiers.torch import input_size
    from patchcleanser.data.multilabel_sets import TargetArrays, load_multilabel

    return TargetArrays(load_multilabel(data, root=root).chosen(limit, subset="first"), input_size(classifier))


def _check_classes(classifier: TorchClassifier, dataset: ArrayDataset) -> None:
    """Refuse a network with another number of classes than the data; it may say their number by its first logits."""
    import torch

    from patchcleanser.classifiers.torch import input_size
    from patchcleanser.training.cutout import masked_inputs
    from patchcleanser.training.fit import require_classes

    if classifier.classes is None:
        black = torch.zeros(1, 3, *input_size(classifier), device=classifier.device)
        with torch.inference_mode():
            classifier.checked_logits(masked_inputs(classifier.module, black))
    require_classes(classifier.classes, len(dataset.classes))


def _load_teacher(
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
    teaching = load_classifier(spec, device=device, trust_code=trust_code)
    if not isinstance(teaching, TorchClassifier):
        raise InputError(f"the teacher {spec} is no torch network")
    teaching.require_one_label("a teacher here gives")
    if teaching.classes not in (None, classes):
        raise InputError(f"the teacher {spec} knows {teaching.classes} classes, the data has {classes}; name another")
    return teaching
