"""Tables 7 and 8, Figures 9 and 10: double-masking beside its cost, attacks, and two other defenses with masks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from patchcleanser.paper.experiments import (
    MASKING,
    Axis,
    Claim,
    Experiment,
    PaperRow,
    Result,
    Series,
    has_more,
    percent,
)
from patchcleanser.paper.measurements import latency, minority_reports, recovery_defense, under_attack
from patchcleanser.paper.models import FAMILIES, PAPER_MODELS, usual_patch, usual_rows
from patchcleanser.reports.tables import ALERTS, CERTIFIED, CLASSIFICATIONS, CLEAN, DETECTION, Column

TIME = Column("milliseconds", "Milliseconds an image", 1)

TIMED = ("tiny", "resnet", "vit", "mlp", "imagenet-resnet50-hardened")
OURS = (*TIMED, "imagenette-resnet50")
AUTHORS = ("authors-vit-imagenette", "authors-vit-imagenet", "authors-vit-cifar10")

TIMES_PRINTED = {"ResNet": (12.9, 60.2, 569.5), "ViT": (16.7, 78.8, 672.4), "MLP": (21.7, 91.8, 834.8)}
"""Undefended, 2×2 and 6×6 masks, in milliseconds on one RTX 2080 Ti."""
TABLE7 = Experiment(
    "table7",
    "Table 7",
    "Time per image",
    "A defended answer takes a few to a few dozen classifications' time.",
    tuple(
        PaperRow(usual_patch(model, masks=masks).timing, defense, {"milliseconds": milliseconds})
        for model in (*TIMED, *(f"authors-{family.lower()}-imagenet" for family in FAMILIES))
        for (masks, defense), milliseconds in zip(
            ((6, "undefended"), (2, MASKING), (6, MASKING)), TIMES_PRINTED[PAPER_MODELS[model].family], strict=True
        )
    ),
    (TIME, CLASSIFICATIONS),
    latency,
    variant="Defense",
)

CHALLENGER = "challenger-masking"
FIGURE10 = Experiment(
    "figure10",
    "Figure 10",
    "Challenger masking against double-masking",
    "Challenger masking asks less of the classifier for the same certificate, at slightly lower clean accuracy.",
    usual_rows((*OURS, *AUTHORS), (MASKING, CHALLENGER), {}, timed=True),
    (CLEAN, CERTIFIED, CLASSIFICATIONS, TIME),
    recovery_defense,
    variant="Defense",
    claims=(
        Claim(
            "Challenger masking needs fewer classifications", partial(has_more, "classifications", MASKING, CHALLENGER)
        ),
        Claim(
            "It is at most slightly less accurate (1 point)",
            partial(has_more, "clean", CHALLENGER, MASKING, tolerance=1.0),
        ),
    ),
)

ATTACKS_PRINTED = {
    "imagenette": (((7.0, 98.5), (0.0, 97.3)), 95.4),
    "imagenet": (((1.7, 77.2), (0.0, 69.9)), 63.6),
    "cifar10": (((4.2, 96.4), (0.0, 93.7)), 90.2),
}
"""Undefended and defended accuracy under each budget, and certified accuracy, of ViT on 1,000 images."""


def _attacks(model: str) -> list[PaperRow]:
    pairs, certified = ATTACKS_PRINTED[PAPER_MODELS[model].data]
    rows = []
    for (iterations, locations), (undefended, robust) in zip(((100, 1), (200, 10)), pairs, strict=True):
        printed = {"undefended_under_attack": undefended, "robust": robust, "certified": certified}
        budget = f"{iterations} iterations, {locations} location{'s' if locations > 1 else ''}"
        spec = replace(usual_patch(model), table=False, kind="attack", images=1000)
        rows.append(PaperRow(replace(spec, iterations=iterations, locations=locations), budget, printed))
    return rows


def _never_below_certified(series: Series) -> Result:
    pairs = [(percent(m.values["robust"]), percent(m.values["certified"])) for _, m in series]
    numbers = ", ".join(f"{robust:.1f} under attack and {certified:.1f} certified" for robust, certified in pairs)
    return (all(robust >= certified for robust, certified in pairs), numbers) if pairs else None


TABLE8 = Experiment(
    "table8",
    "Table 8",
    "Empirical against certified",
    "Stronger attackers lower the accuracy that is measured, never below the one that is certified.",
    tuple(
        row
        for model in ("tiny", "resnet", "vit", "imagenet-resnet50-hardened", "imagenette-resnet50", *AUTHORS)
        for row in _attacks(model)
    ),
    (
        Column("undefended_under_attack", "Undefended under attack, %"),
        Column("robust", "Defended under attack, %"),
        Column("certified", "Certified, %"),
    ),
    under_attack,
    variant="Attacker",
    claims=(Claim("No attack that was run gets below the certified accuracy", _never_below_certified),),
)

THRESHOLDS = tuple(f"{step / 20:.2f}" for step in range(21))
DETECTION_PRINTED = {"0.00": {"detection_certified": 74.3}, MASKING: {"clean": 83.9, "certified": 62.1}}
"""Of ViT on ImageNet: the most that detection certifies, and double-masking beside it."""


def _detection_certifies_more(series: Series) -> Result:
    detected = [percent(m.values["detection_certified"]) for _, m in series if "detection_certified" in m.values]
    recovered = [percent(m.values["certified"]) for row, m in series if row.variant == MASKING]
    if not detected or not recovered:
        return None
    numbers = f"detection certifies {max(detected):.1f}, recovery {recovered[0]:.1f}"
    return max(detected) > recovered[0], numbers


FIGURE9 = Experiment(
    "figure9",
    "Figures 9 and 19",
    "Minority Reports",
    "A defense that may abstain certifies more images, and a threshold trades clean accuracy for it.",
    usual_rows((*OURS, *AUTHORS), (MASKING, *THRESHOLDS), DETECTION_PRINTED),
    (CLEAN, DETECTION, ALERTS, CERTIFIED),
    minority_reports,
    variant="Threshold",
    axis=Axis(
        "threshold of Minority Reports",
        lambda row, _: math.nan if row.variant == MASKING else float(row.variant),
        ("clean", "detection_certified"),
    ),
    claims=(Claim("Detection, the weaker promise, certifies more images than recovery", _detection_certifies_more),),
)
