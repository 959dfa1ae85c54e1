"""The figures of several runs together: against patch size, mask count and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from patchcleanser.core.threats import AnyRectangle, SquareShare
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, Drawing, blank, settled, style
from patchcleanser.reports.studies import Study

MARKERS = "os^Dv<>P"
MOST_RUNS = 40

Measure = Callable[[Study], float | None]


def sweep_figures(studies: Sequence[Study]) -> list[Drawing]:
    """Whatever several recovery runs show together."""
    with style():
        return settled([accuracies(studies), patch_sizes(studies), mask_counts(studies), costs(studies)])


def accuracies(studies: Sequence[Study]) -> Drawing | None:
    """All runs below each other: undefended, clean, certified."""
    if len(studies) > MOST_RUNS:
        return None
    figure, axes = blank(height=0.7 + 0.24 * len(studies))
    places = np.arange(len(studies))[::-1]
    for study, place in zip(studies, places, strict=True):
        low, high = study.summary.shares["certified"].interval
        axes.plot([low, high], [place, place], color=ACCENT, linewidth=2.2, alpha=0.35, solid_capstyle="butt")
    looks = {"undefended": ("none", MUTED, 4.5), "clean": (INK, INK, 4.0), "certified": (ACCENT, ACCENT, 5.5)}
    for name, (face, edge, size) in looks.items():
        at = [study.summary.shares[name].percent for study in studies]
        axes.plot(at, places, "o", mfc=face, mec=edge, markersize=size, label=name)
    axes.set_yticks(places, [_short(name) for name in wording.names(studies)])
    axes.set_ylim(-0.7, len(studies) - 0.3)
    axes.set_xlim(0, 101)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("percent of the images")
    figure.legend(loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.2)
    low, high = (f([s.summary.shares["certified"].percent for s in studies]) for f in (min, max))
    caption = "Undefended, defended and certified accuracy of every run; the bar is the certified share's 95% interval."
    return Drawing("accuracy", "All runs", caption, f"Certified from {low:.1f}% to {high:.1f}%", figure)


def patch_sizes(studies: Sequence[Study]) -> Drawing | None:
    """Certified against the patch's size, a line for each number of masks (and model, and so on)."""
    shares = all(isinstance(study.run.threat.shape, SquareShare) for study in studies)
    lines = _lines(studies, "Patch", _percent if shares else _side)
    if not lines:
        return None
    figure, axes = blank()
    _draw(axes, lines, "certified")
    axes.set_xlabel("patch, % of the image" if shares else "side of the patch, px")
    caption = "Certified share against the size of the patch. Each size has masks of its own."
    return Drawing("patch-size", "Against patch size", caption, _alt("patch size", lines), figure)


def mask_counts(studies: Sequence[Study]) -> Drawing | None:
    """Certified against the number of masks."""
    lines = _lines(studies, "Masks", lambda study: float(len(study.masks)))
    if not lines:
        return None
    figure, axes = blank()
    _draw(axes, lines, "certified")
    axes.set_xlabel("masks")
    caption = "More masks are smaller masks: they hide less of the image, so more proofs succeed, at a higher cost."
    return Drawing("mask-count", "Against the number of masks", caption, _alt("masks", lines), figure)


def costs(studies: Sequence[Study]) -> Drawing | None:
    """Certified against what an image costs to certify."""
    lines = _lines(studies, "Masks", lambda study: study.per_image[0])
    if not lines:
        return None
    figure, axes = blank()
    axes.set_xscale("log")
    _draw(axes, lines, "certified")
    axes.set_xlabel("classifications to certify an image")
    caption = "What the certificate costs: labels computed for each image, on a logarithmic scale."
    return Drawing("cost", "Against cost", caption, _alt("cost", lines), figure)


def _lines(studies: Sequence[Study], axis: str, measure: Measure) -> dict[str, list[tuple[float, Study]]]:
    """Runs that differ only along one axis make a line; each line by what sets it apart from the others."""
    others = [name for name in wording.varying(studies) if name != axis] if len(studies) > 1 else []
    lines: dict[str, list[tuple[float, Study]]] = {}
    for study in studies:
        at = measure(study)
        if at is not None:
            facets = wording.facets(study)
            label = " · ".join(f"{facets[n]} masks" if n == "Masks" else facets[n] for n in others)
            lines.setdefault(label, []).append((at, study))
    return {
        label: sorted(points, key=lambda point: point[0])
        for label, points in lines.items()
        if len({at for at, _ in points}) > 1
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


def _draw(axes: Axes, lines: dict[str, list[tuple[float, Study]]], share: str) -> None:
    ends: list[tuple[float, str, float]] = []
    for number, (label, points) in enumerate(lines.items()):
        strength = 1.0 if len(lines) == 1 else 0.35 + 0.65 * number / (len(lines) - 1)
        x = [at for at, _ in points]
        y = [study.summary.shares[share].percent for _, study in points]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(x, y, marker=marker, color=ACCENT, alpha=strength, linewidth=1.8, markersize=5)
        if len(lines) == 1:
            low, high = zip(*(study.summary.shares[share].interval for _, study in points), strict=True)
            axes.fill_between(x, low, high, color=ACCENT, alpha=0.15, linewidth=0)
        ends.append((y[-1], label, x[-1]))
    _name_lines(axes, ends)
    axes.set_ylabel(f"{share}, %")
    axes.set_ylim(max(0.0, axes.get_ylim()[0] - 3), min(101.0, axes.get_ylim()[1] + 3))
    ticks = sorted({at for points in lines.values() for at, _ in points})
    if len(ticks) <= 7:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.4g}" if at < 1000 else f"{at:,.0f}")


def _name_lines(axes: Axes, ends: list[tuple[float, str, float]]) -> None:
    """Each line's name behind its last point, pushed apart where they would overlap."""
    axes.margins(y=0.1)
    low, high = axes.get_ylim()
    gap, last = (high - low) * 0.075, -np.inf
    for y, label, x in sorted(ends):
        place = max(y, last + gap)
        last = place
        axes.annotate(
            label, (x, place), xytext=(7, 0), textcoords="offset points", color=INK, fontsize=8.5, va="center"
        )


def _alt(axis: str, lines: dict[str, list[tuple[float, Study]]]) -> str:
    told = []
    for label, points in lines.items():
        (first, start), (last, end) = points[0], points[-1]
        shares = (start.summary.shares["certified"], end.summary.shares["certified"])
        told.append(f"{label + ': ' if label else ''}{shares[0]} at {first:g} to {shares[1]} at {last:g}")
    return f"Certified against {axis}. " + "; ".join(told)


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:33]}…"
