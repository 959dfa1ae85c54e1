"""What an axis says stays readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from patchcleanser.records.run import Run
from patchcleanser.reports.drawing import blank
from patchcleanser.reports.run_results import read_result
from patchcleanser.reports.sweeps import costs, spaced_ticks


@pytest.mark.parametrize(
    ("scale", "places", "ticks"),
    [
        ("log", {1.0, 33.0, 503.7, 541.9, 613.3}, [1.0, 33.0, 503.7]),
        ("linear", {1.0, 33.0, 503.7, 541.9, 613.3}, [1.0, 503.7, 613.3]),
        ("log", {4.0, 9.0, 16.0, 25.0, 36.0}, [4.0, 9.0, 16.0, 25.0, 36.0]),
        ("linear", {5.0}, [5.0]),
    ],
)
def test_numbers_along_an_axis_do_not_touch(scale: str, places: set[float], ticks: list[float]) -> None:
    _, axes = blank()
    axes.set_xscale(scale)
    axes.plot(sorted(places), [1.0] * len(places))
    assert spaced_ticks(axes, places) == ticks


@pytest.mark.parametrize(("cost", "drawn"), [(10.4, False), (30, True)])
def test_costs_that_are_nearly_equal_are_not_drawn_against_each_other(
    make_run: Callable[..., Run], cost: float, drawn: bool
) -> None:
    def result(masks: int, classifications: float) -> Any:
        stored = read_result(make_run(f"{masks} masks", masks=masks), None)
        return replace(stored, summary=replace(stored.summary, classifications=round(classifications * 24)))

    figure = costs([result(2, 10), result(3, cost)])
    assert (figure is not None) == drawn
