"""Networks of this project: untrained, trained or hardened (a folder with weights and a card), and the zoo."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.registry import SpecOrigin, innermost, load_spec, parse_options, with_classes
from patchcleanser.classifiers.torch import TorchClassifier, load_weights
from patchcleanser.errors import ClassifierError, DataError, InputError
from patchcleanser.networks.builders import INPUT, build_network
from patchcleanser.records.cache import cache_folder, checksum, download

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)

MAX_CLASSES = 100_000
"""More classes than this are taken for a typing error."""

PACKAGED = Path(__file__).parents[1] / "zoo"
"""In a wheel: zoo:tiny, and the cards of the others, whose weights are downloaded."""
CHECKOUT = Path(__file__).parents[3] / "zoo"


def network_classifier(name: str, device: torch.device, options: dict[str, Any]) -> Classifier:
    """One of our networks; the option `weights` is "none" or a file."""
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
    options: dict[str, Any],
    *,
    weights: Path | None = None,
    trust_code: bool = False,
) -> TorchClassifier:
    """The network that a card describes, with the weights beside it unless they are elsewhere.

    With the option `classes`, its last layer is a new, untrained one with so many classes: a start for training on
    other data.
    """
    if options.keys() - {"classes"}:
        raise InputError(
            "a trained classifier takes no options but classes=NUMBER (a new last layer) and those of preprocessing, "
            f"got {sorted(options)}"
        )
    card, classes = read_card(folder), options.get("classes")
    spec = str(card["model"]) if classes is None else _change_classes(str(card["model"]), classes)
    untrained = {} if innermost(spec).startswith("python:") else {"weights": "none"}
    bare = load_spec(spec, "cpu", untrained, SpecOrigin(folder / "card.json", trust_code))
    if not isinstance(bare, TorchClassifier):
        raise ClassifierError(f"{folder}/card.json names {card['model']!r}, which is not a torch network")
    load_weights(bare.module, weights or folder / "model.safetensors", new_classes=classes)
    try:
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in card["preprocessing"].items()}
        preprocessing, names = Preprocessing(**settings), tuple(map(str, card.get("classes") or ()))
        threshold = float(card["threshold"]) if card.get("task") == "multilabel" else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ClassifierError(f"{folder}/card.json is not a model card: {error}") from error
    classifier = TorchClassifier(bare.module.to(device), preprocessing, classes=classes or bare.classes)
    classifier.code = bare.code
    if classes is None:
        classifier.names, classifier.threshold = names or bare.names, threshold
    return classifier


def _change_classes(spec: str, classes: Any) -> str:
    """The spec of a network with another number of classes; refused where it cannot be."""
    if not isinstance(classes, int) or isinstance(classes, bool) or not 2 <= classes <= MAX_CLASSES:
        raise InputError(f"classes is a whole number from 2 to {MAX_CLASSES:,}, got {classes!r}")
    changed = with_classes(spec, classes)
    if changed is None:
        raise ClassifierError(f"{spec} cannot be given {classes} classes: its kind has no option for their number")
    return changed


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a trained classifier."""
    path = folder / "card.json"
    if not path.is_file():  # nor a link to a device or a pipe, which would be read without end
        raise ClassifierError(f"no trained classifier in {folder}: it has no card.json, which is written at the end")
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        card["model"], card["preprocessing"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ClassifierError(f"{path} is not a model card: {error}") from error
    return card


def bare_spec(spec: str) -> str:
    """The spec of the network itself, since a card must not depend on the folder of another one."""
    inner = innermost(spec)
    card = _card_of(inner)
    if card is None:
        return spec
    network, classes = str(card["model"]), parse_options(inner.partition("?")[2]).get("classes")
    return spec.removesuffix(inner) + (network if classes is None else _change_classes(network, classes))


def weights_of(spec: str, classifier: Classifier) -> str:
    """A hash of a classifier's weights: that of its weight file if it has a card."""
    card = _card_of(innermost(spec)) or {}
    return str(card.get("weights_sha256") or classifier.weights)


def _card_of(spec: str) -> dict[str, Any] | None:
    kind, _, name = spec.partition("?")[0].partition(":")
    if kind not in ("trained", "zoo"):
        return None
    return read_card(zoo_folder(name) if kind == "zoo" else Path(name))


def zoo_folders() -> dict[str, Path]:
    """Every zoo model here: in ./zoo, in the checkout, in the package, or in $PATCHCLEANSER_ZOO; the last wins.

    A card alone, as in the package, gives way to a card with weights.
    """
    roots = [Path.cwd() / "zoo", CHECKOUT, PACKAGED]
    if os.environ.get("PATCHCLEANSER_ZOO"):
        roots.append(Path(os.environ["PATCHCLEANSER_ZOO"]))
    folders = [card.parent for root in roots for card in sorted(root.glob("*/card.json"))]
    folders.sort(key=lambda folder: (folder / "model.safetensors").is_file())
    return {folder.name: folder for folder in folders}


def zoo_folder(name: str) -> Path:
    """The folder of one zoo model."""
    folders = zoo_folders()
    if name not in folders:
        more = ", and PATCHCLEANSER_ZOO may name a folder of others"
        raise ClassifierError.unknown("zoo model", name, sorted(folders), more)
    return folders[name]


def zoo_weights(name: str) -> Path:
    """The weights of a zoo model: beside its card, else in the cache, else from $PATCHCLEANSER_ZOO_URL.

    What is fetched must have the hash in the package's card.
    """
    folder = zoo_folder(name)
    beside = folder / "model.safetensors"
    if beside.is_file() or folder.parent != PACKAGED:
        return beside
    sha256, file = read_card(folder)["weights_sha256"], f"{name}.safetensors"
    target, address = cache_folder() / "zoo" / file, os.environ.get("PATCHCLEANSER_ZOO_URL", "").rstrip("/")
    if target.is_file() and checksum(target) == sha256:
        return target
    if not address:
        raise ClassifierError(
            f"the weights of zoo:{name} are not in the package; set PATCHCLEANSER_ZOO_URL to the address of the "
            f"release's files, one of which is {file}, or PATCHCLEANSER_ZOO to the folder zoo/ of the repository"
        )
    try:
        download(f"{address}/{file}", target, sha256)
    except DataError as error:
        fix = f"fetch them where there is a network: curl -fL --create-dirs -o {target} {address}/{file}"
        raise ClassifierError(f"no weights for zoo:{name}: {error}; {fix}") from error
    return target
