"""What other people printed for the same images and the same patch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from patchcleanser.core.threats import AnyRectangle
from patchcleanser.reports.studies import Study

FILE = Path(__file__).with_name("published.json")
SAME = {"sample": "cifar10", "sample.parquet": "cifar10"}
"""Names of data that are part of a published set."""


@dataclass(frozen=True)
class Published:
    """One printed row, in percent. A detection's `certified` is its own, weaker promise."""

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

    @property
    def citation(self) -> str:
        """Who said it, and where it was printed."""
        said: str = _file()["sources"][self.source][0]
        return f"{said} ({self.where})" if self.where else said

    @property
    def paper(self) -> str:
        """The title of the paper."""
        title: str = _file()["sources"][self.source][1]
        return title


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def published() -> list[Published]:
    """Every row of the file."""
    return [Published(**row) for row in _file()["rows"]]


def dataset_of(study: Study) -> str | None:
    """The published name of a run's images, if they have one."""
    name = str(study.metadata("data") or "").lower()
    name = SAME.get(name, name)
    return name if any(row.dataset == name for row in published()) else None


def comparable(study: Study) -> list[Published]:
    """Rows for the same dataset and patch, the most certified first; detections last."""
    name = dataset_of(study)
    found = [row for row in published() if row.dataset == name and _same_patch(row, study)]
    return sorted(found, key=lambda row: (row.kind != "recovery", -row.certified))


def _same_patch(row: Published, study: Study) -> bool:
    """The same share of the image in words, or the same square in pixels, scaled to the image."""
    threat, (height, width) = study.run.threat, study.size
    if threat.count != row.count or threat.region is not None:
        return False
    if isinstance(threat.shape, AnyRectangle) or row.side is None or row.at is None:
        return str(threat.shape) == row.patch
    if row.at > 32 and str(threat.shape) == row.patch:
        return True
    # The paper's 0.4% of a 32×32 image is 2×2 px, less than 0.4%; so small images are compared by pixels.
    side = row.side * height / row.at
    return len(study.sizes) == 1 and height == width and threat.shapes(study.size) == [(round(side), round(side))]
