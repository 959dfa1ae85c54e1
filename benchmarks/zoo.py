"""Measure trained classifiers on the whole CIFAR-10 test set and keep the rows in a JSON file.

    python benchmarks/zoo.py zoo:cifar10-resnet zoo:tiny --patch 5 --patch 2 --out results/zoo.json

Each row says what was measured, with which weights, and on what hardware. A row of the same model and
patch is replaced. The run folders hold a record for each image; a run that stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from patchcleanser import Threat, load_classifier
from patchcleanser.classifiers.registry import innermost, members
from patchcleanser.classifiers.trained import read_card, zoo_folder
from patchcleanser.data import chosen, load_dataset
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.records.columns import COLUMNS
from patchcleanser.records.metrics import summary
from patchcleanser.records.provenance import versions

HARDENED = {"name": "harden"}
"""What stands for a recipe where there is none."""


def measured(job: Job, folder: Path) -> dict[str, object]:
    """What certifying a job gave, and what it took."""
    command = shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    started = time.monotonic()
    run = evaluate(job, folder, metadata={"command": command}, progress=True)
    totals = summary(run.read(COLUMNS))
    stats = job.masking.engine.stats
    return {
        "images": totals.images,
        **{name: round(share.percent, 2) for name, share in totals.shares.items() if share.total},
        "seconds": round(time.monotonic() - started, 1),
        "classifications": totals.classifications,
        "labels_rechecked": stats.rechecked,
        "labels_flipped_by_recheck": stats.flipped,
        "labels_audited": stats.audited,
        "command": command,
        "versions": versions(),
    }


def cards_of(spec: str) -> list[tuple[str, dict[str, Any]]]:
    """What each network that a spec asks is called, and its card."""
    cards = []
    for member in members(spec):
        inner = innermost(member)
        kind, _, name = inner.partition(":")
        called = member.removesuffix(inner).replace(":", "-") + Path(name).name
        cards.append((called, read_card(zoo_folder(name) if kind == "zoo" else Path(name))))
    return cards


def row_of(spec: str, patch: str, limit: int | None, runs: Path) -> dict[str, object]:
    cards = cards_of(spec)
    around = spec.removesuffix(innermost(spec)).replace(":", "-")
    called = around + ("mean-" if len(cards) > 1 else "") + "+".join(name for name, _ in cards)
    dataset = chosen(load_dataset("cifar10", split="test"), limit, subset="first")
    job = Job(load_classifier(spec), dataset, Threat.parse(patch), masks=6, precision="fast")
    row: dict[str, object] = {"model": called, "patch": f"{patch}x{patch}", "masks": "6x6", "grid": "source"}
    row |= {"data": "cifar10", "at": 32}
    row |= measured(job, runs / f"{called}-{patch}")
    facts = [
        {
            "recipe": card.get("recipe", HARDENED)["name"],
            "epochs": card.get("recipe", card.get("settings", {})).get("epochs"),
            "teacher": card.get("teacher"),
            "seed": card["seed"],
            "weights": card["weights_sha256"],
            "train_command": card["command"],
        }
        for _, card in cards
    ]
    row |= facts[0] if len(facts) == 1 else {key: [entry[key] for entry in facts] for key in facts[0]}
    print(json.dumps(row), flush=True)
    return row


def keep(row: dict[str, object], path: Path, key: tuple[str, ...]) -> None:
    """Write a row, in place of an older one with the same key."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    rows = [old for old in rows if any(old.get(name) != row[name] for name in key)] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", help="zoo:NAME or trained:FOLDER, with mirror: or mean: before")
    parser.add_argument("--patch", action="append", help="patch side in px; may be repeated")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--out", type=Path, default=Path("results/zoo.json"))
    given = parser.parse_args()
    for spec in given.models:
        for patch in given.patch or ["5", "2"]:
            keep(row_of(spec, patch, given.limit, given.runs), given.out, ("model", "patch"))


if __name__ == "__main__":
    main()
