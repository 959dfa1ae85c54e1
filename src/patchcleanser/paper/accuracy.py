"""Tables 2, 3, 5 and 6: clean and certified accuracy, what models reach undefended, and what cutout training does."""

from __future__ import annotations

from patchcleanser.paper.baselines import PATCHES, RECOVERING
from patchcleanser.paper.catalog import FAMILIES, LOW, PAPER_MODELS, USUAL, square_patch, usual_patch
from patchcleanser.paper.experiments import Claim, Experiment, PaperRow, Series, percent, published_values
from patchcleanser.paper.measurements import accuracies
from patchcleanser.reports.results import CERTIFIED, CLEAN, ROW_CERTIFIED, UNDEFENDED

SIDES = {"imagenette": (23, 32, 39), "imagenet": (23, 32, 39), "cifar10": (2, 5)}
"""The paper's patches: 1, 2 and 3% of 224×224 for photographs, 0.4 and 2.4% of 32×32 for CIFAR-10."""
METHODS = {
    "ResNet": "PatchCleanser, ResNetV2-50",
    "ViT": "PatchCleanser, ViT-B/16",
    "MLP": "PatchCleanser, ResMLP-24",
}

MODELS = (
    "tiny",
    "resnet",
    "vit",
    "mlp",
    "cifar10-resnet50-128-longer",
    "cifar10-resnet50",
    *(
        f"imagenet-{network}{suffix}"
        for network in ("resnet50", "mobilenet")
        for suffix in ("", "-hardened", "-filled-in")
    ),
    *(f"authors-{family.lower()}-{data}" for data in SIDES for family in FAMILIES),
)


def _printed(model: str, side: int, *measures: str, training: str = "") -> dict[str, float]:
    """The paper's numbers for the family and dataset of a model."""
    return published_values(METHODS[PAPER_MODELS[model].family] + training, PAPER_MODELS[model].data, side, *measures)


def _table2() -> list[PaperRow]:
    """Every model with every patch of its dataset, enlarged CIFAR-10 also on its own pixels; then the baselines."""
    rows: list[PaperRow] = []
    for model in MODELS:
        for side in SIDES[PAPER_MODELS[model].data]:
            specs = dict.fromkeys([square_patch(model, side), square_patch(model, side, grid="source")])
            rows += [PaperRow(spec, printed=_printed(model, side, "clean", "certified")) for spec in specs]
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
    tuple(PaperRow(usual_patch(m), printed=_printed(m, USUAL[PAPER_MODELS[m].data], "undefended")) for m in MODELS),
    (UNDEFENDED, CLEAN),
    accuracies,
)

SUFFIX = {"with cutout": "", "vanilla": "-vanilla"}


def _by_training(*datasets: str) -> tuple[PaperRow, ...]:
    """Every model of these datasets, trained with and without cutout."""
    rows: list[PaperRow] = []
    for data in datasets:
        for training, method in (("with cutout", ""), ("vanilla", ", no cutout training")):
            for model in (model for family in FAMILIES for model in _trained(family, data, training)):
                printed = _printed(model, USUAL[data], "clean", "certified", training=method)
                rows.append(PaperRow(usual_patch(model), training, printed))
    return tuple(rows)


def _trained(family: str, data: str, training: str) -> list[str]:
    """Our models of a family, dataset and training, and the authors'."""
    names = [f"authors-{family.lower()}-{data}{SUFFIX[training]}"]
    if family == "ResNet":
        tuned = {"cifar10": ["resnet50-128", "resnet50"], "flowers102": ["resnet50"]}.get(data, [])
        longer = [f"{data}-resnet50-128-longer"] if (data, training) == ("cifar10", "with cutout") else []
        names = [*(f"{data}-{network}{SUFFIX[training]}" for network in tuned), *longer, *names]
    if data in LOW:
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
    _by_training("imagenette", "imagenet", "cifar10"),
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
    _by_training("flowers102", "cifar100", "svhn"),
    (CLEAN, CERTIFIED, UNDEFENDED),
    accuracies,
    variant="Training",
    claims=(CUTOUT_HELPS,),
)
