"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import Dataset

Out = Annotated[Path, typer.Option(help="Folder for weights, card and log.")]
Model = Annotated[
    str, typer.Option(help="Classifier: zoo:NAME, timm:NAME, torchvision:NAME, onnx:FILE, python:module:make, …")
]
Data = Annotated[str, typer.Option(help="Labelled images: sample, cifar10, imagenet, folder:PATH, parquet:PATH, …")]
Root = Annotated[Path | None, typer.Option(help="Where a named dataset's files lie.")]
Split = Annotated[str | None, typer.Option(help="Which part of a named dataset: test (or val), train.")]
Patch = Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1% or any:502.")]
Limit = Annotated[int | None, typer.Option(help="Only so many images.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Patches = Annotated[int, typer.Option(help="How many patches at once.")]
Masks = Annotated[str | None, typer.Option("--masks", help="Masks per axis: 6, or 6x4 (down x across).")]
Stride = Annotated[str | None, typer.Option(help="Instead of --masks: pixels from mask to mask, 33 or 33x20.")]
Grid = Annotated[
    str | None, typer.Option(help="Pixels meant: source (the image as it came, default) or input (after resizing).")
]
Precision = Annotated[
    str, typer.Option(help="exact (float32), or fast (half precision where it pays, doubtful labels rechecked).")
]


Threshold = Annotated[float | None, typer.Option(help="Confidence threshold of minority-reports; 0.5 if not given.")]
PATCH = "2%"
"""The threat if nothing is said: 5×5 px at 32×32, 32×32 px at 224×224."""


def labelled(data: str, split: str | None, root: Path | None) -> Dataset:
    """The dataset that the options name."""
    from patchcleanser.data import load_dataset
    from patchcleanser.data.named import NAMED

    if split is not None and data not in NAMED:
        raise InputError(f"{data} has no splits and is taken whole; leave out --split {split}")
    return load_dataset(data, split=split or "test", root=root)


def defense_options(defense: str, threshold: float | None) -> dict[str, float]:
    """What one of the defenses takes besides masks."""
    return {"threshold": threshold} if threshold is not None and defense == "minority-reports" else {}


def pair(text: str | None, what: str) -> tuple[int, int] | None:
    """6 or 6x4 as a number for each axis."""
    if text is None:
        return None
    down, _, across = text.partition("x")
    try:
        return int(down), int(across or down)
    except ValueError as error:
        raise InputError(f"--{what} takes a whole number, or one for each axis as 6x4, got {text!r}") from error


def threat_of(patch: str, patches: int, grid: str | None) -> Threat:
    """The threat that the options name."""
    from patchcleanser.core.threats import Threat

    return Threat.parse(patch, count=patches, grid=grid or "source")  # type: ignore[arg-type]  # checked by Threat


def trainable(model: str, device: str, out: Path) -> TorchClassifier:
    """The torch classifier to train or harden into `out`, which must not hold a finished run."""
    # Here and in the commands torch is imported late, so that --help answers at once.
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier

    if (out / "card.json").is_file():
        raise InputError(f"{out} holds a finished run; use it as trained:{out}, or use another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror}; use another --out") from error
    classifier = load_classifier(model, device=device)
    if not isinstance(classifier, TorchClassifier):
        raise InputError(f"{model} cannot be trained: only torch networks can")
    return classifier


def tell(card: dict[str, Any], out: Path, words: str, *, as_json: bool) -> None:
    """Say what was written and how to use it, or print the card."""
    if as_json:
        print(json.dumps(card, indent=1))
    else:
        print(f"{words}\nwrote {out}/model.safetensors and card.json; use it as trained:{out}")
