"""Trends that the paper describes, as checks on measured rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from patchcleanser.paper.experiments import Axis, Claim, Series, percent
from patchcleanser.records.metrics import Proportion

NOISE = 1.0
"""Percentage points that one step may go against a trend: the images are the same, but few."""

ENOUGH = 20
"""Images on each side of a comparison, below which nothing is claimed."""


def _trend(axis: Axis, measure: str, text: str, check: Callable[[list[float]], bool], least: int = 3) -> Claim:
    """`check` sees the measure's values from left to right; at least `least` points are needed."""

    def holds(series: Series) -> tuple[bool, str] | None:
        points = sorted((axis.position(r, m), percent(m.values[measure])) for r, m in series if measure in m.values)
        if len(points) < least:
            return None
        numbers = ", ".join(f"{value:.1f} at {position:g}" for position, value in points)
        return check([value for _, value in points]), f"{_plain(measure)} {numbers}"

    return Claim(text, holds)


def rises_and_saturates(axis: Axis, measure: str, text: str) -> Claim:
    """It rises from the first point to the last, and the last step gains less than the first."""
    return _trend(axis, measure, text, lambda y: y[-1] > y[0] and y[-1] - y[-2] < max(y[1] - y[0], NOISE))


def falls(axis: Axis, measure: str, text: str) -> Claim:
    """It falls from the first point to the last, and no step rises by more than noise."""
    return _trend(
        axis, measure, text, lambda y: y[-1] < y[0] and all(after <= before + NOISE for before, after in pairwise(y))
    )


def stays(axis: Axis, measure: str, most: float, text: str) -> Claim:
    """From the first point to the last it loses at most `most` percentage points."""
    return _trend(axis, measure, text, lambda y: y[0] - y[-1] <= most, least=2)


def larger_beyond(axis: Axis, middle: float, measure: str, text: str) -> Claim:
    """It is larger over all images beyond `middle` than over those before it: single points hold few images."""

    def holds(series: Series) -> tuple[bool, str] | None:
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
            f"{_plain(measure)} {before.percent:.1f} up to {middle:g} and {beyond.percent:.1f} beyond, of "
            f"{before.total:,} and {beyond.total:,} images"
        )
        return beyond.percent > before.percent + NOISE, numbers

    return Claim(text, holds)


def compares(measure: str, more: str, less: str, text: str, *, most: float | None = None) -> Claim:
    """Variant `more` has more of a measure than variant `less`; with `most`, at most that many points less."""

    def holds(series: Series) -> tuple[bool, str] | None:
        values = {row.variant: percent(m.values[measure]) for row, m in series if measure in m.values}
        if more not in values or less not in values:
            return None
        gap = values[more] - values[less]
        numbers = f"{_plain(measure)} {values[more]:.1f} ({more}) and {values[less]:.1f} ({less})"
        return gap > 0 if most is None else gap >= -most, numbers

    return Claim(text, holds)


def _plain(measure: str) -> str:
    return measure.replace("_", " ")
