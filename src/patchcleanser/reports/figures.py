"""The figures of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from patchcleanser.core.metrics import Share
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, settled, style
from patchcleanser.reports.maps import weakness
from patchcleanser.reports.results import ALL, ENDS, by_promise
from patchcleanser.reports.studies import Study

LONGEST = 26
"""Letters of a class name in a figure."""


def run_figures(study: Study, slug: str) -> dict[str, Drawing]:
    """Everything that can be drawn of this run, by kind."""
    with style():
        made = settled([classes(study), margins(study), smaller(study), weakness(study), detection(study)])
    return {drawing.name: replace(drawing, name=drawing.name + slug) for drawing in made}


def classes(study: Study) -> Drawing | None:
    """Certified share of each class as a bar, clean and undefended as dots."""
    shown = by_promise(study)
    many = len(shown) > ALL
    if many:
        shown = [*shown[:ENDS], *shown[-ENDS:]]
    if len(shown) < 2:
        return None
    figure, axes = blank(height=0.7 + 0.19 * len(shown))
    places = np.arange(len(shown))[::-1].astype(float) - (1.5 * (np.arange(len(shown)) >= ENDS) if many else 0)
    shares = [share for _, share in shown]
    axes.barh(places, [s[study.promise].percent for s in shares], height=0.62, color=ACCENT, linewidth=0)
    for place, share in zip(places, shares, strict=True):
        low, high = share[study.promise].interval
        axes.plot([low, high], [place, place], color=SOFT, linewidth=1.2, solid_capstyle="butt")
    points = {"undefended": ("none", MUTED), "clean": (INK, INK)}
    for name, (face, edge) in points.items():
        at = [s[name].percent for s in shares]
        axes.plot(at, places, "o", markersize=4, markerfacecolor=face, markeredgecolor=edge, label=name)
    axes.set_yticks(places, [_short(study.class_name(label)) for label, _ in shown])
    axes.set_xlim(0, 101)
    axes.set_ylim(places.min() - 0.7, places.max() + 0.7)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("percent of the images of the class")
    promise = "Certified for detection" if study.detects else "Certified"
    caption = (
        f"Bars: {promise.lower()}, thin lines its 95% interval. Full dots: defended, clean images. Rings: undefended."
    )
    caption += f" The {ENDS} best and the {ENDS} worst of {len(study.classes):,} classes." if many else ""
    best, worst = (f"{study.class_name(y)} {s[study.promise].percent:.0f}%" for y, s in (shown[0], shown[-1]))
    return Drawing("classes", f"{promise} by class", caption, f"{promise} by class, from {best} to {worst}", figure)


def margins(study: Study) -> Drawing | None:
    """How far the certified images are from a tie."""
    if len(study.margins) < 2:
        return None
    figure, axes = blank(height=2.3)
    top = float(np.quantile(study.margins, 0.99)) or 1.0
    counts, edges = np.histogram(np.minimum(study.margins, top), bins=min(30, 4 + len(study.margins) // 4))
    axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.92, align="edge", color=ACCENT, linewidth=0)
    axes.set_xlabel("smallest margin between the two highest logits")
    axes.set_ylabel("images")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlim(left=min(0.0, float(edges[0])))
    middle = float(np.median(study.margins))
    kind = "detection-certified" if study.detects else "certified"
    caption = (
        f"The smallest logit margin among all labels a certificate rests on, for the {len(study.margins):,} {kind} "
        f"images; half lie above {middle:.2f}. Near zero, other hardware may round to another label."
    )
    return Drawing("margins", "Margins", caption, f"Histogram of margins with median {middle:.2f}", figure)


def smaller(study: Study) -> Drawing | None:
    """The row certificate of the same masks against smaller patches."""
    if study.derived is None or len(study.derived.smaller) < 2:
        return None
    sides = [side for side, _ in study.derived.smaller]
    shares = [share for _, share in study.derived.smaller]
    figure, axes = blank()
    curve(axes, sides, shares)
    axes.set_xlabel("side of a square patch, px")
    axes.set_ylabel("row-certified, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Images row-certified by the very same masks against smaller square patches, with 95% intervals. "
        "Masks made for the smaller patch would be smaller too, and certify more."
    )
    alt = f"Row-certified from {shares[0]} at {sides[0]} px to {shares[-1]} at {sides[-1]} px"
    return Drawing("smaller-patches", "Against smaller patches", caption, alt, figure)


def curve(axes: Axes, x: Sequence[float], shares: Sequence[Share]) -> None:
    """A line through shares, with the band of their intervals."""
    low, high = zip(*(share.interval for share in shares), strict=True)
    axes.fill_between(x, low, high, color=ACCENT, alpha=0.15, linewidth=0)
    axes.plot(x, [share.percent for share in shares], "o-", color=ACCENT, linewidth=1.8, markersize=4)
    axes.set_ylim(max(0.0, min(low) - 8), min(101.0, max(high) + 8))


def detection(study: Study) -> Drawing | None:
    """Minority Reports' trade between accuracy and detection, over its thresholds."""
    if study.derived is None or len(study.derived.detection) < 2:
        return None
    found = study.derived.detection
    figure, axes = blank()
    clean, certified = [at.clean.percent for at in found], [at.detection_certified.percent for at in found]
    axes.plot(clean, certified, "o-", color=INK, linewidth=1.4, markersize=3.5)
    for at in (found[0], found[-1]):
        axes.annotate(
            f"τ = {at.threshold:g}",
            (at.clean.percent, at.detection_certified.percent),
            xytext=(5, 5),
            textcoords="offset points",
            color=MUTED,
            fontsize=8.5,
        )
    axes.set_xlabel("clean accuracy, % (an alert counts as wrong)")
    axes.set_ylabel("certified for detection, %")
    axes.grid(visible=True, axis="both")
    axes.margins(0.12)
    caption = (
        "Minority Reports on the same labels, over its confidence threshold τ. A weaker promise than a certificate: "
        "the attacker cannot change the answer unnoticed, but can force an alert."
    )
    alt = f"Certified for detection from {min(certified):.1f}% to {max(certified):.1f}%"
    return Drawing("detection", "Detection instead of recovery", caption, alt, figure)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
