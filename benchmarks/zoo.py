"""Measure trained classifiers on the whole CIFAR-10 test set and keep the rows in a JSON file.

    python benchmarks/zoo.py zoo:cifar10-resnet zoo:tiny --patch 5 --patch 2 --out results/zoo.json

Each row says what was measured, with which weights, and on what hardware. A row of the same model and
patch is replaced.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from patchcleanser import DoubleMasking, Threat, load_classifier
from patchcleanser.classifiers.trained import read_card, zoo_folder
from patchcleanser.data import load_dataset
from patchcleanser.evaluation import measure
from patchcleanser.training.cards import versions


def rows_of(spec: str, patches: list[str], limit: int | None) -> list[dict[str, object]]:
    kind, _, name = spec.partition(":")
    card = read_card(zoo_folder(name) if kind == "zoo" else Path(name))
    dataset = load_dataset("cifar10", split="test")
    rows = []
    for patch in patches:
        defense = DoubleMasking(load_classifier(spec), Threat.parse(patch), masks=6, precision="fast")
        started = time.monotonic()
        found = measure(defense, dataset, limit=limit)
        recheck = defense.masked.recheck
        row = {
            "model": Path(name).name,
            "patch": f"{patch}x{patch}",
            "masks": "6x6",
            "grid": "source",
            "images": found.images,
            "undefended": found.undefended,
            "clean": found.clean,
            "certified": found.certified,
            "row_certified": found.row_certified,
            "recipe": card["recipe"]["name"],
            "epochs": card["recipe"]["epochs"],
            "teacher": card.get("teacher"),
            "seed": card["seed"],
            "weights": card["weights_sha256"],
            "seconds": round(time.monotonic() - started, 1),
            "classifications": found.classifications,
            "labels_rechecked": recheck.rechecked,
            "labels_flipped_by_recheck": recheck.flipped,
            "flips_above_the_bound": recheck.audited_flips,
            "train_command": card["command"],
            "command": f"python benchmarks/zoo.py {spec} --patch {patch}" + (f" --limit {limit}" if limit else ""),
            "versions": versions(),
        }
        shown = ("model", "patch", "undefended", "clean", "certified", "seconds", "labels_rechecked")
        print(json.dumps({key: row[key] for key in shown}), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", help="zoo:NAME or trained:FOLDER")
    parser.add_argument("--patch", action="append", help="patch side in px; may be repeated")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/zoo.json"))
    given = parser.parse_args()
    for spec in given.models:
        new = rows_of(spec, given.patch or ["5", "2"], given.limit)
        kept = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else []
        fresh = {(row["model"], row["patch"]) for row in new}
        rows = [row for row in kept if (row["model"], row["patch"]) not in fresh] + new
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
