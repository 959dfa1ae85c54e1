"""Trends that the paper describes, as checks on the measured rows of one group; None if too little was measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from patchcleanser.paper.experiments import Axis, Result, Series, percent
from patchcleanser.records.metrics import Proportion

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
