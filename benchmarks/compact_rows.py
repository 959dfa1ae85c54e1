"""Copy finished runs without what is long in their rows: two-mask labels, one-mask margins and confidences, pictures.

    python benchmarks/compact_rows.py RUNS results/reproduce/rows

What is left says for each image its labels, answer, certificates and cost, 40 kB for 1,000 images: enough for
accuracies of every kind. What needs the tables (Figures 9 and 10; other defenses; maps) needs the whole run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from patchcleanser.core.records import key_of

LONG = ("table", "one_mask_margins", "one_mask_confidences")


def compact(source: Path, target: Path) -> None:
    """One run: its manifest, and its rows with nothing in their long columns."""
    target.mkdir(parents=True, exist_ok=True)
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    manifest["job"]["table"] = False  # so it is a run of its own, of a job that kept no tables
    manifest["key"] = key_of(manifest["job"])
    manifest["about"]["compact"] = "label tables, margins and confidences were taken out"
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in sorted(source.glob("rows-*.parquet")):
        rows = parquet.read_table(path)
        columns = [pa.nulls(len(rows), field.type) if field.name in LONG else rows[field.name] for field in rows.schema]
        parquet.write_table(pa.table(columns, schema=rows.schema), target / path.name, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, help="a folder of run folders")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for manifest in sorted(given.runs.glob("*/manifest.json")):
        compact(manifest.parent, given.out / manifest.parent.name)
        print(manifest.parent.name)


if __name__ == "__main__":
    main()
