"""Tables 5 and 6: what training with masks does, and more datasets."""

from __future__ import annotations

from patchcleanser.paper.base import Claim, Experiment, Line, Series, percent
from patchcleanser.paper.models import FAMILIES
from patchcleanser.paper.plans import usual
from patchcleanser.paper.reading import accuracies
from patchcleanser.reports.tables import CERTIFIED, CLEAN, UNDEFENDED

Pairs = dict[str, dict[str, tuple[float, float]]]

VANILLA: Pairs = {
    "ResNet": {"imagenette": (99.4, 88.1), "imagenet": (81.1, 41.6), "cifar10": (94.3, 39.4)},
    "ViT": {"imagenette": (99.3, 94.2), "imagenet": (83.6, 59.4), "cifar10": (97.9, 77.5)},
    "MLP": {"imagenette": (98.6, 91.3), "imagenet": (79.6, 53.1), "cifar10": (95.6, 62.0)},
}
CUTOUT: Pairs = {
    "ResNet": {"imagenette": (99.6, 94.4), "imagenet": (81.6, 53.0), "cifar10": (97.8, 78.8)},
    "ViT": {"imagenette": (99.6, 96.4), "imagenet": (83.9, 62.1), "cifar10": (98.7, 89.1)},
    "MLP": {"imagenette": (99.3, 95.3), "imagenet": (79.4, 53.8), "cifar10": (97.0, 78.0)},
}
MORE_VANILLA: Pairs = {
    "ResNet": {"flowers102": (93.9, 61.0), "cifar100": (85.1, 18.8), "svhn": (96.6, 0.9)},
    "ViT": {"flowers102": (99.6, 96.3), "cifar100": (91.5, 54.2), "svhn": (96.3, 18.4)},
    "MLP": {"flowers102": (92.4, 60.3), "cifar100": (83.0, 32.6), "svhn": (94.6, 8.8)},
}
MORE_CUTOUT: Pairs = {
    "ResNet": {"flowers102": (96.9, 84.8), "cifar100": (88.2, 53.6), "svhn": (96.9, 65.3)},
    "ViT": {"flowers102": (99.6, 98.0), "cifar100": (92.7, 69.2), "svhn": (97.8, 71.7)},
    "MLP": {"flowers102": (95.1, 79.2), "cifar100": (85.6, 50.6), "svhn": (95.5, 57.0)},
}
MASKS = {"with cutout": "", "vanilla": "-vanilla"}


def _line(model: str, how: str, pair: tuple[float, float]) -> Line:
    return Line(usual(model), how, {"clean": pair[0], "certified": pair[1]})


def _both(cutout: Pairs, vanilla: Pairs) -> list[Line]:
    """The authors' models, and ours of the same families where there are any."""
    lines: list[Line] = []
    for data in cutout["ResNet"]:
        for how, pairs in (("with cutout", cutout), ("vanilla", vanilla)):
            for family in FAMILIES:
                pair = pairs[family][data]
                names = [*_ours(family, data, how), f"authors-{family.lower()}-{data}{MASKS[how]}"]
                lines += [_line(name, how, pair) for name in names]
    return lines


def _ours(family: str, data: str, how: str) -> list[str]:
    if data in ("imagenette", "imagenet"):
        return []
    tuned = {"cifar10": ("resnet50-128", "resnet50"), "flowers102": ("resnet50",)}.get(data, ())
    large = [f"{data}-{network}{MASKS[how]}" for network in tuned if family == "ResNet"]
    large += [f"{data}-resnet50-128-longer"] if (data, family, how) == ("cifar10", "ResNet", "with cutout") else []
    if data == "flowers102":
        return large
    zoo = (
        [family.lower()] if data == "cifar10" and how == "with cutout" else []
    )  # it learnt longer than its family's others
    return [*zoo, f"{data}-{family.lower()}{MASKS[how]}", *large]


def _network(line: Line) -> str:
    """The network without its training, so that a model meets its vanilla twin, which learnt as long."""
    return line.plan.model.removesuffix("-vanilla")


def _helps() -> Claim:
    def holds(series: Series) -> tuple[bool, str] | None:
        found: dict[str, dict[str, float]] = {}
        for line, finding in series:
            found.setdefault(_network(line), {})[line.variant] = percent(finding.values["certified"])
        both = {name: hows for name, hows in found.items() if len(hows) == len(MASKS)}
        if not both:
            return None
        words = ", ".join(f"{name} {hows['vanilla']:.1f} to {hows['with cutout']:.1f}" for name, hows in both.items())
        return all(hows["with cutout"] > hows["vanilla"] for hows in both.values()), f"certified {words}"

    return Claim("Training with masks raises certified accuracy in every family", holds, across_models=True)


TABLE5 = Experiment(
    "table5",
    "Table 5",
    "Cutout training",
    "Training with two masks helps all three families, on CIFAR-10 most of all.",
    tuple(_both(CUTOUT, VANILLA)),
    (CLEAN, CERTIFIED, UNDEFENDED),
    accuracies,
    variant="Training",
    claims=(_helps(),),
)

TABLE6 = Experiment(
    "table6",
    "Table 6",
    "More datasets",
    "The defense works on Flowers-102, CIFAR-100 and SVHN as well, the more so after training with masks.",
    tuple(_both(MORE_CUTOUT, MORE_VANILLA)),
    (CLEAN, CERTIFIED, UNDEFENDED),
    accuracies,
    variant="Training",
    claims=(_helps(),),
)
