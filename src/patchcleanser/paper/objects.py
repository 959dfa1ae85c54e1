"""Figures 20 to 22: certified accuracy by the size of the object, and by class."""

from __future__ import annotations

from patchcleanser.paper.base import Axis, Experiment, Line, Plan, Values
from patchcleanser.paper.claims import larger_beyond
from patchcleanser.paper.pictures import small_objects
from patchcleanser.paper.plans import usual
from patchcleanser.paper.reading import PARTS, accuracies, by_class, sized
from patchcleanser.records.run import Run
from patchcleanser.reports.tables import CERTIFIED, CLEAN, Column

BUCKETS = tuple(f"{low}–{low + 10}%" for low in range(0, 100, 10))
"""Of the picture's pixels inside the boxes of its objects."""


def in_bucket(run: Run, bucket: str, shares: dict[str, float]) -> Values:
    """The images whose objects take a share above the bucket's lower end, up to its upper one."""
    low, high = (float(end) / 100 for end in bucket.removesuffix("%").split("–"))
    return sized(run, shares, low, high)


PLANS: tuple[Plan, ...] = (
    usual("imagenet-resnet50-hardened", data="tiny-imagenet"),
    usual("imagenet-mobilenet-hardened", data="tiny-imagenet"),
    usual("imagenet-resnet50-hardened"),
    usual("authors-vit-imagenet"),
)
BY_SIZE = Axis(
    "objects' share of the picture, %",
    lambda line, found: float(line.variant.split("–")[0]) + 5,
    ("clean", "certified"),
)
FIGURE20 = Experiment(
    "figure20",
    "Figure 20",
    "Certified accuracy by object size",
    "Images of larger objects are certified more often: a small object can vanish under a mask.",
    tuple(Line(plan, bucket) for plan in PLANS for bucket in BUCKETS),
    (CLEAN, CERTIFIED, Column("images", "Images in the bucket")),
    accuracies,
    variant="Objects take",
    boxed=in_bucket,
    axis=BY_SIZE,
    claims=(
        larger_beyond(
            BY_SIZE, 50, "certified", "Certified accuracy is larger where objects take more than half of the picture"
        ),
    ),
)

CLASS_MODELS = ("tiny", "resnet", "vit", "mlp", "imagenet-resnet50-hardened", "authors-vit-imagenet")
FIGURE22 = Experiment(
    "figure22",
    "Figure 22",
    "Certified accuracy by class",
    "Classes differ widely: some are certified whole, some hardly at all.",
    tuple(
        Line(plan, part, printed)
        for model in CLASS_MODELS
        for plan in [usual(model)]
        for part in PARTS
        for printed in [
            {0.0: {"certified": 4.0}, 1.0: {"certified": 100.0}}.get(PARTS[part], {}) if "authors" in model else {}
        ]
    ),
    (CERTIFIED,),
    by_class,
    variant="Class",
)

FIGURE21 = Experiment(
    "figure21",
    "Figure 21",
    "Small objects under a patch",
    "A patch of 2% of the image can hide a small object whole, so no classifier could be certified there.",
    (),
    (),
    accuracies,
    pictures=small_objects,
)
