"""What the string that names a classifier says, read without building anything."""

from __future__ import annotations

from typing import Any

ASKING = ("tokens", "inpaint", "mirror", "mean")
"""Kinds that ask others, whose specs follow."""

AROUND = ("inpaint:", "mirror:")
"""These begin specs that go around another one and have no weights of their own."""

OWN_BUILDERS = {
    f"patchcleanser.experiments.imagenet:{function}": "1065a373f8434879c1bee5ac54bc3f6a3b305f3de323bb94c2c9897b47b9afed"
    for function in ("resnet50", "resnet50_at_32")
}
"""Functions of ours that a file may name: they take numbers only, and read nothing but a safetensors file.

Each with the hash of its code that its fingerprints have, which an import that moves must not change.
"""

MOVED = {
    "patchcleanser.classifiers.bagnet": "patchcleanser.networks.bagnet",
    "patchcleanser.classifiers.inpaint": "patchcleanser.networks.inpainting",
    "patchcleanser.classifiers.interval": "patchcleanser.networks.interval",
    "patchcleanser.classifiers.mean": "patchcleanser.networks.ensemble",
    "patchcleanser.classifiers.mirror": "patchcleanser.networks.flip_ensemble",
    "patchcleanser.classifiers.networks": "patchcleanser.networks.builders",
    "patchcleanser.classifiers.tokens": "patchcleanser.networks.token_dropping",
    "patchcleanser.experiments.imagenet": "patchcleanser.paper.imagenet",
}
"""Where modules are whose first names stay in fingerprints and in `python:` specs: stored runs and cards name them."""

NUMBER = {"net": "classes", "python": "classes", "timm": "num_classes", "torchvision": "num_classes"}
"""How specs of networks say the number of classes."""


def settings_in(query: str) -> dict[str, Any]:
    """`a=1&b=x` as a dictionary. Not decoded like a web form, since + and % occur in file names."""
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return {key: text if key == "weights" else _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    """Numbers and booleans from a query string; anything else stays text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def innermost(spec: str) -> str:
    """What a spec that goes around others goes around at last.

    >>> innermost("mirror:inpaint:zoo:tiny")
    'zoo:tiny'
    """
    around = next((begin for begin in AROUND if spec.startswith(begin)), None)
    return spec if around is None else innermost(spec.removeprefix(around))


def members(spec: str) -> list[str]:
    """The specs of which a mean is taken, or the one there is.

    >>> members("mirror:mean:zoo:tiny,mirror:zoo:cifar10-resnet")
    ['zoo:tiny', 'mirror:zoo:cifar10-resnet']
    """
    inner = innermost(spec)
    return [part.strip() for part in inner.removeprefix("mean:").split(",")] if inner.startswith("mean:") else [inner]


def names_code(spec: str) -> bool:
    """Whether a card of this spec is loaded only by those who trust its code.

    >>> names_code("mirror:python:my_models:make?classes=10"), names_code("mirror:net:tiny")
    (True, False)
    """
    parts = (part.partition("?")[0].partition(":") for part in members(spec))
    return any(kind == "python" and name not in OWN_BUILDERS for kind, _, name in parts)


def numbered(spec: str, classes: int) -> str | None:
    """The spec of a network with another number of classes, or None for kinds that do not say it.

    >>> numbered("net:resnet?classes=300&wider=2", 10)
    'net:resnet?wider=2&classes=10'
    """
    option = NUMBER.get(innermost(spec).partition(":")[0])
    if option is None:
        return None
    name, _, query = spec.partition("?")
    others = [pair for pair in query.split("&") if pair and pair.partition("=")[0] != option]
    return f"{name}?{'&'.join([*others, f'{option}={classes}'])}"
