"""The figures of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from patchcleanser.records.metrics import Proportion
from patchcleanser.reports.drawing import ACCENT, DOT, INK, MUTED, RING, SOFT, Drawing, blank, dots, settled, style
from patchcleanser.reports.maps import weakness
from patchcleanser.reports.results import ALL, ENDS, by_promise, flat
from patchcleanser.reports.studies import Study

LONGEST = 26
"""Letters of a class name in a figure."""


def run_figures(study: Study, slug: str) -> dict[str, Drawing]:
    """Everything that can be drawn of this run, by kind."""
    with style():
        made = settled([*classes(study), margins(study), smaller(study), weakness(study), detection(study)])
    return {drawing.name: replace(drawing, name=drawing.name + slug) for drawing in made}


def classes(study: Study) -> list[Drawing]:
    """Certified share of each class as a bar, clean and undefended as dots; of many classes the best and the worst."""
    shown, promise = by_promise(study), "Certified for detection" if study.detects else "Certified"
    if len(shown) < 2:
        return []
    if len(shown) <= ALL:
        return [_classes(study, shown, "classes", f"{promise} by class")]
    best, worst = shown[:ENDS], shown[-ENDS:][::-1]
    return [
        _classes(study, best, "classes", f"The {ENDS} classes most often {promise.lower()}, of {len(shown):,}"),
        _classes(study, worst, "classes-least", f"The {ENDS} classes least often {promise.lower()}, of {len(shown):,}"),
    ]


def _classes(study: Study, shown: Sequence[tuple[int, dict[str, Proportion]]], name: str, title: str) -> Drawing:
    pitch = 0.36 if len(shown) <= ENDS else 0.25  # about that of the table beside it
    figure, axes = blank(height=0.7 + pitch * len(shown))
    places = np.arange(len(shown))[::-1].astype(float)
    shares = [share for _, share in shown]
    axes.barh(places, [s[study.promise].percent for s in shares], height=0.5, color=ACCENT, linewidth=0)
    for place, share in zip(places, shares, strict=True):
        low, high = share[study.promise].interval
        axes.plot([low, high], [place, place], color=SOFT, linewidth=1.2, solid_capstyle="butt")
    dots(axes, shares, places.tolist(), {"undefended": RING, "clean": DOT})
    axes.set_yticks(places, [_short(study.class_name(label)) for label, _ in shown])
    axes.set_ylim(places.min() - 0.7, places.max() + 0.7)
    axes.set_xlabel("percent of the images of the class")
    promise = "certified for detection" if study.detects else "certified"
    caption = (
        f"Bars: {promise}, thin lines its 95% interval. Dots: defended, clean images. Rings: undefended; where both "
        "are equal, the ring lies around the dot."
    )
    first, last = (f"{study.class_name(y)} {s[study.promise].percent:.0f}%" for y, s in (shown[0], shown[-1]))
    return Drawing(name, title, caption, f"{title}, from {first} to {last}", figure)


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
    """The row certificate of the same masks against smaller patches; a flat line is said in a sentence instead."""
    if study.derived is None or len(study.derived.smaller) < 2 or flat(study):
        return None
    sides = [side for side, _ in study.derived.smaller]
    shares = [share for _, share in study.derived.smaller]
    figure, axes = blank(height=2.5)
    curve(axes, sides, shares)
    axes.set_xlabel("side of a square patch, px")
    axes.set_ylabel("row-certified, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Images row-certified by the very same masks against smaller square patches, with 95% intervals. "
        "Masks made for the smaller patch would be smaller too, and should certify more."
    )
    alt = f"Row-certified from {shares[0]} at {sides[0]} px to {shares[-1]} at {sides[-1]} px"
    return Drawing("smaller-patches", "Against smaller patches", caption, alt, figure)


def curve(axes: Axes, x: Sequence[float], shares: Sequence[Proportion]) -> None:
    """A line through shares, with the band of their intervals."""
    low, high = zip(*(share.interval for share in shares), strict=True)
    axes.fill_between(x, low, high, color=ACCENT, alpha=0.15, linewidth=0)
    axes.plot(x, [share.percent for share in shares], "o-", color=ACCENT, linewidth=1.8, markersize=4, clip_on=False)
    axes.set_ylim(max(0.0, min(low) - 8), min(100.0, max(high) + 8))


def detection(study: Study) -> Drawing | None:
    """Minority Reports' trade between accuracy and detection, over its thresholds."""
    if study.derived is None or len(study.derived.detection) < 2:
        return None
    found = study.derived.detection
    figure, axes = blank()
    clean, certified = [at.clean.percent for at in found], [at.detection_certified.percent for at in found]
    axes.plot(clean, certified, "o-", color=INK, linewidth=1.4, markersize=3.5, clip_on=False)
    axes.set_xlabel("clean accuracy, % (an alert counts as wrong)")
    axes.set_ylabel("certified for detection, %")
    axes.grid(visible=True, axis="both")
    axes.margins(0.12)
    axes.set_xlim(max(0.0, axes.get_xlim()[0]), min(100.0, axes.get_xlim()[1]))
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(100.0, axes.get_ylim()[1]))
    first, last = (clean[0], certified[0]), (clean[-1], certified[-1])
    _name_threshold(axes, first, f"{found[0].threshold:g}" + (f" to {found[-1].threshold:g}" if last == first else ""))
    if last != first:
        _name_threshold(axes, last, f"{found[-1].threshold:g}")
    caption = (
        "Minority Reports on the same labels, over its confidence threshold τ. A weaker promise than a certificate: "
        "the attacker cannot change the answer unnoticed, but can force an alert."
    )
    alt = f"Certified for detection from {min(certified):.1f}% to {max(certified):.1f}%"
    return Drawing("detection", "Detection instead of recovery", caption, alt, figure)


def _name_threshold(axes: Axes, point: tuple[float, float], value: str) -> None:
    """A threshold beside its point, towards the middle of the figure."""
    right = 2 * point[0] < sum(axes.get_xlim())
    looks: Any = {"textcoords": "offset points", "color": MUTED, "fontsize": 8.5}
    axes.annotate(f"τ = {value}", point, xytext=(6 if right else -6, 4), ha="left" if right else "right", **looks)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
