"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

Out = Annotated[Path, typer.Option(help="Folder for weights, card and log.")]
Patch = Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1% or any:502.")]
Limit = Annotated[int | None, typer.Option(help="Only so many images.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the card as JSON and nothing else.")]


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
