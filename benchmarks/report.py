"""Time `patchcleanser report` on a large run with two-mask tables, and keep the figures in a JSON file.

    python benchmarks/report.py --rows 50000 --out results/report.json

The run is made up (no model is asked), but written as a real one is: 10 classes, 36 masks, 666 labels an
image, one size, 256 rows to a shard; most labels are right, some are wrong near one place of the image.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from patchcleanser.core.algorithms import double_masking
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.records.provenance import versions
from patchcleanser.records.run import Row, Run

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCH = 256


def made_up_run(folder: Path, rows: int) -> Run:
    threat = Threat.square(5)
    job = {
        "labels": 1,
        "classifier": "0" * 64,
        "device": "cpu",
        "precision": "exact",
        "data": "1" * 64,
        "threat": threat.to_dict(),
        "masks": [6, 6],
        "stride": None,
        "defense": "double-masking",
        "options": {},
        "table": True,
    }
    metadata = {"model": "made up", "data": "cifar10", "classes": list(CLASSES), "command": "benchmarks/report.py"}
    run = Run.begin(folder, job, images=rows, batch=BATCH, metadata=metadata)
    masks = run.mask_set((32, 32))
    for batch in run.missing():
        rng = np.random.default_rng(batch)
        indices = range(batch * BATCH, min((batch + 1) * BATCH, rows))
        run.write(batch, [made_up_row(index, rng, masks, threat) for index in indices])
    return run


def made_up_row(index: int, rng: np.random.Generator, masks: MaskSet, threat: Threat) -> Row:
    """A right image in seven of ten; else one that fails under masks near a place, or everywhere."""
    size, truth, kind = len(masks), int(rng.integers(len(CLASSES))), rng.random()
    labels = np.full(len(masks.unions), truth, dtype=np.int32)
    other = (truth + int(rng.integers(1, len(CLASSES)))) % len(CLASSES)
    if kind > 0.93:
        labels[rng.random(len(labels)) < 0.9] = other
    elif kind > 0.7:
        weak = rng.choice(size, size=int(rng.integers(1, 4)), replace=False)
        near = np.unique(masks.unions.index[weak])
        labels[near[rng.random(len(near)) < 0.6]] = other
    undefended = other if kind > 0.95 else truth
    good = ~(labels != truth)[masks.unions.index].any(axis=1)
    hole = masks.cover(threat).hole(good)
    verdict = double_masking(labels[:size].tolist(), lambda i: labels[masks.unions.index[i]].tolist())
    return {
        "index": index,
        "id": f"{index:05d}",
        "label": truth,
        "height": 32,
        "width": 32,
        "undefended": undefended,
        "one_mask_labels": labels[:size],
        "one_mask_margins": rng.exponential(3, size).astype(np.float32),
        "one_mask_confidences": rng.uniform(0.5, 1, size).astype(np.float32),
        "table": labels,
        "answer": verdict.label,
        "case": verdict.case.value,
        "deciding_mask": verdict.deciding_mask,
        "certified": bool(good.all()),
        "row_certified": hole is None,
        "weakest": hole and [n for w in hole for n in (w.top, w.left, w.height, w.width)],
        "margin": float(rng.exponential(2)),
        "classifications": len(masks.unions),
        "seconds": 0.01,
    }


def measured(folder: Path, out: Path) -> dict[str, object]:
    """The whole command, as people run it: start, imports, derivation, page, tables, figures."""
    command = [sys.executable, "-m", "patchcleanser", "report", str(folder), "--out", str(out)]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6  # kilobytes on Linux
    return {"seconds": round(seconds, 1), "peak_gb": round(peak, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--run", type=Path, help="keep the made-up run here, and use it again")
    parser.add_argument("--out", type=Path, default=Path("results/report.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = made_up_run(given.run or Path(scratch) / "run", given.rows)
        costs = measured(run.folder, Path(scratch) / "report")
        page = Path(scratch) / "report" / "report.html"
        row = {
            "rows": given.rows,
            "masks": 36,
            "labels_per_image": 666,
            **costs,
            "page_mb": round(page.stat().st_size / 1e6, 2),
            "cores": os.cpu_count(),
            "seed": "each batch's number",
            "versions": {**versions(), **{name: version(name) for name in ("pyarrow", "matplotlib", "jinja2")}},
            "command": f"python benchmarks/report.py --rows {given.rows}",
        }
    print(json.dumps(row))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
