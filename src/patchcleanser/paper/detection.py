"""Figure 9 (and 19): Minority Reports, which only detects, at every threshold on the same labels."""

from __future__ import annotations

from patchcleanser.paper.base import Axis, Claim, Experiment, Finding, Line, Series, percent
from patchcleanser.paper.plans import usual
from patchcleanser.paper.reading import RECOVERY, promises
from patchcleanser.reports.tables import ALERTS, CERTIFIED, CLEAN, DETECTION

THRESHOLDS = tuple(f"{step / 20:.2f}" for step in range(21))
MODELS = ("tiny", "resnet", "vit", "mlp", "imagenet-resnet50-hardened")
THEIRS = ("authors-vit-imagenette", "authors-vit-imagenet", "authors-vit-cifar10")
PAPER = {"0.00": {"detection_certified": 74.3}, RECOVERY: {"clean": 83.9, "certified": 62.1}}
"""Of ViT on ImageNet: the most that detection certifies, and double-masking beside it."""


def _lines(model: str) -> list[Line]:
    printed = PAPER if model == "authors-vit-imagenet" else {}
    return [Line(usual(model), variant, printed.get(variant, {})) for variant in (RECOVERY, *THRESHOLDS)]


def _more() -> Claim:
    def holds(series: Series) -> tuple[bool, str] | None:
        detects = [percent(f.values["detection_certified"]) for _, f in series if "detection_certified" in f.values]
        recovers = [percent(f.values["certified"]) for line, f in series if line.variant == RECOVERY]
        if not detects or not recovers:
            return None
        words = f"detection certifies {max(detects):.1f}, recovery {recovers[0]:.1f}"
        return max(detects) > recovers[0], words

    return Claim("Detection, the weaker promise, certifies more images than recovery", holds)


def _threshold(line: Line, found: Finding) -> float:
    return float("nan") if line.variant == RECOVERY else float(line.variant)


FIGURE9 = Experiment(
    "figure9",
    "Figures 9 and 19",
    "Minority Reports",
    "A defense that may abstain certifies more images, and a threshold trades clean accuracy for it.",
    tuple(line for model in (*MODELS, *THEIRS) for line in _lines(model)),
    (CLEAN, DETECTION, ALERTS, CERTIFIED),
    promises,
    variant="Threshold",
    axis=Axis("threshold of Minority Reports", _threshold, ("clean", "detection_certified")),
    claims=(_more(),),
)
