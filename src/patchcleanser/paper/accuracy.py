"""Tables 2, 3, 5 and 6: clean and certified accuracy, what models reach undefended, and what cutout training does."""

from __future__ import annotations

from patchcleanser.paper.baselines import PATCHES, RECOVERING
from patchcleanser.paper.catalog import FAMILIES, square_patch, usual_patch
from patchcleanser.paper.experiments import Claim, Experiment, PaperRow, Series, percent
from patchcleanser.paper.measurements import accuracies
from patchcleanser.reports.results import CERTIFIED, CLEAN, ROW_CERTIFIED, UNDEFENDED

SIDES = {"imagenette": (23, 32, 39), "imagenet": (23, 32, 39), "cifar10": (2, 5)}
"""The paper's patches: 1, 2 and 3% of 224×224 for photographs, 0.4 and 2.4% of 32×32 for CIFAR-10."""

CLEAN_CERTIFIED = {
    "ResNet": {
        "imagenette": ((99.6, 96.4), (99.6, 94.4), (99.5, 93.5)),
        "imagenet": ((81.7, 58.4), (81.6, 53.0), (81.4, 50.0)),
        "cifar10": ((98.0, 88.5), (97.8, 78.8)),
    },
    "ViT": {
        "imagenette": ((99.6, 97.5), (99.6, 96.4), (99.5, 95.3)),
        "imagenet": ((84.1, 66.4), (83.9, 62.1), (83.8, 59.0)),
        "cifar10": ((99.0, 94.3), (98.7, 89.1)),
    },
    "MLP": {
        "imagenette": ((99.4, 96.8), (99.3, 95.3), (99.4, 94.6)),
        "imagenet": ((79.6, 58.4), (79.4, 53.8), (79.3, 50.7)),
        "cifar10": ((97.4, 86.1), (97.0, 78.0)),
    },
}
"""Printed in Table 2, for each of the sides."""
UNDEFENDED_PRINTED = {
    "ResNet": {"imagenette": 99.8, "imagenet": 82.3, "cifar10": 98.3},
    "ViT": {"imagenette": 99.8, "imagenet": 84.8, "cifar10": 99.0},
    "MLP": {"imagenette": 99.5, "imagenet": 80.2, "cifar10": 97.8},
}

MODELS = [
    ("tiny", "ResNet", "cifar10"),
    ("resnet", "ResNet", "cifar10"),
    ("vit", "ViT", "cifar10"),
    ("mlp", "MLP", "cifar10"),
    ("cifar10-resnet50-128-longer", "ResNet", "cifar10"),
    ("cifar10-resnet50", "ResNet", "cifar10"),
    *(
        (f"imagenet-{network}{training}", "ResNet", "imagenet")
        for network in ("resnet50", "mobilenet")
        for training in ("", "-hardened", "-filled-in")
    ),
    *((f"authors-{family.lower()}-{data}", family, data) for data in SIDES for family in FAMILIES),
]
"""Model, the paper's family that it is compared with, and dataset: ours first, then the authors'."""


def _table2() -> list[PaperRow]:
    """Every model with every patch of its dataset, enlarged CIFAR-10 also on its own pixels; then the baselines."""
    rows: list[PaperRow] = []
    for model, family, data in MODELS:
        for side, (clean, certified) in zip(SIDES[data], CLEAN_CERTIFIED[family][data], strict=True):
            specs = dict.fromkeys([square_patch(model, side), square_patch(model, side, grid="source")])
            rows += [PaperRow(spec, printed={"clean": clean, "certified": certified}) for spec in specs]
    return rows + [baseline.row(patch) for baseline in RECOVERING for patch in PATCHES]


TABLE2 = Experiment(
    "table2",
    "Table 2",
    "Clean and certified accuracy",
    "Any classifier can be defended, with little loss of clean accuracy and far more certified than before.",
    tuple(_table2()),
    (CLEAN, CERTIFIED, ROW_CERTIFIED),
    accuracies,
)

TABLE3 = Experiment(
    "table3",
    "Table 3",
    "Undefended models",
    "What the same networks reach without a defense: the defended ones come within two points of it.",
    tuple(PaperRow(usual_patch(m), printed={"undefended": UNDEFENDED_PRINTED[f][d]}) for m, f, d in MODELS),
    (UNDEFENDED, CLEAN),
    accuracies,
)

Pairs = dict[str, dict[str, tuple[float, float]]]
"""Printed clean and certified accuracy by family and dataset."""

VANILLA: Pairs = {
    "ResNet": {"imagenette": (99.4, 88.1), "imagenet": (81.1, 41.6), "cifar10": (94.3, 39.4)},
    "ViT": {"imagenette": (99.3, 94.2), "imagenet": (83.6, 59.4), "cifar10": (97.9, 77.5)},
    "MLP": {"imagenette": (98.6, 91.3), "imagenet": (79.6, 53.1), "cifar10": (95.6, 62.0)},
}
CUTOUT: Pairs = {
    family: {data: printed[1] for data, printed in datasets.items()} for family, datasets in CLEAN_CERTIFIED.items()
}
"""Table 5 repeats Table 2's second patch."""
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
SUFFIX = {"with cutout": "", "vanilla": "-vanilla"}


def _by_training(cutout: Pairs, vanilla: Pairs) -> tuple[PaperRow, ...]:
    """Every model with and without cutout training."""
    return tuple(
        PaperRow(usual_patch(model), training, dict(zip(("clean", "certified"), pairs[family][data], strict=True)))
        for data in cutout["ResNet"]
        for training, pairs in (("with cutout", cutout), ("vanilla", vanilla))
        for family in FAMILIES
        for model in _trained(family, data, training)
    )


def _trained(family: str, data: str, training: str) -> list[str]:
    """Our models of a family, dataset and training, and the authors'."""
    names = [f"authors-{family.lower()}-{data}{SUFFIX[training]}"]
    if family == "ResNet":
        tuned = {"cifar10": ["resnet50-128", "resnet50"], "flowers102": ["resnet50"]}.get(data, [])
        longer = [f"{data}-resnet50-128-longer"] if (data, training) == ("cifar10", "with cutout") else []
        names = [*(f"{data}-{network}{SUFFIX[training]}" for network in tuned), *longer, *names]
    if data in ("cifar10", "cifar100", "svhn"):
        names = [f"{data}-{family.lower()}{SUFFIX[training]}", *names]
    if (data, training) == ("cifar10", "with cutout"):
        names = [family.lower(), *names]  # the zoo's, which trained longer than the others of its family
    return names


def _cutout_helps(series: Series) -> tuple[bool, str] | None:
    certified: dict[str, dict[str, float]] = {}
    for row, measurement in series:
        # A model is compared with its vanilla twin only, which trained as long.
        network = row.spec.model.removesuffix(SUFFIX[row.variant])
        certified.setdefault(network, {})[row.variant] = percent(measurement.values["certified"])
    pairs = {name: values for name, values in certified.items() if len(values) == len(SUFFIX)}
    if not pairs:
        return None
    numbers = ", ".join(f"{name} {v['vanilla']:.1f} to {v['with cutout']:.1f}" for name, v in pairs.items())
    return all(values["with cutout"] > values["vanilla"] for values in pairs.values()), f"certified {numbers}"


CUTOUT_HELPS = Claim("Training with masks raises certified accuracy in every family", _cutout_helps, across_models=True)

TABLE5 = Experiment(
    "table5",
    "Table 5",
    "Cutout training",
    "Training with two masks helps all three families, on CIFAR-10 most of all.",
    _by_training(CUTOUT, VANILLA),
    (CLEAN, CERTIFIED, UNDEFENDED),
    accuracies,
    variant="Training",
    claims=(CUTOUT_HELPS,),
)

TABLE6 = Experiment(
    "table6",
    "Table 6",
    "More datasets",
    "The defense works on Flowers-102, CIFAR-100 and SVHN as well, the more so after training with masks.",
    _by_training(MORE_CUTOUT, MORE_VANILLA),
    (CLEAN, CERTIFIED, UNDEFENDED),
    accuracies,
    variant="Training",
    claims=(CUTOUT_HELPS,),
)
