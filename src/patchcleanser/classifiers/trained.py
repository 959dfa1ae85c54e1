"""Classifiers this project trained or hardened: a folder with weights and a card; the zoo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.specs import innermost, numbered, settings_in
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.classifiers.weights import load_weights
from patchcleanser.errors import ClassifierError, InputError
from patchcleanser.networks.builders import INPUT, build_network

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)

MOST = 100_000
"""More classes than this are taken for a slip."""

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
    spec = str(card["model"]) if classes is None else _with_classes(str(card["model"]), classes)
    random = {} if innermost(spec).startswith("python:") else {"weights": "none"}
    bare = build(spec, random)
    if not isinstance(bare, TorchClassifier):
        raise ClassifierError(f"{folder}/card.json names {card['model']!r}, which is no torch network")
    load_weights(bare.module, folder / "model.safetensors", new_classes=classes)
    preprocessing, names = _facts(folder, card)
    classifier = TorchClassifier(bare.module.to(device), preprocessing, classes=classes or bare.classes)
    classifier.code = bare.code
    if classes is None:
        classifier.names = names or bare.names
    return classifier


def _facts(folder: Path, card: dict[str, Any]) -> tuple[Preprocessing, tuple[str, ...]]:
    """The preprocessing and the names of classes on a card, of which nothing is taken on trust."""
    try:
        settings: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in card["preprocessing"].items()
        }
        return Preprocessing(**settings), tuple(map(str, card.get("classes") or ()))
    except (TypeError, ValueError, AttributeError) as error:
        raise ClassifierError(f"{folder}/card.json is not a model card: {error}") from error


def _with_classes(spec: str, classes: Any) -> str:
    """The spec of a network with another number of classes; refused where it cannot be."""
    if not isinstance(classes, int) or isinstance(classes, bool) or not 2 <= classes <= MOST:
        raise InputError(f"classes is a whole number from 2 to {MOST:,}, got {classes!r}")
    changed = numbered(spec, classes)
    if changed is None:
        raise ClassifierError(f"{spec} cannot be given {classes} classes: what it is named by says no number of them")
    return changed


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a trained classifier."""
    path = folder / "card.json"
    if not path.is_file():  # nor a link to a device or a pipe, which would be read without end
        raise ClassifierError(f"no trained classifier in {folder}: it has no card.json")
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        card["model"], card["preprocessing"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ClassifierError(f"{path} is not a model card: {error}") from error
    return card


def bare_spec(spec: str) -> str:
    """The spec of the network itself: a card must not depend on the folder another one lies in."""
    inner = innermost(spec)
    card = _card_of(inner)
    if card is None:
        return spec
    network, classes = str(card["model"]), settings_in(inner.partition("?")[2]).get("classes")
    return spec.removesuffix(inner) + (network if classes is None else _with_classes(network, classes))


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
