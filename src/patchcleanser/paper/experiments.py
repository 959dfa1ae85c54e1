"""Experiment: one table or figure of the paper, declared as runs, what is read from them, and the printed numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from patchcleanser.core.threats import Grid, Threat
from patchcleanser.records.metrics import Proportion
from patchcleanser.reports.drawing import Drawing
from patchcleanser.reports.published import published
from patchcleanser.reports.tables import Column

Values = dict[str, Proportion | float]
"""Measured values by measure: proportions of the images, or plain numbers such as milliseconds."""

RunKind = Literal["certify", "attack", "time"]

MASKING = "double-masking"
"""The paper's own defense."""


@dataclass(frozen=True)
class RunSpec:
    """A run by names: it can be listed, skipped, or executed on another machine.

    Equal specs are one run, whichever experiments ask for it.
    """

    model: str
    data: str
    patch: str
    patches: int = 1
    grid: Grid = "source"
    masks: int = 6
    """Masks per axis; only double-masking uses them."""
    defense: str = MASKING
    options: tuple[tuple[str, float], ...] = ()
    """Options of another defense, where they differ from the published ones."""
    table: bool = False
    """Whether every two-mask label is stored, which challenger masking needs."""
    images: int | None = None
    """Number of images that the paper used, if not all."""
    kind: RunKind = "certify"
    iterations: int = 0
    locations: int = 0
    """The budget of an attack: iterations, and patch locations that it tries."""

    @property
    def threat(self) -> Threat:
        return Threat.parse(self.patch, count=self.patches, grid=self.grid)

    @property
    def timing(self) -> RunSpec:
        """The same masks, timed one image at a time."""
        return replace(self, table=False, kind="time")

    @property
    def slug(self) -> str:
        """A name for folders and keys, the same on every machine.

        >>> RunSpec("tiny", "cifar10", "5", masks=3).slug
        'tiny-cifar10-5-source-3x3'
        """
        patch = self.patch if self.patches == 1 else f"{self.patches}of{self.patch}"
        defense = f"{self.masks}x{self.masks}" if self.defense == MASKING else self.defense
        parts = [self.model, self.data, patch, self.grid, defense]
        parts += [f"{name}{value:g}" for name, value in self.options]
        if self.kind == "attack":
            parts.append(f"attacked-{self.iterations}-{self.locations}")
        elif self.kind == "time":
            parts.append("timed")
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts).replace("%", "pct"))


@dataclass(frozen=True)
class PaperRow:
    """One row of an experiment: its run, which variant of that run, and what the paper prints there."""

    spec: RunSpec
    variant: str = ""
    printed: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The paper's numbers by measure, in percent unless the measure says otherwise."""
    timed: bool = False
    """Whether another run times the same masks image by image."""

    @property
    def key(self) -> str:
        """Identifies the row in files of measurements."""
        return f"{self.spec.slug}|{self.variant}" if self.variant else self.spec.slug

    def with_model(self, model: str) -> PaperRow:
        return replace(self, spec=replace(self.spec, model=model))


@dataclass(frozen=True)
class Measurement:
    """What was measured for one row, on how many images, and under which circumstances."""

    values: Values
    images: int
    origin: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values; a proportion becomes [count, total]."""
        values = {k: [v.count, v.total] if isinstance(v, Proportion) else round(v, 4) for k, v in self.values.items()}
        return {"values": values, "images": self.images, "origin": self.origin}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        values = {k: Proportion(*v) if isinstance(v, list) else float(v) for k, v in content["values"].items()}
        return cls(values, content["images"], content["origin"])


def published_values(method: str, data: str, side: int, *measures: str) -> dict[str, float]:
    """What the paper prints for a method against one square patch; empty if it prints nothing."""
    for row in published():
        same = (row.method, row.dataset, row.side, row.count) == (method, data, side, 1)
        if same and row.masks in ("6x6", None):
            return {measure: getattr(row, measure) for measure in measures}
    return {}


def percent(value: Proportion | float) -> float:
    """A measured value as the number that is printed."""
    return value.percent if isinstance(value, Proportion) else value


Series = Sequence[tuple[PaperRow, Measurement]]
Result = tuple[bool, str] | None
"""Whether rows confirm a claim, and the numbers that were compared; None if too little was measured."""


@dataclass(frozen=True)
class Axis:
    """The x axis of an experiment's figure, and the measures drawn against it."""

    title: str
    position: Callable[[PaperRow, Measurement], float]
    measures: tuple[str, ...] = ("clean", "certified")
    log: bool = False


@dataclass(frozen=True)
class Claim:
    """A trend that the paper claims for a model, dataset and grid, or for a dataset and grid across models."""

    text: str
    holds: Callable[[Series], Result]
    across_models: bool = False

    def check(self, series: Series) -> list[tuple[bool, tuple[str, ...], str]]:
        """For each measured group: whether the claim holds, the group, and the compared numbers."""
        groups: dict[tuple[str, ...], list[tuple[PaperRow, Measurement]]] = {}
        for row, measurement in series:
            group = (row.spec.data, row.spec.grid)
            groups.setdefault(group if self.across_models else (row.spec.model, *group), []).append((row, measurement))
        results = ((group, self.holds(part)) for group, part in groups.items())
        return [(result[0], group, result[1]) for group, result in results if result is not None]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. It declares runs; no experiment loops over images.

    `read` gets a finished run (or times) and a row's variant, and returns the values of that row.
    """

    name: str
    paper: str
    """Its number in the paper."""
    title: str
    takeaway: str
    """What the paper shows with it, in a sentence."""
    rows: tuple[PaperRow, ...]
    measures: tuple[Column, ...]
    read: Callable[[Any, str], Values]
    variant: str = ""
    """Title of the column with the rows' variants."""
    read_boxed: Callable[[Any, str, dict[str, float]], Values] | None = None
    """Replaces `read` if it also needs each image's share of pixels inside object boxes, by image id."""
    axis: Axis | None = None
    claims: tuple[Claim, ...] = ()
    pictures: Callable[[Path | None], Drawing] | None = None
    """Draws images of the dataset below a root folder; stored beside the runs, never with the measurements."""

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs, each once."""
        pairs = ((row.spec, row.spec.timing) if row.timed else (row.spec,) for row in self.rows)
        return tuple(dict.fromkeys(spec for pair in pairs for spec in pair))
