"""Small made-up runs, written as real ones are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchcleanser.core.algorithms import double_masking, first_failure, reporters
from patchcleanser.core.threats import Threat
from patchcleanser.records.run import Row, Run

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run under `tmp_path` and return it."""

    def make(name: str = "run", **settings: Any) -> Run:
        return written(tmp_path / name, **settings)

    return make


@pytest.fixture
def make_attack(tmp_path: Path) -> MakeRun:
    """Write a run of an attack under `tmp_path` and return it."""

    def make(name: str = "attack", **settings: Any) -> Run:
        return attack_written(tmp_path / name, **settings)

    return make


KINDS = (
    {"attacked_undefended": 1},  # recovered
    {"attacked_undefended": 1, "attacked_answer": 1, "attacked_case": "majority", "fooled": True},
    {"undefended_fooled": False},  # the attack failed
    {"answer": 2, "attacked_answer": 2, "attacked_undefended": 1, "fooled": True},  # wrong without an attack
)
"""What may become of an image of class 0; half of those that are not fooled are certified."""
DETECTED: dict[str, Any] = {
    "answer": 0,
    "alert": False,
    "attacked_alert": True,
    "certified": None,
    "row_certified": None,
    "attacked_case": None,
}


def attack_written(
    folder: Path,
    *,
    images: int = 16,
    batch: int = 8,
    detects: bool = False,
    job: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    change: Callable[[Row], Any] = dict,
    pictures: bool = True,
) -> Run:
    """A run of an attack on images of class 0, by turns of each kind."""
    budget = {"iterations": 100, "locations": 1, "restarts": 1, "places": "random", "loss": "margin"}
    identity = {
        **{"labels": 1, "classifier": "c" * 64, "device": "cpu", "precision": "exact", "data": "d" * 64},
        **{"threat": Threat.square(2).to_dict(), "masks": [2, 2], "stride": None, "options": {}, "table": False},
        **{"defense": "minority-reports" if detects else "double-masking", "kind": "attack", "attack": "apgd"},
        "settings": {**budget, "target": None, "seed": 0, "chunk": None, **(settings or {})},
        **(job or {}),
    }
    facts = {"model": "zoo:tiny", "data": "cifar10", "classes": ["cat", "dog", "frog"]}
    facts["command"] = "patchcleanser attack …"
    run = Run.begin(folder, identity, images=images, batch=batch, metadata=facts | (metadata or {}))
    for number in range(run.batches):
        rows = [_attacked_row(index, detects) for index in run.indices(number)]
        for row in rows:
            change(row)
        run.write(number, rows)
    if pictures:
        _pictures(run, ends=("", "-attacked"))
    return run


def _attacked_row(index: int, detects: bool) -> Row:
    row: Row = {
        **{"index": index, "id": f"image {index}", "label": 0, "skipped": None, "height": 8, "width": 8},
        **{"undefended": 0, "answer": 0, "undefended_fooled": True, "fooled": False, "attacked_undefended": 0},
        **{"attacked_answer": 0, "attacked_case": "disagreer", "patches": [1, 2, 2, 2], "margin": -0.5},
        **{"queries": 102, "seconds": 0.5, **KINDS[index % len(KINDS)]},
    }
    certified = not row["fooled"] and index % 8 < 4
    row |= {"certified": certified, "row_certified": certified}
    return row | DETECTED | {"detection_certified": certified, "fooled": False} if detects else row


def written(
    folder: Path,
    *,
    images: int = 24,
    batch: int = 8,
    threat: Threat | None = None,
    masks: int = 2,
    sizes: tuple[tuple[int, int], ...] = ((8, 8),),
    classes: tuple[str, ...] = ("cat", "dog", "frog"),
    metadata: dict[str, Any] | None = None,
    skipped: dict[int, str] | None = None,
    ids: Callable[[int], str] = "image {}".format,
    pictures: bool = True,
    detects: bool = False,
    table: bool = True,
    seed: int = 0,
) -> Run:
    """A run of made-up labels: most right, some wrong under a few masks, some wrong everywhere."""
    threat = threat or Threat.square(2)
    job = {
        "labels": 1,
        "classifier": "c" * 64,
        "device": "cpu",
        "precision": "exact",
        "data": "d" * 64,
        "threat": threat.to_dict(),
        "masks": [masks, masks],
        "stride": None,
        "defense": "minority-reports" if detects else "double-masking",
        "options": {"threshold": 0.5} if detects else {},
        "table": table and not detects,
    }
    facts = {"model": "zoo:tiny", "data": "cifar10", "classes": list(classes), "command": "patchcleanser certify …"}
    run = Run.begin(folder, job, images=images, batch=batch, metadata=facts if metadata is None else metadata)
    rng = np.random.default_rng(seed)
    for number in range(run.batches):
        rows = []
        for index in range(number * batch, min((number + 1) * batch, images)):
            row: Row = {"index": index, "id": ids(index), "label": int(rng.integers(len(classes)))}
            if skipped and index in skipped:
                row["skipped"] = skipped[index]
            else:
                row |= _facts(run, rng, row["label"], sizes[index % len(sizes)], len(classes), detects)
            rows.append(row)
        run.write(number, rows)
    if pictures:
        _pictures(run)
    return run


def _facts(
    run: Run, rng: np.random.Generator, truth: int, size: tuple[int, int], classes: int, detects: bool
) -> dict[str, Any]:
    masks = run.mask_set(size)
    count, unions = len(masks), masks.unions
    labels = np.full(len(unions), truth, dtype=np.int32)
    other, kind = (truth + 1) % classes, rng.random()
    if kind > 0.85:
        labels[:] = other
    elif kind > 0.5:
        labels[rng.choice(len(labels), size=2, replace=False)] = other
    singles, confidences = labels[:count].tolist(), rng.uniform(0.3, 1, count).astype(np.float32)
    row: dict[str, Any] = {
        "height": size[0],
        "width": size[1],
        "undefended": other if kind > 0.9 else truth,
        "one_mask_labels": labels[:count],
        "one_mask_margins": confidences,
        "one_mask_confidences": confidences,
        "margin": float(rng.exponential()),
        "classifications": len(unions),
        "seconds": 0.25,
    }
    if detects:
        undefended = row["undefended"]
        alert = bool(reporters(undefended, singles, confidences.tolist(), 0.5))
        proved = first_failure(truth, singles, confidences.tolist(), 0.5) is None and undefended == truth
        return row | {"answer": undefended, "alert": alert, "detection_certified": proved}
    good = ~(labels != truth)[unions.index].any(axis=1)
    hole = masks.cover(run.threat).hole(good)
    verdict = double_masking(singles, lambda i: labels[unions.index[i]].tolist())
    return row | {
        "table": labels if run.job["table"] else None,
        "answer": verdict.label,
        "case": verdict.case.value,
        "deciding_mask": verdict.deciding_mask,
        "certified": bool(good.all()),
        "row_certified": hole is None,
        "weakest": hole and [n for w in hole for n in (w.top, w.left, w.height, w.width)],
    }


def _pictures(run: Run, ends: tuple[str, ...] = ("",)) -> None:
    (run.folder / "gallery").mkdir()
    for row in run.read(["index", "skipped", "height", "width"]).to_pylist():
        if row["skipped"] is None:
            picture = Image.new("RGB", (row["width"], row["height"]), (10 * row["index"] % 255, 90, 120))
            for end in ends:
                picture.save(run.folder / "gallery" / f"{row['index']}{end}.png")
