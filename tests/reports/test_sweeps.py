"""The figures of several runs: which there are, and that their axes stay readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from patchcleanser.records.run import Run
from patchcleanser.reports import write_report
from patchcleanser.reports.contents import gather
from patchcleanser.reports.drawing import blank
from patchcleanser.reports.run_results import RunResult, read_result
from patchcleanser.reports.sweeps import costs, spaced_ticks

from .test_comparison import changed

MakeRun = Callable[..., Run]


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


def made(run: Run, classifications: float = 10) -> RunResult:
    result = read_result(run, None)
    assert result is not None
    return replace(result, summary=replace(result.summary, classifications=round(classifications * 24)))


@pytest.mark.parametrize(
    ("defense", "cost", "drawn"),
    [("challenger-masking", 30, True), ("challenger-masking", 10.4, False), ("double-masking", 30, False)],
)
def test_costs_are_drawn_of_several_defenses_unless_nearly_equal(
    make_run: MakeRun, defense: str, cost: float, drawn: bool
) -> None:
    runs = [make_run(f"{masks} masks", masks=masks) for masks in (2, 3)]
    other = changed(make_run("other"), dict, defense=defense)
    figure = costs([made(runs[0]), made(runs[1], 10.2), made(other, cost)])
    assert (figure is not None) == drawn


def test_two_runs_have_one_figure_and_three_a_heading_of_what_varies(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [(make_run(f"{masks} masks", masks=masks, table=False), None) for masks in (2, 3, 4)]
    assert [figure.name for figure in gather(runs[:2]).figures] == ["accuracy"]
    three = gather(runs)
    assert [figure.name for figure in three.figures] == ["accuracy", "mask-count"]
    assert three.sweep_title == "Certified by number of masks"
    assert three.sweep[0].caption.endswith("Shaded: 95% intervals.")
    assert "patch size" not in write_report(runs, tmp_path / "out").read_text(encoding="utf-8").lower()
