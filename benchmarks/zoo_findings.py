"""Lay the zoo's measurements on all 10,000 CIFAR-10 test images (results/zoo.json) beside the experiments' findings.

    python benchmarks/zoo_findings.py --out results/reproduce

They are the very jobs that Tables 2, 3 and 5 declare, run by benchmarks/zoo.py before there were experiments.
Rows of other weights than those in the repository are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from patchcleanser.classifiers.trained import read_card, zoo_folder
from patchcleanser.core.metrics import Share
from patchcleanser.experiments import EXPERIMENTS, Finding
from patchcleanser.experiments.collecting import keep
from patchcleanser.experiments.pages import section, write_section
from patchcleanser.experiments.plans import plan_of

NAMES = {"tiny": "tiny", "cifar10-resnet": "resnet", "cifar10-vit": "vit", "cifar10-mlp": "mlp"}


def finding(row: dict[str, Any]) -> Finding:
    """Percent of 10,000 images with two digits behind the point are exact counts."""
    images = row["images"]
    shares = {
        name: Share(round(row[name] * images / 100), images)
        for name in ("undefended", "clean", "certified", "row_certified")
    }
    spent = {"classifications": row["classifications"] / images}
    origin = {key: row[key] for key in ("command", "versions")}
    return Finding({**shares, **spent}, images, {**origin, "device": "cuda", "precision": "fast"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, default=Path("results/zoo.json"))
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"))
    given = parser.parse_args()
    found = {
        plan_of(NAMES[row["model"]], int(row["patch"].split("x")[0])).slug: finding(row)
        for row in json.loads(given.rows.read_text(encoding="utf-8"))
        if row["weights"] == read_card(zoo_folder(row["model"]))["weights_sha256"]
    }
    for name in ("table2", "table3", "table5"):
        experiment = EXPERIMENTS[name]
        mine = {line.key: found[line.plan.slug] for line in experiment.lines if line.plan.slug in found}
        write_section(section(experiment, keep(experiment, mine, given.out)), given.out)
        print(f"{name}: {len(mine)} lines")


if __name__ == "__main__":
    main()
