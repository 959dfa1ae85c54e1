"""Experiment: one table or figure of the paper, declared as runs, what is read from them, and the printed numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a proportion becomes [count, total]."""
        values = {k: [v.count, v.total] if isinstance(v, Proportion) else round(v, 4) for k, v in self.values.items()}
        return {"values": values, "images": self.images, "origin": self.origin}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measurement:
        values = {k: Proportion(*v) if isinstance(v, list) else float(v) for k, v in content["values"].items()}
        return cls(values, content["images"], content["origin"])


def published_values(method: str, data: str, side: int, *measures: str) -> dict[str, float]:
    """What the paper prints for a method against one square patch; empty if it prints nothing."""
    for row in published():
        same = (row.method, row.data, row.side, row.count) == (method, data, side, 1)
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


# Trends that the paper describes, as checks on the measured rows of one group. None: too little was measured.

NOISE = 1.0
"""Percentage points that one step may go against a trend: the images are the same, but few."""

ENOUGH = 20
"""Images on each side of a comparison, below which nothing is claimed."""


def _trend(axis: Axis, measure: str, series: Series, check: Callable[[list[float]], bool], least: int = 3) -> Result:
    """Let `check` see the measure's values from left to right, if there are at least `least`."""
    points = sorted((axis.position(r, m), percent(m.values[measure])) for r, m in series if measure in m.values)
    if len(points) < least:
        return None
    numbers = ", ".join(f"{value:.1f} at {position:g}" for position, value in points)
    return check([value for _, value in points]), f"{measure} {numbers}"


def rises_and_saturates(axis: Axis, measure: str, series: Series) -> Result:
    """It rises from the first point to the last, and the last step gains less than the first."""
    return _trend(axis, measure, series, lambda y: y[-1] > y[0] and y[-1] - y[-2] < max(y[1] - y[0], NOISE))


def falls(axis: Axis, measure: str, series: Series) -> Result:
    """It falls from the first point to the last, and no step rises by more than noise."""
    return _trend(
        axis, measure, series, lambda y: y[-1] < y[0] and all(after <= before + NOISE for before, after in pairwise(y))
    )


def stays(axis: Axis, measure: str, most: float, series: Series) -> Result:
    """From the first point to the last it loses at most `most` percentage points."""
    return _trend(axis, measure, series, lambda y: y[0] - y[-1] <= most, least=2)


def larger_beyond(axis: Axis, measure: str, middle: float, series: Series) -> Result:
    """It is larger over all images beyond `middle` than over those before it: single points hold few images."""
    before, beyond = Proportion(0, 0), Proportion(0, 0)
    for row, measurement in series:
        value = measurement.values.get(measure)
        if isinstance(value, Proportion) and axis.position(row, measurement) > middle:
            beyond += value
        elif isinstance(value, Proportion):
            before += value
    if min(before.total, beyond.total) < ENOUGH:
        return None
    numbers = (
        f"{measure} {before.percent:.1f} up to {middle:g} and {beyond.percent:.1f} beyond, of "
        f"{before.total:,} and {beyond.total:,} images"
    )
    return beyond.percent > before.percent + NOISE, numbers


def has_more(measure: str, more: str, less: str, series: Series, *, tolerance: float | None = None) -> Result:
    """Variant `more` has more of a measure than variant `less`; with a tolerance, at most that much less."""
    values = {row.variant: percent(m.values[measure]) for row, m in series if measure in m.values}
    if more not in values or less not in values:
        return None
    numbers = f"{measure} {values[more]:.1f} ({more}) and {values[less]:.1f} ({less})"
    gap = values[more] - values[less]
    return gap > 0 if tolerance is None else gap >= -tolerance, numbers
