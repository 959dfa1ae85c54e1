"""Published numbers for the same images and the same patch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from patchcleanser.core.threats import AnyRectangle
from patchcleanser.reports.claims import DefenseClaim
from patchcleanser.reports.run_results import RunResult

FILE = Path(__file__).with_name("published.json")
PART_OF = {"sample": "cifar10", "sample.parquet": "cifar10"}
"""Data that are part of a published dataset."""


@cache
def published() -> tuple[DefenseClaim, ...]:
    """Every claim of the leaderboard that a paper reports; `make leaderboard` writes them into the file."""
    return tuple(map(DefenseClaim.from_dict, json.loads(FILE.read_text(encoding="utf-8"))))


def comparable(result: RunResult) -> list[DefenseClaim]:
    """Claims for the same dataset and patch, the most certified first; detection last."""
    name = str(result.metadata("data") or "").lower()
    name = PART_OF.get(name, name)
    rows = [row for row in published() if row.data == name and _same_patch(row, result)]
    return sorted(rows, key=lambda row: (row.promise != "recovery", -row.certified))


def _same_patch(row: DefenseClaim, result: RunResult) -> bool:
    """Whether both give the same share of the image, or the same square in pixels, scaled to the image."""
    threat, (height, width) = result.run.threat, result.size
    if threat.count != row.count or threat.region is not None:
        return False
    if isinstance(threat.shape, AnyRectangle) or row.side is None or row.at is None:
        return str(threat.shape) == row.patch
    if row.at > 32 and str(threat.shape) == row.patch:
        return True
    # The paper's 0.4% of a 32×32 image is 2×2 px, less than 0.4%; so small images are compared by pixels.
    side = row.side * height / row.at
    return len(result.sizes) == 1 and height == width and threat.shapes(result.size) == [(side, side)]
