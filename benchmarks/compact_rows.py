"""Copy finished runs without what is long in their rows: two-mask labels, one-mask margins and confidences, pictures.

    python benchmarks/compact_rows.py RUNS results/reproduce/rows

What is left says for each image its labels, answer, certificates and cost, 40 kB for 1,000 images: enough for
accuracies of every kind. What needs the tables (Figures 9 and 10; other defenses; maps) needs the whole run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from patchcleanser.records.run import Run

LONG = dict.fromkeys(("table", "one_mask_margins", "one_mask_confidences"))


def compact(source: Path, target: Path) -> None:
    """One run: its manifest, and its rows with nothing in their long columns."""
    run = Run.open(source)
    job = {**run.job, "table": False}  # so it is a run of its own, of a job that kept no tables
    metadata = {**run.metadata, "compact": "label tables, margins and confidences were taken out"}
    copy = Run.begin(target, job, images=run.images, batch=run.batch, metadata=metadata)
    for batch in copy.missing():
        copy.write(batch, [{**row, **LONG} for row in run.read_batch(batch).to_pylist()])


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
