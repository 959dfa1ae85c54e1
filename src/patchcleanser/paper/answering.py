"""Table 7 and Figure 10: how long an answer takes, by double-masking and by challenger masking."""

from __future__ import annotations

from patchcleanser.paper.base import Experiment, Line
from patchcleanser.paper.claims import compares
from patchcleanser.paper.models import FAMILIES
from patchcleanser.paper.plans import timed, usual
from patchcleanser.paper.reading import answers
from patchcleanser.paper.reading import timed as times
from patchcleanser.reports.tables import CERTIFIED, CLEAN, Column

DOUBLE, CHALLENGER, ALONE = "double-masking", "challenger-masking", "undefended"
TIME = Column("milliseconds", "Milliseconds an image", 1)
SPENT = Column("classifications", "Classifications an image", 1)

PAPER = {"ResNet": (12.9, 60.2, 569.5), "ViT": (16.7, 78.8, 672.4), "MLP": (21.7, 91.8, 834.8)}
"""Undefended, 2×2 and 6×6 masks, in milliseconds on one RTX 2080 Ti."""
OURS = {"tiny": "ResNet", "resnet": "ResNet", "vit": "ViT", "mlp": "MLP", "imagenet-resnet50-hardened": "ResNet"}


def _lines(model: str, family: str) -> list[Line]:
    alone, few, many = PAPER[family]
    cells = ((6, ALONE, alone), (2, DOUBLE, few), (6, DOUBLE, many))
    return [Line(timed(usual(model, masks=k)), how, {"milliseconds": ms}) for k, how, ms in cells]


TABLE7 = Experiment(
    "table7",
    "Table 7",
    "Time per image",
    "A defended answer takes a few to a few dozen classifications' time.",
    tuple(
        line
        for model, family in (*OURS.items(), *((f"authors-{f.lower()}-imagenet", f) for f in FAMILIES))
        for line in _lines(model, family)
    ),
    (TIME, SPENT),
    times,
    variant="Defense",
)

MODELS = (*OURS, "authors-vit-imagenette", "authors-vit-imagenet", "authors-vit-cifar10")
FIGURE10 = Experiment(
    "figure10",
    "Figure 10",
    "Challenger masking against double-masking",
    "Challenger masking asks less of the classifier for the same certificate, at slightly lower clean accuracy.",
    tuple(
        Line(plan := usual(model), defense, timed=timed(plan)) for model in MODELS for defense in (DOUBLE, CHALLENGER)
    ),
    (CLEAN, CERTIFIED, SPENT, TIME),
    answers,
    variant="Defense",
    claims=(
        compares("classifications", DOUBLE, CHALLENGER, "Challenger masking needs fewer classifications"),
        compares("clean", CHALLENGER, DOUBLE, "It is at most slightly less accurate (1 point)", most=1.0),
    ),
)
