"""Add what other benchmarks measured (results/zoo.json, harden.json, attacks.json) to the experiments' measurements.

    python benchmarks/findings.py --out results/reproduce

These are the very jobs that Tables 2, 3, 5 and 8 declare: the zoo on all 10,000 CIFAR-10 test images, the untouched and
hardened networks on 2,000 of ImageNet, and attacks on 1,000 of CIFAR-10. Rows of other weights than those in the
repository, of other classifiers around them, or hardened in other ways than declared, are left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from patchcleanser.classifiers.trained import read_card, zoo_folder
from patchcleanser.paper import EXPERIMENTS, Measurement
from patchcleanser.paper.measurements import merge_measurements
from patchcleanser.paper.models import PAPER_MODELS, square_patch
from patchcleanser.paper.pages import Section
from patchcleanser.records.metrics import Proportion
from patchcleanser.training.recipes import HardenSettings

NAMES = {
    "tiny": "tiny",
    "cifar10-resnet": "resnet",
    "cifar10-vit": "vit",
    "cifar10-mlp": "mlp",
    "cifar10-resnet50-128-longer": "cifar10-resnet50-128-longer",
    "resnet50": "imagenet-resnet50",
    "mobilenet_v2": "imagenet-mobilenet",
}

LARGER = {"cifar10-resnet50-128-longer": "f51b9ce56aa820f8879fa74f8e6465333f5b407f122edc21f13d9c11a48e67f8"}
"""Networks reported beside the zoo, and their weights."""

NEEDED = ("zoo", "harden", "attacks")

Measurements = dict[str, Measurement]


def share(percent: float, images: int) -> Proportion:
    """The count behind a printed percentage, which has digits enough for it."""
    return Proportion(round(percent * images / 100), images)


def certified(row: dict[str, Any], side: int, name: str | None = None) -> Measurements:
    """One row of a certification, by the slug of its run."""
    shares = {key: share(row[key], row["images"]) for key in ("undefended", "clean", "certified", "row_certified")}
    origin = {"command": row["command"], "versions": row["versions"], "device": "cuda", "precision": "fast"}
    cost = {"classifications": row["classifications"] / row["images"]}
    spec = square_patch(name or NAMES[row["model"]], side, grid=row["grid"])
    return {spec.slug: Measurement({**shares, **cost}, row["images"], origin)}


def zoo(rows: list[dict[str, Any]]) -> Measurements:
    """Of the weights in the repository, and of the larger network beside them."""
    measurements: Measurements = {}
    for row in rows:
        if row["model"] in NAMES and row["weights"] == _weights(row["model"]):
            measurements |= certified(row, int(row["patch"].split("x")[0]))
    return measurements


def _weights(name: str) -> str:
    """The hash of the weights that are reported under this name."""
    return LARGER.get(name) or str(read_card(zoo_folder(name))["weights_sha256"])


def imagenet(rows: list[dict[str, Any]]) -> Measurements:
    """Networks as they came, or hardened as declared; 2% of 224×224 are 32×32 pixels."""
    hardened = {("grey", "once"): "-hardened", ("filled in", "with its mirror image"): "-filled-in"}
    measurements: Measurements = {}
    for row in rows:
        masks = row["hidden"], row["asked"]
        how = hardened.get(masks) if row["photos"] else "" if masks == ("grey", "once") else None
        if how is None or (row["patch"], row["input"]) != ("2%", 224):
            continue
        name = NAMES[row["model"]] + how
        if not row["photos"] or _settings(row["harden_command"]) == _settings(PAPER_MODELS[name].training):
            measurements |= certified(row, 32, name)
    return measurements


def _settings(command: str | None) -> dict[str, Any]:
    """What a `harden` command sets, apart from the model, the photos and where the copy goes."""
    words = shlex.split(command or "")
    settings: dict[str, Any] = {f"--{name}": value for name, value in asdict(HardenSettings()).items()}
    for option, value in pairwise([*words, "--"]):
        if option.startswith("--") and option not in ("--model", "--images", "--limit", "--out"):
            number = value[0].isdigit() and value[-1].isdigit()  # as 6e-5, not 2%
            settings[option] = float(value) if number else "" if value.startswith("--") else value
    return settings


def attacks(rows: list[dict[str, Any]]) -> Measurements:
    """The undefended row and the defended one of each attack, as one measurement."""
    measurements: Measurements = {}
    for row in rows:
        if row["attack"] != "apgd":
            continue
        spec = square_patch(NAMES[row["model"]], int(row["patch"].split("x")[0]))
        key = f"{spec.slug}-attacked-{row['iterations']}-{row['locations']}"
        name = "undefended_under_attack" if row["defense"] == "none" else "robust"
        values = {name: share(row["robust_accuracy"], row["images"])}
        if row["certified_accuracy"] is not None:
            values["certified"] = share(row["certified_accuracy"], row["images"])
        before = measurements[key].values if key in measurements else {}
        origin = {k: row[k] for k in ("command", "versions", "seed")} | {"precision": "exact"}
        origin["device"] = "cuda" if "NVIDIA" in row["versions"]["hardware"] else "cpu"
        measurements[key] = Measurement({**before, **values}, row["images"], origin)
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"))
    args = parser.parse_args()
    rows = {name: json.loads((args.results / f"{name}.json").read_text(encoding="utf-8")) for name in NEEDED}
    measurements = zoo(rows["zoo"]) | imagenet(rows["harden"]) | attacks(rows["attacks"])
    for name in ("table2", "table3", "table5", "table8"):
        experiment = EXPERIMENTS[name]
        new = {row.key: measurements[row.spec.slug] for row in experiment.rows if row.spec.slug in measurements}
        Section(experiment, merge_measurements(experiment, new, args.out)).write(args.out)
        print(f"{name}: {len(new)} rows")


if __name__ == "__main__":
    main()
