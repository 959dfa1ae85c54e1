"""The map of where a patch is not reached by the proofs."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from patchcleanser.reports import wording
from patchcleanser.reports.drawing import SOFT, WIDTH, Drawing, blank
from patchcleanser.reports.studies import Study

Floats = NDArray[np.float64]

SHADES = LinearSegmentedColormap.from_list("weakness", ["#f6f8ee", "#c9e5d4", "#7cc2a9", "#2a8c77", "#0a4a40"])
"""From light where every proof holds to dark where most are missed. Colours of its own, none of the page's roles:
a map must not turn over where the page is dark."""
HEAVY = 2500
"""A map of more blocks than this is drawn in pixels."""


def weakness(study: Study) -> Drawing | None:
    """Where a patch is not reached by the proof, over the image."""
    if study.derived is None or study.derived.weakness.size < 4:
        return None
    found = 100 * study.derived.weakness
    least, most = float(found.min()), float(found.max())
    top_of_scale = max(1.0, most)
    (top, left), (height, width), frame = _place(study, found)
    rows, columns, blocks = _blocks(found)
    shape = 0.9 * frame[0] / frame[1]
    figure, axes = blank(height=min(5.0, max(1.8, WIDTH * shape * 0.82)))
    x, y = left + columns * width, top + rows * height
    _shade(axes, x, y, blocks / top_of_scale)
    axes.add_patch(Rectangle((x[0], y[0]), x[-1] - x[0], y[-1] - y[0], fill=False, edgecolor=SOFT, linewidth=0.8))
    axes.set_xlim(0, frame[1])
    axes.set_ylim(frame[0], 0)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    unit = "px" if len(study.sizes) == 1 else "% of the side"
    axes.set_xlabel(f"centre of the patch, {unit} from the left")
    axes.set_ylabel(f"{unit} from the top")
    _scale(axes.inset_axes((1.04, 0.0, 0.045, 1.0)), top_of_scale)
    weakest = f"{most:.1f}% at the weakest place, {least:.1f}% at the strongest"
    caption = f"{_caption(study)} Light is strong, dark is weak: {weakest}; the colours start at 0."
    return Drawing("weakness", "Where images are weak", caption, f"Heat map of unproved places: {weakest}", figure)


def _place(study: Study, found: Floats) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Where the map starts (top, left), the height and width of a cell, and of the frame.

    Maps count the corners of patches; a patch lies around its centre, so the map is moved by half a patch.
    Where images differ in size everything is relative.
    """
    if len(study.sizes) > 1:
        return (0.0, 0.0), (100 / found.shape[0], 100 / found.shape[1]), (100.0, 100.0)
    room, shape = study.run.threat.room(study.size), study.run.threat.shapes(study.size)[0]
    start = (room.top + (shape[0] - 1) / 2, room.left + (shape[1] - 1) / 2)
    return start, (1.0, 1.0), (float(study.size[0]), float(study.size[1]))


def _caption(study: Study) -> str:
    shape = study.run.threat.shapes(study.size)[0]
    if len(study.sizes) > 1:
        patch, rest = "patch there", f"Images of {len(study.sizes):,} sizes are laid over each other."
    else:
        patch = f"{wording.px(shape)} patch with its centre there"
        rest = "No patch has its centre in the empty border."
    more = " Of several shapes the first is shown." if len(study.run.threat.shapes(study.size)) > 1 else ""
    return f"Share of the images whose proof does not reach a {patch}. {rest}{more}"


def _blocks(found: Floats) -> tuple[Floats, Floats, Floats]:
    """A map made of few different rows and columns as blocks: edges down, edges across, values."""
    down = [0, *(np.flatnonzero((found[1:] != found[:-1]).any(axis=1)) + 1)]
    across = [0, *(np.flatnonzero((found[:, 1:] != found[:, :-1]).any(axis=0)) + 1)]
    rows, columns = (np.array([*edges, end], float) for edges, end in zip((down, across), found.shape, strict=True))
    return rows, columns, found[np.ix_(down, across)]


def _shade(axes: Axes, x: Floats, y: Floats, weak: Floats) -> None:
    """Blocks, the weaker the darker; 1 is the weakest place of the map."""
    mesh = axes.pcolormesh(x, y, SHADES(weak), rasterized=weak.size > HEAVY)
    mesh.set_linewidth(0)
    mesh.set_antialiased(False)  # no hairlines between blocks


def _scale(axes: Axes, most: float) -> None:
    """What the shades mean."""
    edges = np.linspace(0, most, 41)
    _shade(axes, np.array([0.0, 1.0]), edges, edges[1:, None] / most)
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_ylim(0, most)
    axes.grid(visible=False)
    axes.set_ylabel("images not proved there, %")
    axes.yaxis.set_label_position("right")
    for side in axes.spines.values():
        side.set(visible=True, edgecolor=SOFT)
