"""The figures of several runs together: accuracy, and certified against patch size, mask count and cost."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from patchcleanser.core.threats import AnyRectangle, SquareShare
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, DISC, DOT, RING, Drawing, blank, dots, style
from patchcleanser.reports.run_results import RunResult

MARKERS = "os^Dv<>P"
MAX_RUNS = 40
MAX_LINE_LENGTH = 34
"""Characters in a line of a run's name."""
FEWEST = 3
"""Points below which there is no figure beside the accuracies of all runs, which already shows them."""
MIN_DISTANCE = 0.09
"""Tick labels closer than this share of an axis would touch."""

Lines = dict[str, list[tuple[float, RunResult]]]
"""Runs with their x, in order, by the label of their line."""


def sweep_figures(results: Sequence[RunResult]) -> list[Drawing]:
    """All figures of several recovery runs together."""
    with style():
        drawings = [accuracies(results), patch_sizes(results), mask_counts(results), costs(results)]
    return [drawing for drawing in drawings if drawing is not None]


def accuracies(results: Sequence[RunResult]) -> Drawing | None:
    """All runs below each other: undefended, clean, certified."""
    if len(results) > MAX_RUNS:
        return None
    rows = _rows(results)
    # In inches; long names take several lines and must not touch.
    heights = [0.1 + 0.15 * (1 + name.count("\n")) for name, _ in rows]
    figure, axes = blank(height=0.7 + sum(heights))
    middles = sum(heights) - np.cumsum(heights) + np.array(heights) / 2
    y = {result: float(at) for (_, result), at in zip(rows, middles, strict=True) if result is not None}
    for result, at in y.items():
        interval = result.summary.shares["certified"].interval
        axes.plot(interval, [at, at], color=ACCENT, linewidth=2.2, alpha=0.35, solid_capstyle="butt")
    shares = [result.summary.shares for result in y]
    dots(axes, shares, list(y.values()), {"undefended": RING, "certified": DISC, "clean": DOT})
    across = blended_transform_factory(figure.transFigure, axes.transData)
    for (name, run), at in zip(rows, middles, strict=True):
        if run is None:
            axes.text(0.01, at, name, transform=across, va="center", fontsize=8.5, fontweight="bold", in_layout=False)
    axes.set_yticks(list(y.values()), [name for name, run in rows if run is not None])
    axes.set_ylim(0, sum(heights))
    axes.set_xlabel("percent of the images")
    figure.legend(loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.2)
    low, high = (f([s.summary.shares["certified"].percent for s in results]) for f in (min, max))
    caption = (
        "Undefended, defended (clean) and certified accuracy; the bar is the 95% interval of certified. "
        "Equal shares are drawn inside each other."
    )
    title = f"Accuracy of {len(results)} runs"
    return Drawing("accuracy", title, caption, f"Certified from {low:.1f}% to {high:.1f}%", figure)


def _rows(results: Sequence[RunResult]) -> list[tuple[str, RunResult | None]]:
    """Runs with their names; if these are long and models differ, grouped below the names of the models."""
    names = wording.run_names(results)
    models = dict.fromkeys(wording.model(result) for result in results)
    if max(map(len, names)) <= MAX_LINE_LENGTH or len(models) in (1, len(results)):
        return list(zip(map(_wrap, names), results, strict=True))
    rows: list[tuple[str, RunResult | None]] = []
    for model in models:
        group = [result for result in results if wording.model(result) == model]
        rows += [(_wrap(model, 56), None), *zip(map(_wrap, wording.run_names(group)), group, strict=True)]
    return rows


def patch_sizes(results: Sequence[RunResult]) -> Drawing | None:
    """Certified against the size of the patch, a line for each number of masks (and model, and so on)."""
    shares = all(isinstance(result.run.threat.shape, SquareShare) for result in results)
    lines = _lines(results, "Patch", _percent if shares else _side)
    caption = "Certified share against the size of the patch. Each size has its own masks."
    xlabel = "patch, % of the image" if shares else "side of the patch, px"
    return _draw("patch-size", "By patch size", caption, lines, xlabel, "patch size")


def mask_counts(results: Sequence[RunResult]) -> Drawing | None:
    """Certified against the number of masks."""
    lines = _lines(results, "Masks", lambda result: float(len(result.masks)) if result.has_masks else 0.0)
    caption = (
        "With more masks, each mask is smaller and hides less of the image. So one expects more proofs to succeed, at "
        "a higher cost."
    )
    return _draw("mask-count", "By number of masks", caption, lines, "masks", "masks")


SAME_COST = 1.05
"""Costs that differ by less are not drawn against each other."""


def costs(results: Sequence[RunResult]) -> Drawing | None:
    """Certified of several defenses against what it costs to certify an image; of one, the masks tell the cost."""
    lines = _lines(results, "Masks", lambda result: result.per_image[0], points=True)
    spread = [cost for line in lines.values() for cost, _ in line]
    if len({result.run.job["defense"] for result in results}) == 1 or max(spread) < SAME_COST * min(spread):
        return None
    caption = "What the certificate costs: labels computed for each image, on a logarithmic scale."
    return _draw("cost", "By cost", caption, lines, "classifications to certify an image", "cost", log=True)


def _lines(
    results: Sequence[RunResult], axis: str, x: Callable[[RunResult], float | None], *, points: bool = False
) -> Lines:
    """Join runs that differ only along one axis by a line, labelled by its other facets that vary.

    Lines of a single x are left out, unless `points` are wanted.
    """
    facets = [name for name in wording.varying(results) if name != axis] if len(results) > 1 else []
    lines: Lines = {}
    for result in results:
        at = x(result)
        if at is not None:
            values = wording.facets(result)
            label = " · ".join(wording.with_noun(name, values[name]) for name in facets)
            lines.setdefault(label, []).append((at, result))
    return {
        label: sorted(line, key=lambda point: point[0])
        for label, line in lines.items()
        if points or len({at for at, _ in line}) > 1
    }


def _side(result: RunResult) -> float | None:
    """The side of a single square patch in px, on images of one size."""
    threat = result.run.threat
    if isinstance(threat.shape, AnyRectangle) or len(result.sizes) > 1:
        return None
    height, width = threat.shapes(result.size)[0]
    return float(height) if height == width else None


def _percent(result: RunResult) -> float | None:
    shape = result.run.threat.shape
    return 100 * float(shape.share) if isinstance(shape, SquareShare) else None


def _draw(
    name: str, title: str, caption: str, lines: Lines, xlabel: str, axis: str, *, log: bool = False
) -> Drawing | None:
    """Certified accuracy along the lines; None if these have too few points."""
    if len({(label, at) for label, points in lines.items() for at, _ in points}) < FEWEST:
        return None
    figure, axes = blank()
    axes.set_xscale("log" if log else "linear")
    texts = []
    for number, (label, points) in enumerate(lines.items()):
        part = 1.0 if len(lines) == 1 else number / (len(lines) - 1)
        x = [at for at, _ in points]
        y = [result.summary.shares["certified"] for _, result in points]
        # Earlier lines are wider and paler, so that they stay visible below later ones of the same height.
        looks: Any = {"alpha": 0.35 + 0.65 * part, "linewidth": 2.8 - 1.2 * part, "markersize": 8 - 3.5 * part}
        looks |= {"marker": MARKERS[number % len(MARKERS)], "clip_on": False, "markeredgewidth": 0}
        axes.plot(x, [share.percent for share in y], color=ACCENT, label=label, **looks)
        if len(lines) == 1:
            low, high = zip(*(share.interval for share in y), strict=True)
            axes.fill_between(x, low, high, color=ACCENT, alpha=0.15, linewidth=0)
            caption += " Shaded: 95% intervals."
        last = f" to {y[-1]} at {x[-1]:g}" if len(points) > 1 else ""
        texts.append(f"{label + ': ' if label else ''}{y[0]} at {x[0]:g}{last}")
    axes.margins(y=0.1)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("certified, %")
    axes.set_ylim(max(0.0, axes.get_ylim()[0] - 3), min(100.0, axes.get_ylim()[1] + 3))
    if len(lines) > 1:
        add_legend(figure, axes, list(lines))
    ticks = spaced_ticks(axes, {at for points in lines.values() for at, _ in points})
    if len(ticks) <= 7:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.3g}" if at < 100 else f"{at:,.0f}")
    return Drawing(name, title, caption, f"Certified against {axis}. {'; '.join(texts)}", figure)


def spaced_ticks(axes: Axes, places: set[float]) -> list[float]:
    """Of the places along the x axis, those whose labels do not touch the one before."""
    ticks = sorted(places)
    across = axes.xaxis.get_transform().transform(np.array(ticks))
    chosen: list[int] = []
    for at in range(len(ticks)):
        if not chosen or across[at] - across[chosen[-1]] > MIN_DISTANCE * (across[-1] - across[0]):
            chosen.append(at)
    return [ticks[at] for at in chosen]


def add_legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    """A legend above the lines: labels at the ends of the lines could overlap."""
    longest = max(map(len, labels))
    columns = 3 if longest <= 15 else 2 if longest <= 26 else 1
    wrapped = [_wrap(label, 52) for label in labels]
    figure.legend(axes.get_lines(), wrapped, loc="outside upper left", ncols=columns)
    lines = sum(1 + label.count("\n") for label in wrapped)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-lines // columns))


def _wrap(name: str, width: int = MAX_LINE_LENGTH) -> str:
    """A name in short lines; it is not cut, since names may differ only at their ends."""
    return "\n".join(textwrap.wrap(name, width))
