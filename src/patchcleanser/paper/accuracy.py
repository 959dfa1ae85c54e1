"""Tables 2, 3, 5 and 6: clean and certified accuracy, what models reach undefended, and what cutout training does."""

from __future__ import annotations

from itertools import product

from patchcleanser.paper.baselines import PATCHES, RECOVERING
from patchcleanser.paper.experiments import Claim, Experiment, PaperRow, Result, Series, percent, published_values
from patchcleanser.paper.measurements import accuracies
from patchcleanser.paper.models import FAMILIES, IMAGENETTE, PAPER_MODELS, USUAL, square_patch, usual_patch
from patchcleanser.reports.tables import CERTIFIED, CLASSIFICATIONS, CLEAN, ROW_CERTIFIED, UNDEFENDED

SIDES = {"imagenette": (23, 32, 39), "imagenet": (23, 32, 39), "cifar10": (2, 5)}
"""The paper's patches: 1, 2 and 3% of 224×224 for photographs, 0.4 and 2.4% of 32×32 for CIFAR-10."""
METHODS = {
    "ResNet": "PatchCleanser, ResNetV2-50",
    "ViT": "PatchCleanser, ViT-B/16",
    "MLP": "PatchCleanser, ResMLP-24",
}

OURS = ("tiny", "resnet", "vit", "mlp", "cifar10-resnet50-128-longer", "cifar10-resnet50")
BEST = ("cifar10-resnet-wide", "cifar10-resnet50-at-32")
MODELS = (
    *OURS,
    *BEST,
    *(f"imagenette-{network}" for network in IMAGENETTE),
    *(
        f"imagenet-{network}{suffix}"
        for network in ("resnet50", "mobilenet")
        for suffix in ("", "-hardened", "-filled-in")
    ),
    *(f"authors-{family.lower()}-{data}" for data in SIDES for family in FAMILIES),
)


def _printed(name: str, side: int, *measures: str) -> dict[str, float]:
    """The paper's numbers for a model's family, dataset and training."""
    model = PAPER_MODELS[name]
    method = METHODS[model.family] + (", no cutout training" if model.cutout is False else "")
    return published_values(method, model.data, side, *measures)


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
    (CLEAN, CERTIFIED, ROW_CERTIFIED, CLASSIFICATIONS),
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

TRAININGS = {"with cutout": True, "vanilla": False}


def _by_training(*datasets: str) -> tuple[PaperRow, ...]:
    """Every model of these datasets that was trained with or without cutout."""
    rows: list[PaperRow] = []
    for data, training, family in product(datasets, TRAININGS, FAMILIES):
        group = (data, TRAININGS[training], family)
        for model in (m.name for m in PAPER_MODELS.values() if (m.data, m.cutout, m.family) == group):
            rows.append(PaperRow(usual_patch(model), training, _printed(model, USUAL[data], "clean", "certified")))
    return tuple(rows)


def _cutout_helps(series: Series) -> Result:
    certified: dict[str, dict[str, float]] = {}
    for row, measurement in series:
        network = row.spec.model.removesuffix("-vanilla")  # compared with its vanilla twin only, which trained as long
        certified.setdefault(network, {})[row.variant] = percent(measurement.values["certified"])
    pairs = {name: values for name, values in certified.items() if len(values) == len(TRAININGS)}
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
