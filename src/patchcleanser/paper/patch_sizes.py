"""Figures 6 to 8 (and 12, 13, 15, 16): patches estimated too large, and patches that are large."""

from __future__ import annotations

from patchcleanser.paper.base import Axis, Experiment, Finding, Line
from patchcleanser.paper.claims import falls, stays
from patchcleanser.paper.models import LOW
from patchcleanser.paper.models import MODELS as KNOWN
from patchcleanser.paper.plans import USUAL, enlarged, enlarges, plan_of
from patchcleanser.paper.reading import accuracies
from patchcleanser.reports.tables import CERTIFIED, CLEAN

MODELS = (
    "tiny",
    "resnet",
    "imagenet-resnet50-hardened",
    "authors-vit-imagenet",
    "authors-vit-imagenette",
    "authors-vit-cifar10",
)
OVER = {32: (32, 39, 45, 51, 55, 60, 64), 5: (5, 6, 7, 8, 9, 10)}
"""Sides assumed where the patch is 32 (or 5) px: up to four times its area."""
LARGE = {32: (32, 64, 96, 112, 128, 160, 192), 5: (5, 9, 14, 16, 18, 23, 27)}
"""Sides up to 192 of 224, and the same shares of 32."""


def _usual(model: str) -> int:
    return USUAL[KNOWN[model].data]


def _side(line: Line) -> float:
    """The patch's side on 224×224, or on 32×32 pixels."""
    side = float(line.plan.patch)
    return side / enlarged(line.plan.model) if enlarges(line.plan.model) and line.plan.grid == "input" else side


def _ratio(line: Line, found: Finding) -> float:
    return round((_side(line) / USUAL[line.plan.data]) ** 2, 2)


def _share(line: Line, found: Finding) -> float:
    return round(100 * _side(line) / (32 if line.plan.data in LOW else 224), 1)


BY_RATIO = Axis("estimated over actual area of the patch", _ratio, ("clean", "certified"))
FIGURE6 = Experiment(
    "figure6",
    "Figures 6, 12 and 15",
    "A patch size estimated too large",
    "Who takes the patch for up to four times as large loses hardly any clean accuracy, and certified accuracy slowly.",
    tuple(Line(plan_of(model, side)) for model in MODELS for side in OVER[_usual(model)]),
    (CLEAN, CERTIFIED),
    accuracies,
    axis=BY_RATIO,
    claims=(
        stays(
            BY_RATIO, "clean", 3.0, "Over-estimating the area four times costs little clean accuracy (3 points at most)"
        ),
        falls(BY_RATIO, "certified", "Certified accuracy falls with the over-estimate"),
    ),
)

BY_SHARE = Axis("side of the patch, % of the image's side", _share, ("clean", "certified"))
PAPER = {64: {"certified": 46.1}, 112: {"certified": 20.5}, 192: {"clean": 0.1}}
"""Of ViT on ImageNet, in the text; clean accuracy is above 80% up to 112 px."""
FIGURE8 = Experiment(
    "figure8",
    "Figures 7, 8, 13 and 16",
    "Large patches",
    "With ever larger patches clean accuracy falls late and certified accuracy early, but not to nothing.",
    tuple(
        Line(plan_of(model, side), printed=PAPER.get(side, {}) if model == "authors-vit-imagenet" else {})
        for model in MODELS
        for side in LARGE[_usual(model)]
    ),
    (CLEAN, CERTIFIED),
    accuracies,
    axis=BY_SHARE,
    claims=(falls(BY_SHARE, "certified", "Certified accuracy falls as the patch grows"),),
)
