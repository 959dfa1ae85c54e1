"""Published numbers for the same images and the same patch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patchcleanser.core.threats import AnyRectangle
from patchcleanser.reports.run_results import RunResult

FILE = Path(__file__).with_name("published.json")
PART_OF = {"sample": "cifar10", "sample.parquet": "cifar10"}
"""Data that are part of a published dataset."""


@dataclass(frozen=True)
class PublishedRow:
    """One published row, in percent. For detection, `certified` is the weaker guarantee of detection."""

    method: str
    source: str
    where: str | None
    kind: str
    dataset: str
    patch: str
    count: int
    side: int | None
    at: int | None
    grid: str | None
    masks: str | None
    undefended: float | None
    clean: float | None
    certified: float
    authors: str
    """With the venue."""
    paper: str
    """The title."""

    @property
    def citation(self) -> str:
        """Authors and venue, and where in the paper the row is."""
        return f"{self.authors} ({self.where})" if self.where else self.authors


@cache
def published() -> tuple[PublishedRow, ...]:
    """Every row of published.json."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    sources = {source: {"authors": authors, "paper": title} for source, (authors, title) in content["sources"].items()}
    return tuple(PublishedRow(**row, **sources[row["source"]]) for row in content["rows"])


def comparable(result: RunResult) -> list[PublishedRow]:
    """Rows for the same dataset and patch, the most certified first; detection last."""
    name = str(result.metadata("data") or "").lower()
    name = PART_OF.get(name, name)
    rows = [row for row in published() if row.dataset == name and _same_patch(row, result)]
    return sorted(rows, key=lambda row: (row.kind != "recovery", -row.certified))


def _same_patch(row: PublishedRow, result: RunResult) -> bool:
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
    return len(result.sizes) == 1 and height == width and threat.shapes(result.size) == [(round(side), round(side))]
