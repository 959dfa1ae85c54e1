"""Figures 4 to 8 and Table 4 (and Figures 11 to 18): numbers of masks, and sizes, shapes and numbers of patches."""

from __future__ import annotations

from functools import partial

from patchcleanser.paper.experiments import (
    Axis,
    Claim,
    Experiment,
    PaperRow,
    RunSpec,
    falls,
    rises_and_saturates,
    stays,
)
from patchcleanser.paper.measurements import accuracies
from patchcleanser.paper.models import LOW, PAPER_MODELS, PRINTED, USUAL, scale, square_patch, usual_patch
from patchcleanser.reports.tables import CERTIFIED, CLEAN, ROW_CERTIFIED, Column

AUTHORS = ("authors-vit-imagenet", "authors-vit-imagenette", "authors-vit-cifar10")

COUNTS_PRINTED = {
    2: {"clean": 82.7, "certified": 44.3, "milliseconds": 78.8},
    6: {"clean": 83.8, "certified": 62.2, "milliseconds": 672.4},
}
"""What the text says of ViT on 5,000 ImageNet images; the other points are only drawn."""
COUNTS = tuple(
    PaperRow(
        usual_patch(model, masks=masks),
        printed=COUNTS_PRINTED.get(masks, {}) if model == PRINTED else {},
        timed=True,
    )
    for model in ("tiny", "resnet", "vit", "mlp", "imagenet-resnet50-hardened", "imagenette-resnet50", *AUTHORS)
    for masks in (2, 3, 4, 5, 6)
)
TIME = Column("milliseconds", "Milliseconds to answer, one image at a time", 1)
BY_COUNT = Axis("masks per axis", lambda row, _: float(row.spec.masks))
BY_TIME = Axis(
    "milliseconds to answer, one image at a time",
    lambda _, measurement: float(measurement.values.get("milliseconds", float("nan"))),
    log=True,
)

FIGURE4 = Experiment(
    "figure4",
    "Figures 4, 11 and 14",
    "Number of masks",
    "More masks are smaller masks: certified accuracy first rises and then saturates, while the time grows.",
    COUNTS,
    (CLEAN, CERTIFIED, TIME),
    accuracies,
    axis=BY_COUNT,
    claims=(
        Claim(
            "Certified accuracy rises with the number of masks and saturates",
            partial(rises_and_saturates, BY_COUNT, "certified"),
        ),
    ),
)

FIGURE5 = Experiment(
    "figure5",
    "Figures 5, 17 and 18",
    "Overhead against accuracy",
    "The number of masks trades time for certified accuracy; few masks already beat what was known before.",
    COUNTS,
    (TIME, CLEAN, CERTIFIED),
    accuracies,
    axis=BY_TIME,
)

MODELS = ("tiny", "resnet", "imagenet-resnet50-hardened", "imagenette-resnet50", *AUTHORS)
ESTIMATES = {32: (32, 39, 45, 51, 55, 60, 64), 5: (5, 6, 7, 8, 9, 10)}
"""Sides that a defender assumes for a patch of 32 or 5 px: up to four times its area."""
LARGE = {32: (32, 64, 96, 112, 128, 160, 192), 5: (5, 9, 14, 16, 18, 23, 27)}
"""Sides up to 192 of 224 px, and the same shares of 32 px."""
LARGE_PRINTED = {64: {"certified": 46.1}, 112: {"certified": 20.5}, 192: {"clean": 0.1}}
"""Of ViT on ImageNet, in the text; clean accuracy is above 80% up to 112 px."""


def _side(spec: RunSpec) -> float:
    """The patch's side on 224×224 px, or on the 32×32 px of small images."""
    return float(spec.patch) / (scale(spec.model) if spec.grid == "input" else 1)


BY_RATIO = Axis(
    "estimated over actual area of the patch",
    lambda row, _: round((_side(row.spec) / USUAL[row.spec.data]) ** 2, 2),
)
FIGURE6 = Experiment(
    "figure6",
    "Figures 6, 12 and 15",
    "A patch size estimated too large",
    "Who takes the patch for up to four times as large loses hardly any clean accuracy, and certified accuracy slowly.",
    tuple(
        PaperRow(square_patch(model, side)) for model in MODELS for side in ESTIMATES[USUAL[PAPER_MODELS[model].data]]
    ),
    (CLEAN, CERTIFIED),
    accuracies,
    axis=BY_RATIO,
    claims=(
        Claim(
            "Over-estimating the area four times costs little clean accuracy (3 points at most)",
            partial(stays, BY_RATIO, "clean", 3.0),
        ),
        Claim("Certified accuracy falls with the over-estimate", partial(falls, BY_RATIO, "certified")),
    ),
)

BY_SHARE = Axis(
    "side of the patch, % of the image's side",
    lambda row, _: round(100 * _side(row.spec) / (32 if row.spec.data in LOW else 224), 1),
)
FIGURE8 = Experiment(
    "figure8",
    "Figures 7, 8, 13 and 16",
    "Large patches",
    "With ever larger patches clean accuracy falls late and certified accuracy early, but not to nothing.",
    tuple(
        PaperRow(square_patch(model, side), printed=LARGE_PRINTED.get(side, {}) if model == PRINTED else {})
        for model in MODELS
        for side in LARGE[USUAL[PAPER_MODELS[model].data]]
    ),
    (CLEAN, CERTIFIED),
    accuracies,
    axis=BY_SHARE,
    claims=(Claim("Certified accuracy falls as the patch grows", partial(falls, BY_SHARE, "certified")),),
)

THREATS = (("any:1%", 1, 6), ("1%", 1, 6), ("1%", 2, 5), ("2%", 1, 6))
"""Patch, how many at once, and masks per axis: 25 base masks make 15,275 distinct unions for two patches."""
THREATS_PRINTED = {
    "imagenette": ((99.2, 91.8), (99.6, 96.6), (98.8, 89.2), (99.2, 95.6)),
    "imagenet": ((85.4, 49.8), (84.2, 68.2), (83.8, 45.8), (83.8, 63.2)),
    "cifar10": ((99.4, 82.6), (99.0, 92.6), (98.6, 76.6), (99.0, 91.2)),
}
"""Clean and certified accuracy on 500 images."""


def _threats(model: str) -> list[PaperRow]:
    data, grid = PAPER_MODELS[model].data, usual_patch(model).grid
    rows = []
    for (patch, patches, masks), (clean, certified) in zip(THREATS, THREATS_PRINTED[data], strict=True):
        if patches > 1 and model == "tiny":
            masks = 4  # 16 base masks make 2,516 unions, which a CPU can do
        spec = RunSpec(model, data, patch, patches, grid, masks, images=500)
        rows.append(PaperRow(spec, printed={"clean": clean, "certified": certified}))
    return rows


TABLE4 = Experiment(
    "table4",
    "Table 4",
    "Any rectangle of 1%, and two patches",
    "Masks for every shape, or for several patches at once, certify stronger attackers with the same algorithm.",
    tuple(row for model in ("tiny", "resnet", "imagenette-resnet50", *AUTHORS) for row in _threats(model)),
    (
        CLEAN,
        CERTIFIED,
        ROW_CERTIFIED,
        Column("classifications", "Labels an image", 0),
        Column("seconds", "Seconds an image (wall clock)", 3),
    ),
    accuracies,
)
