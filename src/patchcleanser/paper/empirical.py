"""Table 8: what attackers reach that were really run, beside what is certified."""

from __future__ import annotations

from dataclasses import replace

from patchcleanser.paper.base import Claim, Experiment, Line, Series, percent
from patchcleanser.paper.plans import usual
from patchcleanser.paper.reading import attacked
from patchcleanser.reports.tables import Column

BUDGETS = ((100, 1), (200, 10))
PAPER = {
    "imagenette": ((7.0, 98.5), (0.0, 97.3), 95.4),
    "imagenet": ((1.7, 77.2), (0.0, 69.9), 63.6),
    "cifar10": ((4.2, 96.4), (0.0, 93.7), 90.2),
}
"""Undefended and defended under each budget, and certified, of ViT on 1,000 images."""
MODELS = {"tiny": "cifar10", "resnet": "cifar10", "vit": "cifar10", "imagenet-resnet50-hardened": "imagenet"}
THEIRS = {f"authors-vit-{data}": data for data in PAPER}


def _lines(model: str, data: str) -> list[Line]:
    plan = replace(usual(model), table=False, work="attack", images=1000)
    *under, certified = PAPER[data]
    lines = []
    for (iterations, locations), pair in zip(BUDGETS, under, strict=True):
        undefended, robust = pair
        printed = {"undefended_under_attack": undefended, "robust": robust, "certified": certified}
        budget = f"{iterations} iterations, {locations} location{'s' if locations > 1 else ''}"
        lines.append(Line(replace(plan, iterations=iterations, locations=locations), budget, printed))
    return lines


def _above() -> Claim:
    def holds(series: Series) -> tuple[bool, str] | None:
        pairs = [(percent(f.values["robust"]), percent(f.values["certified"])) for _, f in series]
        words = ", ".join(f"{robust:.1f} under attack and {certified:.1f} certified" for robust, certified in pairs)
        return (all(robust >= certified for robust, certified in pairs), words) if pairs else None

    return Claim("No attack that was run gets below the certified accuracy", holds)


TABLE8 = Experiment(
    "table8",
    "Table 8",
    "Empirical against certified",
    "Stronger attackers lower the accuracy that is measured, never below the one that is certified.",
    tuple(line for model, data in {**MODELS, **THEIRS}.items() for line in _lines(model, data)),
    (
        Column("undefended_under_attack", "Undefended under attack, %"),
        Column("robust", "Defended under attack, %"),
        Column("certified", "Certified, %"),
    ),
    attacked,
    variant="Attacker",
    claims=(_above(),),
)
