"""Lay what was measured before there were experiments (results/zoo.json, results/attacks.json) beside their findings.

    python benchmarks/findings.py --out results/reproduce

These are the very jobs that Tables 2, 3, 5 and 8 declare: the zoo on all 10,000 CIFAR-10 test images, and an
attack on 200 of them. Rows of other weights than those in the repository are left out.
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

Found = dict[str, Finding]


def share(percent: float, images: int) -> Share:
    """The count behind a printed percentage, which has digits enough for it."""
    return Share(round(percent * images / 100), images)


def zoo(rows: list[dict[str, Any]]) -> Found:
    """By the name of the plan."""
    found: Found = {}
    for row in rows:
        if row["weights"] != read_card(zoo_folder(row["model"]))["weights_sha256"]:
            continue
        shares = {key: share(row[key], row["images"]) for key in ("undefended", "clean", "certified", "row_certified")}
        origin = {"command": row["command"], "versions": row["versions"], "device": "cuda", "precision": "fast"}
        plan = plan_of(NAMES[row["model"]], int(row["patch"].split("x")[0]))
        spent = {"classifications": row["classifications"] / row["images"]}
        found[plan.slug] = Finding({**shares, **spent}, row["images"], origin)
    return found


def attacks(rows: list[dict[str, Any]]) -> Found:
    """The undefended row and the defended one of each attack, as one finding."""
    found: Found = {}
    for row in rows:
        plan = plan_of(NAMES[row["model"]], int(row["patch"].split("x")[0]))
        key = f"{plan.slug}-attacked-{row['iterations']}-{row['locations']}"
        name = "undefended_under_attack" if row["defense"] == "none" else "robust"
        values = {name: share(row["robust_accuracy"], row["images"])}
        if row["certified_accuracy"] is not None:
            values["certified"] = share(row["certified_accuracy"], row["images"])
        before = found[key].values if key in found else {}
        origin = {k: row[k] for k in ("command", "versions", "seed")} | {"device": "cpu", "precision": "exact"}
        found[key] = Finding({**before, **values}, row["images"], origin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"))
    given = parser.parse_args()
    rows = {
        name: json.loads((given.results / f"{name}.json").read_text(encoding="utf-8")) for name in ("zoo", "attacks")
    }
    found = zoo(rows["zoo"]) | attacks(rows["attacks"])
    for name in ("table2", "table3", "table5", "table8"):
        experiment = EXPERIMENTS[name]
        mine = {line.key: found[line.plan.slug] for line in experiment.lines if line.plan.slug in found}
        write_section(section(experiment, keep(experiment, mine, given.out)), given.out)
        print(f"{name}: {len(mine)} lines")


if __name__ == "__main__":
    main()
