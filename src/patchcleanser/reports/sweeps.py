"""The figures of several runs together: against patch size, mask count and cost."""

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
from patchcleanser.reports.drawing import ACCENT, DISC, DOT, RING, Drawing, blank, dots, settled, style
from patchcleanser.reports.studies import Study

MARKERS = "os^Dv<>P"
MOST_RUNS = 40
LONGEST = 34
"""Letters in a line of a run's name."""
CLOSE = 0.09
"""Numbers nearer to each other than this share of an axis would touch."""

Measure = Callable[[Study], float | None]


def sweep_figures(studies: Sequence[Study]) -> list[Drawing]:
    """Whatever several recovery runs show together."""
    with style():
        return settled([accuracies(studies), patch_sizes(studies), mask_counts(studies), costs(studies)])


def accuracies(studies: Sequence[Study]) -> Drawing | None:
    """All runs below each other: undefended, clean, certified."""
    if len(studies) > MOST_RUNS:
        return None
    rows = _rows(studies)
    # Lines above and below a row, so that long names do not touch.
    heights = [0.1 + 0.15 * (1 + name.count("\n")) for name, _ in rows]
    figure, axes = blank(height=0.7 + sum(heights))
    middles = sum(heights) - np.cumsum(heights) + np.array(heights) / 2
    places = {study: float(at) for (_, study), at in zip(rows, middles, strict=True) if study is not None}
    for study, place in places.items():
        low, high = study.summary.shares["certified"].interval
        axes.plot([low, high], [place, place], color=ACCENT, linewidth=2.2, alpha=0.35, solid_capstyle="butt")
    shares = [study.summary.shares for study in places]
    dots(axes, shares, list(places.values()), {"undefended": RING, "certified": DISC, "clean": DOT})
    across = blended_transform_factory(figure.transFigure, axes.transData)
    for (name, run), at in zip(rows, middles, strict=True):
        if run is None:
            axes.text(0.01, at, name, transform=across, va="center", fontsize=8.5, fontweight="bold", in_layout=False)
    axes.set_yticks(list(places.values()), [name for name, run in rows if run is not None])
    axes.set_ylim(0, sum(heights))
    axes.set_xlabel("percent of the images")
    figure.legend(loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.2)
    low, high = (f([s.summary.shares["certified"].percent for s in studies]) for f in (min, max))
    caption = (
        "Undefended, defended (clean) and certified accuracy; the bar is the certified share's 95% interval. "
        "Equal shares lie inside each other."
    )
    title = f"Accuracy of {len(studies)} runs"
    return Drawing("accuracy", title, caption, f"Certified from {low:.1f}% to {high:.1f}%", figure)


def _rows(studies: Sequence[Study]) -> list[tuple[str, Study | None]]:
    """Runs with their names; where those are long and models differ, below the name of each model."""
    names = wording.names(studies)
    models = dict.fromkeys(wording.model(study) for study in studies)
    if max(map(len, names)) <= LONGEST or len(models) in (1, len(studies)):
        return list(zip(map(_wrapped, names), studies, strict=True))
    rows: list[tuple[str, Study | None]] = []
    for model in models:
        mine = [study for study in studies if wording.model(study) == model]
        rows += [(_wrapped(model, 56), None), *zip(map(_wrapped, wording.names(mine)), mine, strict=True)]
    return rows


def patch_sizes(studies: Sequence[Study]) -> Drawing | None:
    """Certified against the patch's size, a line for each number of masks (and model, and so on)."""
    shares = all(isinstance(study.run.threat.shape, SquareShare) for study in studies)
    lines = _lines(studies, "Patch", _percent if shares else _side)
    if not lines:
        return None
    figure, axes = blank()
    _draw(figure, axes, lines)
    axes.set_xlabel("patch, % of the image" if shares else "side of the patch, px")
    caption = "Certified share against the size of the patch. Each size has masks of its own."
    return Drawing("patch-size", "Against patch size", caption, _alt("patch size", lines), figure)


def mask_counts(studies: Sequence[Study]) -> Drawing | None:
    """Certified against the number of masks."""
    lines = _lines(studies, "Masks", lambda study: float(len(study.masks)) if study.has_masks else 0.0)
    if not lines:
        return None
    figure, axes = blank()
    _draw(figure, axes, lines)
    axes.set_xlabel("masks")
    caption = (
        "More masks are smaller masks. They hide less of the image, so one expects more proofs to succeed, at a higher "
        "cost; whether they do, and how far chance reaches, the lines and the intervals in the table tell."
    )
    return Drawing("mask-count", "Against the number of masks", caption, _alt("masks", lines), figure)


def costs(studies: Sequence[Study]) -> Drawing | None:
    """Certified against what an image costs to certify; of several defenses, a point for each."""
    several = len({study.run.job["defense"] for study in studies}) > 1
    lines = _lines(studies, "Masks", lambda study: study.per_image[0], points=several)
    if not lines:
        return None
    figure, axes = blank()
    axes.set_xscale("log")
    _draw(figure, axes, lines)
    axes.set_xlabel("classifications to certify an image")
    caption = "What the certificate costs: labels computed for each image, on a logarithmic scale."
    return Drawing("cost", "Against cost", caption, _alt("cost", lines), figure)


def _lines(
    studies: Sequence[Study], axis: str, measure: Measure, *, points: bool = False
) -> dict[str, list[tuple[float, Study]]]:
    """Runs that differ only along one axis make a line; each line by what sets it apart from the others.

    A run for itself is a line too if `points` are wanted.
    """
    others = [name for name in wording.varying(studies) if name != axis] if len(studies) > 1 else []
    lines: dict[str, list[tuple[float, Study]]] = {}
    for study in studies:
        at = measure(study)
        if at is not None:
            facets = wording.facets(study)
            label = " · ".join(wording.told(n, facets[n]) for n in others)
            lines.setdefault(label, []).append((at, study))
    return {
        label: sorted(found, key=lambda point: point[0])
        for label, found in lines.items()
        if points or len({at for at, _ in found}) > 1
    }


def _side(study: Study) -> float | None:
    """The side of a single square patch in px, on images of one size."""
    threat = study.run.threat
    if isinstance(threat.shape, AnyRectangle) or len(study.sizes) > 1:
        return None
    height, width = threat.shapes(study.size)[0]
    return float(height) if height == width else None


def _percent(study: Study) -> float | None:
    shape = study.run.threat.shape
    return 100 * float(shape.share) if isinstance(shape, SquareShare) else None


def _draw(figure: Figure, axes: Axes, lines: dict[str, list[tuple[float, Study]]]) -> None:
    for number, (label, points) in enumerate(lines.items()):
        part = 1.0 if len(lines) == 1 else number / (len(lines) - 1)
        x = [at for at, _ in points]
        y = [study.summary.shares["certified"].percent for _, study in points]
        # Earlier lines are wider and paler, so that those of equal height stay visible below later ones.
        looks: Any = {"alpha": 0.35 + 0.65 * part, "linewidth": 2.8 - 1.2 * part, "markersize": 8 - 3.5 * part}
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(x, y, marker=marker, color=ACCENT, label=label, clip_on=False, markeredgewidth=0, **looks)
        if len(lines) == 1:
            low, high = zip(*(study.summary.shares["certified"].interval for _, study in points), strict=True)
            axes.fill_between(x, low, high, color=ACCENT, alpha=0.15, linewidth=0)
    axes.margins(y=0.1)
    axes.set_ylabel("certified, %")
    axes.set_ylim(max(0.0, axes.get_ylim()[0] - 3), min(100.0, axes.get_ylim()[1] + 3))
    if len(lines) > 1:
        _name_lines(figure, axes, list(lines))
    ticks = _apart(axes, {at for points in lines.values() for at, _ in points})
    if len(ticks) <= 7:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.3g}" if at < 100 else f"{at:,.0f}")


def _apart(axes: Axes, places: set[float]) -> list[float]:
    """Of the places along an axis, those whose numbers do not touch the one before."""
    ticks = sorted(places)
    across = axes.xaxis.get_transform().transform(np.array(ticks))
    kept: list[int] = []
    for at in range(len(ticks)):
        if not kept or across[at] - across[kept[-1]] > CLOSE * (across[-1] - across[0]):
            kept.append(at)
    return [ticks[at] for at in kept]


def _name_lines(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    """A legend above the lines: behind their ends the names of lines that meet would overlap."""
    longest = max(map(len, labels))
    columns = 3 if longest <= 15 else 2 if longest <= 26 else 1
    wrapped = [_wrapped(label, 52) for label in labels]
    figure.legend(axes.get_lines(), wrapped, loc="outside upper left", ncols=columns)
    lines = sum(1 + label.count("\n") for label in wrapped)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-lines // columns))


def _alt(axis: str, lines: dict[str, list[tuple[float, Study]]]) -> str:
    told = []
    for label, points in lines.items():
        (first, start), (last, end) = points[0], points[-1]
        shares = (start.summary.shares["certified"], end.summary.shares["certified"])
        end_words = f" to {shares[1]} at {last:g}" if len(points) > 1 else ""
        told.append(f"{label + ': ' if label else ''}{shares[0]} at {first:g}{end_words}")
    return f"Certified against {axis}. " + "; ".join(told)


def _wrapped(name: str, width: int = LONGEST) -> str:
    """A name of any length, whole, in short lines: what sets it apart may be its end."""
    return "\n".join(textwrap.wrap(name, width))
