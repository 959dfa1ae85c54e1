"""Experiment: one table or figure of the paper, declared: which jobs, what is read off their rows, what was printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from patchcleanser.core.threats import Grid, Threat
from patchcleanser.records.metrics import Proportion
from patchcleanser.reports.drawing import Drawing
from patchcleanser.reports.tables import Column

Values = dict[str, Proportion | float]
"""What was read off a run, by measure: shares of the images, or plain numbers such as milliseconds."""

Printed = Mapping[str, float]
"""What the paper prints, by measure, in percent unless the measure says otherwise."""

Workload = Literal["certify", "attack", "time"]

MASKING = "double-masking"
"""The paper's own defense."""


@dataclass(frozen=True)
class Plan:
    """A job to be: names instead of things, so that it can be listed, left out, or run on another machine.

    `images` is how many the paper took where it did not take all. Plans that are equal are one run,
    whichever experiments ask for it.
    """

    model: str
    data: str
    patch: str
    patches: int = 1
    grid: Grid = "source"
    masks: int = 6
    defense: str = MASKING
    """Another one than double-masking has no masks."""
    options: tuple[tuple[str, float], ...] = ()
    """Of that other one, where they are not the published ones."""
    table: bool = False
    """Whether every two-mask label is kept, which challenger masking needs."""
    images: int | None = None
    work: Workload = "certify"
    iterations: int = 0
    """Of the attacker; as are the locations."""
    locations: int = 0

    @property
    def threat(self) -> Threat:
        """The patches meant."""
        return Threat.parse(self.patch, count=self.patches, grid=self.grid)

    @property
    def slug(self) -> str:
        """A name for files, the same wherever it is run.

        >>> Plan("tiny", "cifar10", "5", masks=3).slug
        'tiny-cifar10-5-source-3x3'
        """
        patch = self.patch if self.patches == 1 else f"{self.patches}of{self.patch}"
        plan = f"{self.masks}x{self.masks}" if self.defense == MASKING else self.defense
        words = [self.model, self.data, patch, self.grid, plan, *(f"{name}{value:g}" for name, value in self.options)]
        if self.work == "attack":
            words.append(f"attacked-{self.iterations}-{self.locations}")
        elif self.work == "time":
            words.append("timed")
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words).replace("%", "pct"))


@dataclass(frozen=True)
class Line:
    """One row of an experiment: a plan, which part of its run is meant, and what the paper printed there."""

    plan: Plan
    variant: str = ""
    printed: Printed = field(default_factory=dict, hash=False)
    timed: Plan | None = None
    """Another plan that says how long an image takes under the same masks."""

    @property
    def key(self) -> str:
        """What names the row among all experiments' rows."""
        return f"{self.plan.slug}|{self.variant}" if self.variant else self.plan.slug

    def of(self, model: str) -> Line:
        """The same line for another model."""
        timed = self.timed and replace(self.timed, model=model)
        return replace(self, plan=replace(self.plan, model=model), timed=timed)


@dataclass(frozen=True)
class Finding:
    """What was measured for one line, and under which circumstances."""

    values: Values
    images: int
    origin: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values; a share is its count and its total."""
        told = {k: [v.count, v.total] if isinstance(v, Proportion) else round(v, 4) for k, v in self.values.items()}
        return {"values": told, "images": self.images, "origin": self.origin}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        """What `to_json` wrote."""
        values = {k: Proportion(*v) if isinstance(v, list) else float(v) for k, v in found["values"].items()}
        return cls(values, found["images"], found["origin"])


def percent(value: Proportion | float) -> float:
    """A measured value as the number that is printed."""
    return value.percent if isinstance(value, Proportion) else value


Series = Sequence[tuple[Line, Finding]]


@dataclass(frozen=True)
class Claim:
    """What the paper says of an experiment's shape; `holds` looks at the measured lines of one group.

    It says whether they bear the claim out, and which numbers it looked at; None if too little was
    measured to tell. Groups are by model, images and grid, or by images alone.
    """

    words: str
    holds: Callable[[Series], tuple[bool, str] | None]
    across_models: bool = False

    def group(self, line: Line) -> tuple[str, ...]:
        """What the lines of one group share."""
        plan = line.plan
        return (plan.data, plan.grid) if self.across_models else (plan.model, plan.data, plan.grid)


@dataclass(frozen=True)
class Axis:
    """What an experiment's figure has along the bottom, and which measures are drawn against it."""

    title: str
    at: Callable[[Line, Finding], float]
    measures: tuple[str, ...]
    log: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. It declares; it has no loop over images.

    `read` gets what a plan left behind (a run, or times) and a variant, and says what stands there.
    """

    name: str
    paper: str
    """Its number there."""
    title: str
    says: str
    """What the paper shows with it, in a sentence."""
    lines: tuple[Line, ...]
    measures: tuple[Column, ...]
    read: Callable[[Any, str], Values]
    variant: str = ""
    """What the variants of a line are, as the title of their column."""
    boxed: Callable[[Any, str, dict[str, float]], Values] | None = None
    """Instead of `read`, where it also needs how much of each picture its objects take."""
    axis: Axis | None = None
    claims: tuple[Claim, ...] = ()
    pictures: Callable[[Path | None], Drawing] | None = None
    """Pictures of the data themselves, from the folder they lie in; kept beside the runs, never with the findings."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The jobs, each once."""
        return tuple(dict.fromkeys(plan for line in self.lines for plan in (line.plan, line.timed) if plan))
