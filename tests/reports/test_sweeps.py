"""What an axis says stays readable."""

from __future__ import annotations

import pytest

from patchcleanser.reports.drawing import blank
from patchcleanser.reports.sweeps import spaced_ticks


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
