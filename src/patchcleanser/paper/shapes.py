"""Table 4: any rectangle of 1% of the pixels, and two patches at once."""

from __future__ import annotations

from patchcleanser.paper.base import Experiment, Line, Plan
from patchcleanser.paper.models import MODELS
from patchcleanser.paper.plans import enlarges
from patchcleanser.paper.reading import accuracies
from patchcleanser.reports.tables import CERTIFIED, CLEAN, ROW_CERTIFIED, Column

IMAGES = 500
PAPER = {
    "imagenette": ((99.2, 91.8), (99.6, 96.6), (98.8, 89.2), (99.2, 95.6)),
    "imagenet": ((85.4, 49.8), (84.2, 68.2), (83.8, 45.8), (83.8, 63.2)),
    "cifar10": ((99.4, 82.6), (99.0, 92.6), (98.6, 76.6), (99.0, 91.2)),
}
THREATS = (("any:1%", 1, 6), ("1%", 1, 6), ("1%", 2, 5), ("2%", 1, 6))
"""Patch, how many at once, and masks per axis: 25 base masks make 15,275 distinct unions for two patches."""
FEWER = {"tiny": 4}
"""Where two patches get fewer base masks: 16 make 2,516 unions, which a CPU can do."""


def _lines(model: str) -> list[Line]:
    data = MODELS[model].data
    grid = "input" if enlarges(model) or data != "cifar10" else "source"
    printed = [{"clean": clean, "certified": certified} for clean, certified in PAPER[data]]
    return [
        Line(Plan(model, data, patch, patches, grid, _masks(model, patches, masks), images=IMAGES), printed=told)  # type: ignore[arg-type]
        for (patch, patches, masks), told in zip(THREATS, printed, strict=True)
    ]


def _masks(model: str, patches: int, masks: int) -> int:
    return FEWER.get(model, masks) if patches > 1 else masks


OURS = ("tiny", "resnet")
THEIRS = ("authors-vit-imagenette", "authors-vit-imagenet", "authors-vit-cifar10")

TABLE4 = Experiment(
    "table4",
    "Table 4",
    "Any rectangle of 1%, and two patches",
    "Masks for every shape, or for several patches at once, certify stronger attackers with the same algorithm.",
    tuple(line for model in (*OURS, *THEIRS) for line in _lines(model)),
    (
        CLEAN,
        CERTIFIED,
        ROW_CERTIFIED,
        Column("classifications", "Labels an image", 0),
        Column("seconds", "Seconds an image (wall clock)", 3),
    ),
    accuracies,
)
