"""Measure an ImageNet classifier, untouched or hardened, on labelled photos in Parquet files.

python benchmarks/harden.py trained:FOLDER --data 'PATH/imagenet-val2000-*.parquet' --out results/harden.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from patchcleanser import DoubleMasking, Threat, load_classifier
from patchcleanser.classifiers.trained import read_card
from patchcleanser.data import load_dataset
from patchcleanser.evaluation import measure
from patchcleanser.training.cards import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a classifier, as for load_classifier")
    parser.add_argument("--name", required=True, help="what to call it in the row")
    parser.add_argument("--data", required=True, help="Parquet file, folder or pattern with labels")
    parser.add_argument("--patch", default="2%")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/harden.json"))
    given = parser.parse_args()
    threat = Threat.parse(given.patch, grid="input")
    defense = DoubleMasking(load_classifier(given.model), threat, masks=6, precision="fast")
    started = time.monotonic()
    found = measure(defense, load_dataset(f"parquet:{given.data}"), limit=given.limit)
    hardened = given.model.startswith("trained:")
    card = read_card(Path(given.model.partition(":")[2])) if hardened else {}
    row = {
        "model": given.name,
        "photos": card.get("photos", {}).get("number", 0),
        "patch": given.patch,
        "masks": "6x6",
        "grid": "input",
        "images": found.images,
        "undefended": found.undefended,
        "clean": found.clean,
        "certified": found.certified,
        "row_certified": found.row_certified,
        "seed": card.get("seed"),
        "weights": card.get("weights_sha256"),
        "harden_command": card.get("command"),
        "seconds": round(time.monotonic() - started, 1),
        "labels_rechecked": defense.masked.recheck.rechecked,
        "labels_flipped_by_recheck": defense.masked.recheck.flipped,
        "classifications": found.classifications,
        "command": f"python benchmarks/harden.py {given.model} --name {given.name} --data … --patch {given.patch}",
        "versions": versions(),
    }
    print(json.dumps(row), flush=True)
    rows = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else []
    rows = [old for old in rows if (old["model"], old["photos"]) != (row["model"], row["photos"])] + [row]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
