"""The figures of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from patchcleanser.core.counts import counted
from patchcleanser.records.metrics import Proportion
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, DOT, INK, MUTED, RING, SOFT, WIDTH, Drawing, blank, dots, style
from patchcleanser.reports.run_results import RunResult
from patchcleanser.reports.run_tables import SHOWN_ALL, SHOWN_ENDS, by_certified, smaller_note

MAX_NAME_LENGTH = 26
"""Characters of a class name in a figure."""
SHADES = LinearSegmentedColormap.from_list("weakness", ["#f6f8ee", "#c9e5d4", "#7cc2a9", "#2a8c77", "#0a4a40"])
"""Colours of the map, from light (every proof holds) to dark (most fail). None of them is a role of the page, so
that a dark page does not invert the map."""
MAX_BLOCKS = 2500
"""A map of more blocks than this is drawn as pixels."""

Floats = NDArray[np.float64]
Pair = tuple[float, float]


def run_figures(result: RunResult, slug: str) -> dict[str, Drawing]:
    """All figures of a run, by name; `slug` makes the names of their files unique."""
    with style():
        drawings = [*classes(result), margins(result), smaller(result), weakness(result), detection(result)]
    return {drawing.name: replace(drawing, name=drawing.name + slug) for drawing in drawings if drawing is not None}


def classes(result: RunResult) -> list[Drawing]:
    """Certified share of each class as a bar, clean and undefended as dots; of many classes the best and the worst."""
    shown = by_certified(result)
    certified = "certified for detection" if result.detects else "certified"
    if len(shown) < 2:
        return []
    if len(shown) <= SHOWN_ALL:
        return [_classes(result, shown, "classes", f"{certified.capitalize()} by class")]
    ends = {"classes": ("most", shown[:SHOWN_ENDS]), "classes-least": ("least", shown[-SHOWN_ENDS:][::-1])}
    return [
        _classes(result, rows, name, f"The {SHOWN_ENDS} classes {which} often {certified}, of {len(shown):,}")
        for name, (which, rows) in ends.items()
    ]


def _classes(result: RunResult, shown: Sequence[tuple[int, dict[str, Proportion]]], name: str, title: str) -> Drawing:
    pitch = 0.36 if len(shown) <= SHOWN_ENDS else 0.25  # about that of the table beside it
    figure, axes = blank(height=0.7 + pitch * len(shown))
    y = np.arange(len(shown))[::-1].astype(float)
    shares = [share for _, share in shown]
    certified = [share[result.certified_key] for share in shares]
    axes.barh(y, [share.percent for share in certified], height=0.5, color=ACCENT, linewidth=0)
    for at, share in zip(y, certified, strict=True):
        axes.plot(share.interval, [at, at], color=SOFT, linewidth=1.2, solid_capstyle="butt")
    dots(axes, shares, y.tolist(), {"undefended": RING, "clean": DOT})
    names = [result.class_name(label) for label, _ in shown]
    axes.set_yticks(y, [n if len(n) <= MAX_NAME_LENGTH else f"{n[: MAX_NAME_LENGTH - 1]}…" for n in names])
    axes.set_ylim(y.min() - 0.7, y.max() + 0.7)
    axes.set_xlabel("percent of the images of the class")
    caption = (
        f"Bars: certified{' for detection' if result.detects else ''}, with 95% intervals as thin lines. Dots: "
        "defended, clean images. Rings: undefended; where both are equal, the ring is around the dot."
    )
    first, last = (f"{names[at]} {certified[at].percent:.0f}%" for at in (0, -1))
    return Drawing(name, title, caption, f"{title}, from {first} to {last}", figure)


def margins(result: RunResult) -> Drawing | None:
    """Histogram of how far the certified images are from a tie."""
    if len(result.margins) < 2:
        return None
    figure, axes = blank(height=2.3)
    top = float(np.quantile(result.margins, 0.99)) or 1.0
    counts, edges = np.histogram(np.minimum(result.margins, top), bins=min(30, 4 + len(result.margins) // 4))
    axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.92, align="edge", color=ACCENT, linewidth=0)
    axes.set_xlabel("margin")
    axes.set_ylabel("images")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlim(left=min(0.0, float(edges[0])))
    median = float(np.median(result.margins))
    certified = "detection-certified" if result.detects else "certified"
    caption = (
        f"How firm the certificates of {counted(len(result.margins), f'{certified} image')} are. The margin of an "
        f"image is {wording.margin(result)}; the median is {median:.2f}. Near zero, other hardware may round to "
        "another label."
    )
    return Drawing("margins", "Margins", caption, f"Histogram of margins with median {median:.2f}", figure)


def smaller(result: RunResult) -> Drawing | None:
    """The row certificate of the same masks against smaller patches; None if it is the same for all of them."""
    if result.derived is None or len(result.derived.smaller) < 2 or smaller_note(result):
        return None
    sides, shares = zip(*result.derived.smaller, strict=True)
    figure, axes = blank(height=2.5)
    low, high = zip(*(share.interval for share in shares), strict=True)
    axes.fill_between(sides, low, high, color=ACCENT, alpha=0.15, linewidth=0)
    looks: Any = {"color": ACCENT, "linewidth": 1.8, "markersize": 4, "clip_on": False}
    axes.plot(sides, [share.percent for share in shares], "o-", **looks)
    axes.set_ylim(max(0.0, min(low) - 8), min(100.0, max(high) + 8))
    axes.set_xlabel("side of a square patch, px")
    axes.set_ylabel("row-certified, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Images row-certified by the same masks against smaller square patches, with 95% intervals. "
        "Masks made for the smaller patch would be smaller too, and should certify more."
    )
    alt = f"Row-certified from {shares[0]} at {sides[0]} px to {shares[-1]} at {sides[-1]} px"
    return Drawing("smaller-patches", "Against smaller patches", caption, alt, figure)


def detection(result: RunResult) -> Drawing | None:
    """Clean accuracy and certified detection of Minority Reports, over its thresholds."""
    if result.derived is None or len(result.derived.detection) < 2:
        return None
    points = result.derived.detection
    figure, axes = blank()
    clean, certified = [p.clean.percent for p in points], [p.detection_certified.percent for p in points]
    axes.plot(clean, certified, "o-", color=INK, linewidth=1.4, markersize=3.5, clip_on=False)
    axes.set_xlabel("clean accuracy, % (an alert counts as wrong)")
    axes.set_ylabel("certified for detection, %")
    axes.grid(visible=True, axis="both")
    axes.margins(0.12)
    axes.set_xlim(max(0.0, axes.get_xlim()[0]), min(100.0, axes.get_xlim()[1]))
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(100.0, axes.get_ylim()[1]))
    first, last = (clean[0], certified[0]), (clean[-1], certified[-1])
    low, high = f"{points[0].threshold:g}", f"{points[-1].threshold:g}"
    labels = {first: low, last: high} if first != last else {first: f"{low} to {high}"}
    for point, threshold in labels.items():
        right = 2 * point[0] < sum(axes.get_xlim())  # towards the middle of the figure
        looks: Any = {
            "textcoords": "offset points",
            "color": MUTED,
            "fontsize": 8.5,
            "ha": "left" if right else "right",
        }
        axes.annotate(f"τ = {threshold}", point, xytext=(6 if right else -6, 4), **looks)
    caption = (
        "Minority Reports on the same labels, over its confidence threshold τ. A weaker guarantee than a certificate: "
        "the attacker cannot change the answer unnoticed, but can force an alert."
    )
    alt = f"Certified for detection from {min(certified):.1f}% to {max(certified):.1f}%"
    return Drawing("detection", "Detection instead of recovery", caption, alt, figure)


def weakness(result: RunResult) -> Drawing | None:
    """A map of the image: where a patch is not covered by the proof."""
    if result.derived is None or result.derived.weakness.size < 4:
        return None
    percent = 100 * result.derived.weakness
    lowest, highest = float(percent.min()), float(percent.max())
    scale = max(1.0, highest)
    (top, left), (height, width), frame = _placement(result, percent)
    rows, columns, blocks = _blocks(percent)
    figure, axes = blank(height=min(5.0, max(1.8, WIDTH * 0.9 * frame[0] / frame[1] * 0.82)))
    x, y = left + columns * width, top + rows * height
    _shade(axes, x, y, blocks / scale)
    axes.add_patch(Rectangle((x[0], y[0]), x[-1] - x[0], y[-1] - y[0], fill=False, edgecolor=SOFT, linewidth=0.8))
    axes.set_xlim(0, frame[1])
    axes.set_ylim(frame[0], 0)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    unit = "px" if len(result.sizes) == 1 else "% of the side"
    axes.set_xlabel(f"centre of the patch, {unit} from the left")
    axes.set_ylabel(f"{unit} from the top")
    _colour_scale(axes.inset_axes((1.04, 0.0, 0.045, 1.0)), scale)
    extremes = f"at most {highest:.1f}% and at least {lowest:.1f}% of the images"
    caption = f"{_caption(result)} Light is strong, dark is weak: {extremes}; the colours start at 0."
    return Drawing("weakness", "Where images are weak", caption, f"Heat map of uncovered places: {extremes}", figure)


def _placement(result: RunResult, percent: Floats) -> tuple[Pair, Pair, Pair]:
    """Where the map starts (top, left), the height and width of a cell, and of the frame.

    Maps are indexed by the corners of patches, and drawn at their centres: half a patch further. Where images
    differ in size, everything is in percent.
    """
    if len(result.sizes) > 1:
        return (0.0, 0.0), (100 / percent.shape[0], 100 / percent.shape[1]), (100.0, 100.0)
    room, shape = result.run.threat.room(result.size), result.run.threat.shapes(result.size)[0]
    start = (room.top + (shape[0] - 1) / 2, room.left + (shape[1] - 1) / 2)
    return start, (1.0, 1.0), (float(result.size[0]), float(result.size[1]))


def _caption(result: RunResult) -> str:
    shapes = result.run.threat.shapes(result.size)
    patch, note = f"{wording.px(shapes[0])} patch centred there", "No patch has its centre in the empty border."
    if len(result.sizes) > 1:
        patch, note = "patch there", f"Images of {len(result.sizes):,} sizes are laid over each other."
    more = " Of several shapes the first is shown." if len(shapes) > 1 else ""
    return f"Share of the images whose proof does not cover a {patch}. {note}{more}"


def _blocks(percent: Floats) -> tuple[Floats, Floats, Floats]:
    """A map of few distinct rows and columns as blocks: edges down, edges across, values."""
    down = [0, *(np.flatnonzero((percent[1:] != percent[:-1]).any(axis=1)) + 1)]
    across = [0, *(np.flatnonzero((percent[:, 1:] != percent[:, :-1]).any(axis=0)) + 1)]
    rows, columns = (np.array([*edges, end], float) for edges, end in zip((down, across), percent.shape, strict=True))
    return rows, columns, percent[np.ix_(down, across)]


def _shade(axes: Axes, x: Floats, y: Floats, values: Floats) -> None:
    """Blocks from light (0) to dark (1)."""
    mesh = axes.pcolormesh(x, y, SHADES(values), rasterized=values.size > MAX_BLOCKS)
    mesh.set_linewidth(0)
    mesh.set_antialiased(False)  # no hairlines between blocks


def _colour_scale(axes: Axes, highest: float) -> None:
    edges = np.linspace(0, highest, 41)
    _shade(axes, np.array([0.0, 1.0]), edges, edges[1:, None] / highest)
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_ylim(0, highest)
    axes.grid(visible=False)
    axes.set_ylabel("images not proved there, %")
    axes.yaxis.set_label_position("right")
    for side in axes.spines.values():
        side.set(visible=True, edgecolor=SOFT)
