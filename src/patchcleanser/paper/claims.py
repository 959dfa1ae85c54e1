"""The shapes the paper describes, as checks on measured lines."""

from __future__ import annotations

from itertools import pairwise

from patchcleanser.paper.base import Axis, Claim, Finding, Line, Series, percent
from patchcleanser.records.metrics import Proportion

NOISE = 1.0
"""Points that one step may go against a trend: images are the same, but few."""

ENOUGH = 20
"""Images on either side, below which nothing is said of the two."""


def along(axis: Axis, measure: str, series: Series) -> list[tuple[float, float]]:
    """Where lines stand on the axis, and the measure there, from left to right."""
    return sorted(
        (axis.at(line, found), percent(found.values[measure])) for line, found in series if measure in found.values
    )


def rises_and_saturates(axis: Axis, measure: str, words: str) -> Claim:
    """It rises from the first place to the last, and the last step gains less than the first."""

    def holds(series: Series) -> tuple[bool, str] | None:
        points = along(axis, measure, series)
        if len(points) < 3:
            return None
        steps = [after[1] - before[1] for before, after in pairwise(points)]
        borne = points[-1][1] > points[0][1] and steps[-1] < max(steps[0], NOISE)
        return borne, _told(measure, points)

    return Claim(words, holds)


def larger_beyond(axis: Axis, middle: float, measure: str, words: str) -> Claim:
    """It is larger for all images beyond the middle together than for those before it: single places hold few."""

    def holds(series: Series) -> tuple[bool, str] | None:
        before, beyond = Proportion(0, 0), Proportion(0, 0)
        for line, found in series:
            value = found.values.get(measure)
            if isinstance(value, Proportion) and axis.at(line, found) > middle:
                beyond += value
            elif isinstance(value, Proportion):
                before += value
        if min(before.total, beyond.total) < ENOUGH:
            return None
        said = (
            f"{_plain(measure)} {before.percent:.1f} up to {middle:g} and {beyond.percent:.1f} beyond, of "
            f"{before.total:,} and {beyond.total:,} images"
        )
        return beyond.percent > before.percent + NOISE, said

    return Claim(words, holds)


def falls(axis: Axis, measure: str, words: str) -> Claim:
    """It does not rise by more than noise at any step, and falls in all."""

    def holds(series: Series) -> tuple[bool, str] | None:
        points = along(axis, measure, series)
        if len(points) < 3:
            return None
        drops = all(after[1] <= before[1] + NOISE for before, after in pairwise(points))
        return drops and points[-1][1] < points[0][1], _told(measure, points)

    return Claim(words, holds)


def stays(axis: Axis, measure: str, most: float, words: str) -> Claim:
    """Between the first place and the last it loses at most so many points."""

    def holds(series: Series) -> tuple[bool, str] | None:
        points = along(axis, measure, series)
        if len(points) < 2:
            return None
        return points[0][1] - points[-1][1] <= most, _told(measure, points)

    return Claim(words, holds)


def compares(measure: str, more: str, less: str, words: str, *, most: float | None = None) -> Claim:
    """A variant has more of a measure than another (or at most `most` points less, where that is said)."""

    def holds(series: Series) -> tuple[bool, str] | None:
        found = {line.variant: percent(f.values[measure]) for line, f in series if measure in f.values}
        if more not in found or less not in found:
            return None
        gap = found[more] - found[less]
        borne = gap > 0 if most is None else gap >= -most
        return borne, f"{_plain(measure)} {found[more]:.1f} ({more}) and {found[less]:.1f} ({less})"

    return Claim(words, holds)


def _told(measure: str, points: list[tuple[float, float]]) -> str:
    return f"{_plain(measure)} " + ", ".join(f"{value:.1f} at {at:g}" for at, value in points)


def _plain(measure: str) -> str:
    return measure.replace("_", " ")


def told(claim: Claim, lines: Series) -> list[tuple[bool, tuple[str, ...], str]]:
    """For each group that was measured: whether the claim holds, who it is, and the numbers."""
    groups: dict[tuple[str, ...], list[tuple[Line, Finding]]] = {}
    for line, found in lines:
        groups.setdefault(claim.group(line), []).append((line, found))
    checked = ((who, claim.holds(series)) for who, series in groups.items())
    return [(result[0], who, result[1]) for who, result in checked if result is not None]
