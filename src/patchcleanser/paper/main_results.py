"""Tables 2 and 3: clean and certified accuracy of the defended models, and what they do undefended."""

from __future__ import annotations

from patchcleanser.paper import baselines
from patchcleanser.paper.base import Experiment, Line
from patchcleanser.paper.models import FAMILIES
from patchcleanser.paper.plans import plan_of, usual
from patchcleanser.paper.reading import accuracies
from patchcleanser.reports.tables import CERTIFIED, CLEAN, ROW_CERTIFIED, UNDEFENDED

SIDES = {"1%": 23, "2%": 32, "3%": 39, "0.4%": 2, "2.4%": 5}
"""The paper's shares as sides: on 224×224 for photographs, on 32×32 for CIFAR."""

PHOTOS, SMALL = ("1%", "2%", "3%"), ("0.4%", "2.4%")
PATCHES = {"imagenette": PHOTOS, "imagenet": PHOTOS, "cifar10": SMALL}

CLEAN_CERTIFIED = {
    "ResNet": {
        "imagenette": ((99.6, 96.4), (99.6, 94.4), (99.5, 93.5)),
        "imagenet": ((81.7, 58.4), (81.6, 53.0), (81.4, 50.0)),
        "cifar10": ((98.0, 88.5), (97.8, 78.8)),
    },
    "ViT": {
        "imagenette": ((99.6, 97.5), (99.6, 96.4), (99.5, 95.3)),
        "imagenet": ((84.1, 66.4), (83.9, 62.1), (83.8, 59.0)),
        "cifar10": ((99.0, 94.3), (98.7, 89.1)),
    },
    "MLP": {
        "imagenette": ((99.4, 96.8), (99.3, 95.3), (99.4, 94.6)),
        "imagenet": ((79.6, 58.4), (79.4, 53.8), (79.3, 50.7)),
        "cifar10": ((97.4, 86.1), (97.0, 78.0)),
    },
}
UNDEFENDED_PAPER = {
    "ResNet": {"imagenette": 99.8, "imagenet": 82.3, "cifar10": 98.3},
    "ViT": {"imagenette": 99.8, "imagenet": 84.8, "cifar10": 99.0},
    "MLP": {"imagenette": 99.5, "imagenet": 80.2, "cifar10": 97.8},
}

OURS = {
    "cifar10": {
        "tiny": "ResNet",
        "resnet": "ResNet",
        "vit": "ViT",
        "mlp": "MLP",
        "cifar10-resnet50-128-longer": "ResNet",
        "cifar10-resnet50": "ResNet",
    },
    "imagenet": {
        f"imagenet-{network}{how}": "ResNet"
        for network in ("resnet50", "mobilenet")
        for how in ("", "-hardened", "-filled-in")
    },
}
"""Our models, and the paper's family that each is laid beside."""


def printed(family: str, data: str, share: str) -> dict[str, float]:
    """What Table 2 says."""
    clean, certified = CLEAN_CERTIFIED[family][data][PATCHES[data].index(share)]
    return {"clean": clean, "certified": certified}


def _models() -> list[tuple[str, str, str]]:
    """Model, family, dataset: ours first, then the authors'."""
    ours = [(model, family, data) for data, found in OURS.items() for model, family in found.items()]
    return ours + [(f"authors-{f.lower()}-{data}", f, data) for data in PATCHES for f in FAMILIES]


def _lines() -> list[Line]:
    """Every model with every patch of its dataset; enlarged CIFAR also on its own 32×32 pixels."""
    lines: list[Line] = []
    for model, family, data in _models():
        for share in PATCHES[data]:
            plans = dict.fromkeys([plan_of(model, SIDES[share]), plan_of(model, SIDES[share], grid="source")])
            lines += [Line(plan, printed=printed(family, data, share)) for plan in plans]
    return lines


TABLE2 = Experiment(
    "table2",
    "Table 2",
    "Clean and certified accuracy",
    "Any classifier can be defended, with little loss of clean accuracy and far more certified than before.",
    tuple(_lines() + baselines.lines()),
    (CLEAN, CERTIFIED, ROW_CERTIFIED),
    accuracies,
)

TABLE3 = Experiment(
    "table3",
    "Table 3",
    "Undefended models",
    "What the same networks reach without a defense: the defended ones come within two points of it.",
    tuple(Line(usual(m), printed={"undefended": UNDEFENDED_PAPER[f][d]}) for m, f, d in _models()),
    (UNDEFENDED, CLEAN),
    accuracies,
)
