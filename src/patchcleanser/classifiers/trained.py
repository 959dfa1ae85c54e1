"""Classifiers this project trained or hardened: a folder with weights and a card; the zoo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.networks import INPUT, build_network
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import Around, TorchClassifier
from patchcleanser.classifiers.weights import load_weights
from patchcleanser.errors import ClassifierError, InputError

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)

AROUND = ("inpaint:", "mirror:")
"""These begin specs that go around another one and have no weights of their own."""

NUMBER = {"net": "classes", "timm": "num_classes"}
"""How specs of networks that can be given a new last layer say the number of classes."""

PACKAGED = Path(__file__).parents[1] / "zoo"
CHECKOUT = Path(__file__).parents[3] / "zoo"


def network_classifier(name: str, device: torch.device, options: dict[str, Any]) -> Classifier:
    """One of our networks; `weights` is "none" or a file."""
    weights = options.pop("weights", "none")
    module = build_network(name, options).eval().to(device)
    if weights != "none":
        load_weights(module, weights)
    side = options.get("size", INPUT.get(name, 32))
    preprocessing = Preprocessing((side, side), None, "bicubic", CIFAR_MEAN, CIFAR_STD)
    return TorchClassifier(module, preprocessing, classes=options.get("classes", 1000 if name in INPUT else 10))


def trained_classifier(
    folder: Path,
    device: torch.device,
    build: Callable[[str, dict[str, Any]], Classifier],
    *,
    classes: int | None = None,
) -> TorchClassifier:
    """What a card describes, with the weights beside it. `build` makes the bare network of a spec.

    With `classes`, its last layer is a new, untrained one for so many classes: where training on other data begins.
    """
    card = read_card(folder)
    random = {} if innermost(card["model"]).startswith("python:") else {"weights": "none"}
    bare = build(card["model"], random)
    if not isinstance(bare, TorchClassifier):
        raise ClassifierError(f"{folder}/card.json names {card['model']!r}, which is no torch network")
    load_weights(bare.module, folder / "model.safetensors")
    if classes is not None:
        _renew(bare.module, str(card["model"]), classes)
    saved: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in card["preprocessing"].items()}
    classifier = TorchClassifier(bare.module.to(device), Preprocessing(**saved), classes=classes or bare.classes)
    if classes is None:
        classifier.names = tuple(card["classes"]) if card.get("classes") else bare.names
    return classifier


def _renew(module: nn.Module, spec: str, classes: int) -> None:
    """Put a new last layer into a network; timm says where it is."""
    while isinstance(module, Around):
        module = module.network
    reset: Any = getattr(module, "reset_classifier", None)
    if reset is None or innermost(spec).partition(":")[0] not in NUMBER:
        raise ClassifierError(f"{spec} cannot be given {classes} classes: only timm's networks and net:resnet, vit, …")
    if not isinstance(classes, int) or classes < 1:
        raise InputError(f"classes is a whole number from 1, got {classes!r}")
    reset(classes)
    module.eval()


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a trained classifier."""
    path = folder / "card.json"
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        card["model"], card["preprocessing"]
    except FileNotFoundError as error:
        raise ClassifierError(f"no trained classifier in {folder}: it has no card.json") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ClassifierError(f"{path} is not a model card: {error}") from error
    return card


def bare_spec(spec: str) -> str:
    """The spec of the network itself: a card must not depend on the folder another one lies in."""
    inner = innermost(spec)
    card = _card_of(inner)
    if card is None:
        return spec
    network, classes = str(card["model"]), inner.partition("?classes=")[2]
    return spec.removesuffix(inner) + (_numbered(network, classes) if classes else network)


def _numbered(spec: str, classes: str) -> str:
    """The spec of a network, with another number of classes.

    >>> _numbered("net:resnet?classes=300&wider=2", "10")
    'net:resnet?wider=2&classes=10'
    """
    option = NUMBER[innermost(spec).partition(":")[0]]
    name, _, query = spec.partition("?")
    others = [pair for pair in query.split("&") if pair and not pair.startswith(f"{option}=")]
    return f"{name}?{'&'.join([*others, f'{option}={classes}'])}"


def innermost(spec: str) -> str:
    """What a spec that goes around others goes around at last.

    >>> innermost("mirror:inpaint:zoo:tiny")
    'zoo:tiny'
    """
    around = next((begin for begin in AROUND if spec.startswith(begin)), None)
    return spec if around is None else innermost(spec.removeprefix(around))


def weights_of(spec: str, classifier: Classifier) -> str:
    """What names the weights of a classifier: the hash of its file where it has a card."""
    card = _card_of(innermost(spec)) or {}
    return str(card.get("weights_sha256") or classifier.weights)


def _card_of(spec: str) -> dict[str, Any] | None:
    kind, _, name = spec.partition("?")[0].partition(":")
    if kind not in ("trained", "zoo"):
        return None
    return read_card(zoo_folder(name) if kind == "zoo" else Path(name))


def zoo_folders() -> dict[str, Path]:
    """Every zoo model at hand: packaged, in $PATCHCLEANSER_ZOO, in the checkout, or in ./zoo."""
    places = [Path.cwd() / "zoo", CHECKOUT, PACKAGED]
    if os.environ.get("PATCHCLEANSER_ZOO"):
        places.append(Path(os.environ["PATCHCLEANSER_ZOO"]))
    return {card.parent.name: card.parent for place in places for card in sorted(place.glob("*/card.json"))}


def zoo_folder(name: str) -> Path:
    """The folder of one zoo model."""
    found = zoo_folders()
    if name not in found:
        raise ClassifierError(
            f"no zoo model {name!r}; at hand: {', '.join(sorted(found)) or 'none'}. The larger ones lie in zoo/ of the "
            "repository; name that folder with PATCHCLEANSER_ZOO"
        )
    return found[name]
