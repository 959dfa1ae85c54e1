"""Figures 4 and 5 (and 11, 14, 17, 18): how many masks, what they prove, and what they cost."""

from __future__ import annotations

from patchcleanser.paper.base import Axis, Experiment, Line
from patchcleanser.paper.claims import rises_and_saturates
from patchcleanser.paper.plans import timed, usual
from patchcleanser.paper.reading import accuracies
from patchcleanser.reports.tables import CERTIFIED, CLEAN, Column

COUNTS = (2, 3, 4, 5, 6)
PAPER = {
    2: {"clean": 82.7, "certified": 44.3, "milliseconds": 78.8},
    6: {"clean": 83.8, "certified": 62.2, "milliseconds": 672.4},
}
"""What the text says of ViT on 5,000 ImageNet images; the other points are only drawn."""

MODELS = (
    "tiny",
    "resnet",
    "vit",
    "mlp",
    "imagenet-resnet50-hardened",
    "authors-vit-imagenet",
    "authors-vit-imagenette",
    "authors-vit-cifar10",
)
LINES = tuple(
    Line(
        plan := usual(model, masks=k),
        printed=PAPER.get(k, {}) if model == "authors-vit-imagenet" else {},
        timed=timed(plan),
    )
    for model in MODELS
    for k in COUNTS
)
TIME = Column("milliseconds", "Milliseconds to answer, one image at a time", 1)
BY_COUNT = Axis("masks per axis", lambda line, found: float(line.plan.masks), ("clean", "certified"))

FIGURE4 = Experiment(
    "figure4",
    "Figures 4, 11 and 14",
    "Number of masks",
    "More masks are smaller masks: certified accuracy first rises and then saturates, while the time grows.",
    LINES,
    (CLEAN, CERTIFIED, TIME),
    accuracies,
    axis=BY_COUNT,
    claims=(
        rises_and_saturates(BY_COUNT, "certified", "Certified accuracy rises with the number of masks and saturates"),
    ),
)

BY_TIME = Axis(
    "milliseconds to answer, one image at a time",
    lambda line, found: float(found.values.get("milliseconds", float("nan"))),  # type: ignore[arg-type]
    ("clean", "certified"),
    log=True,
)
FIGURE5 = Experiment(
    "figure5",
    "Figures 5, 17 and 18",
    "Overhead against accuracy",
    "The number of masks trades time for certified accuracy; few masks already beat what was known before.",
    LINES,
    (TIME, CLEAN, CERTIFIED),
    accuracies,
    axis=BY_TIME,
)
