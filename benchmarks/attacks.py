"""Rows of empirical against certified accuracy, from finished runs of `patchcleanser attack`.

    patchcleanser attack --data cifar10 --patch 5 --limit 1000 --attack adaptive --locations 2 --out runs/adaptive
    python benchmarks/attacks.py runs/adaptive --out results/attacks.json

Each run gives a row for the undefended classifier and one for the defense. Rows of the same model, defense and
attack are replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zoo import keep

from patchcleanser.records.metrics import certified_fooled, summary
from patchcleanser.records.run import Run

KEY = ("model", "defense", "attack", "iterations", "locations")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    run = Run.open(folder)
    records, settings = run.read(), run.job["settings"]
    shares = {name: round(share.percent, 2) for name, share in summary(records).shares.items()}
    metadata = {
        "model": str(run.metadata["model"]).partition(":")[2],
        "attack": run.job["attack"],
        **{name: settings[name] for name in ("iterations", "locations", "places", "restarts", "loss", "seed")},
        **({"places": "weakest"} if run.job["attack"] == "adaptive" else {}),  # it finds its own
        "patch": str(run.threat.to_dict()["shape"]),
        "masks": "x".join(map(str, run.job["masks"])),
        "grid": run.threat.grid,
        "data": run.metadata["data"],
        "images": len(records),
        "command": run.metadata["command"],
        "versions": run.metadata["versions"],
    }
    return [
        {
            **metadata,
            "defense": "none",
            "clean_accuracy": shares["undefended"],
            "robust_accuracy": shares["undefended_under_attack"],
            "certified_accuracy": None,
            "certified_images_fooled": None,
        },
        {
            **metadata,
            "defense": run.job["defense"],
            "clean_accuracy": shares["clean"],
            "robust_accuracy": shares["robust"],
            "certified_accuracy": shares["certified"],
            "certified_images_fooled": len(certified_fooled(records)),
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of patchcleanser attack")
    parser.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    given = parser.parse_args()
    for folder in given.runs:
        for row in rows_of(folder):
            keep(row, given.out, KEY)
            print(*(f"{name}={row[name]}" for name in (*KEY, "robust_accuracy", "certified_accuracy")))


if __name__ == "__main__":
    main()
