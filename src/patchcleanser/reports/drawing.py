"""The style of figures, and how they are written to the page and to files.

Figures use a few colours, one for each role. In files these are plain colours on white. On the page each becomes a
CSS variable, so that one figure fits light, dark and print.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patchcleanser.records.atomic import whole_file
from patchcleanser.records.metrics import Proportion

INK, MUTED, RULE, ACCENT, SOFT = "#1d2126", "#656c74", "#d8dce0", "#0b6e5d", "#98a1aa"
ROLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", ACCENT: "--accent", SOFT: "--soft"}
WIDTH = 4.3
"""Width of a figure in inches: small enough for a phone, where 9-point text stays readable."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # class names and paths may contain $
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # keep text as text: small, selectable, and in the page's font
    "savefig.transparent": True,
}


RING, DISC, DOT = (
    {"mfc": face, "mec": edge, "markersize": size}
    for face, edge, size in (("none", MUTED, 8.0), (ACCENT, ACCENT, 5.5), (INK, INK, 3.2))
)
"""Shares as dots. Sizes differ, so that equal shares remain visible inside each other."""


@dataclass(frozen=True)
class Drawing:
    """A finished figure with the name of its files, title, caption, and alternative text for screen readers."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure

    def __post_init__(self) -> None:
        if self.figure.get_constrained_layout():  # laid out once, since it is written three times
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")


@contextmanager
def style() -> Iterator[None]:
    """Apply the style to figures drawn inside this context."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the page's font has the glyph
        yield


def blank(height: float = 2.9, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty figure of this size in inches, with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def dots(axes: Axes, shares: Sequence[dict[str, Proportion]], y: Sequence[float], markers: dict[str, Any]) -> None:
    """Shares from 0 to 100% as dots, one row for each y; those at 0 and 100 are not clipped."""
    for name, marker in markers.items():
        axes.plot([share[name].percent for share in shares], y, "o", label=name, zorder=3, clip_on=False, **marker)
    axes.set_xlim(0, 100)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def inline(drawing: Drawing) -> str:
    """The figure as SVG for a page: no prolog, unique ids, CSS variables for colours, the page's font."""
    out = io.StringIO()
    with style(), matplotlib.rc_context({"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.search(r"<svg.*</svg>", out.getvalue(), flags=re.DOTALL)
    text = "" if svg is None else re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[0], flags=re.DOTALL)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{drawing.name}-", text)
    text = text.replace("xlink:href", "href")
    for colour, role in ROLES.items():
        text = text.replace(colour, f"var({role})")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    box = re.search(r'viewBox="[^"]*"', text)
    title = f"<title>{escape(drawing.alt)}</title>"
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{escape(drawing.alt)}" class="figure">{title}'
    return re.sub(r"^<svg[^>]*>", lambda _: head, text)


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the figure as SVG and PNG, on white; return the files."""
    files = {folder / f"{drawing.name}.{ending}": dpi for ending, dpi in (("svg", 72), ("png", 200))}
    with style():
        for path, dpi in files.items():
            with whole_file(path) as part:
                ending = path.suffix[1:]
                drawing.figure.savefig(part, format=ending, dpi=dpi, facecolor="white", transparent=False)
    return [*files]
