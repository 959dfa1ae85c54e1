"""Figures of what was measured: python benchmarks/speed_figures.py draws results/speed/speed.json beside it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, save, style

TASKS = {
    "labels": "labels of a table, unchecked",
    "labels, nothing shared": "the same, nothing shared",
    "table": "whole table",
    "certify": "certify",
    "predict clean": "predict, masks agree",
    "predict worst": "predict, none agree",
}
Row = dict[str, Any]


def ratios(rows: list[Row], device: str, name: str) -> Drawing | None:
    """Times faster than the authors' loop, by network and task, on the machine that was measured last."""
    shown = [row for row in rows if row.get("device") == device and row["task"] in TASKS]
    if not shown:
        return None
    shown = [row for row in shown if row["hardware"] == shown[-1]["hardware"]]
    shown.sort(key=lambda row: (_network(row), list(TASKS).index(row["task"]), not row["real_images"]))
    lines = _lines(shown)
    chance = any(not row["real_images"] for row in shown)
    figure, axes = blank(height=0.9 + 0.17 * len(lines), width=6.4)
    places = np.arange(len(lines))[::-1].astype(float)
    for place, (_, row) in zip(places, lines, strict=True):
        if row is None:
            continue
        colour, ink = (ACCENT, INK) if row["real_images"] else (SOFT, MUTED)
        axes.barh(place, row["ratio"], height=0.8, color=colour, linewidth=0)
        axes.text(row["ratio"] * 1.07, place, f"{row['ratio']:.1f}×", va="center", fontsize=7, color=ink)
        words = f"{row['ours_ms']:,.1f} ms against {row['authors_ms']:,.0f}"
        axes.text(1, place, words, transform=axes.get_yaxis_transform(), va="center", ha="right", fontsize=7, color=ink)
    axes.set_xscale("log")
    axes.set_xlim(1, 40 * max(row["ratio"] for row in shown))  # words stand behind the bars
    axes.set_xticks([1, 10, 100], ["1×", "10×", "100×"])
    axes.set_ylim(-0.8, len(lines) - 0.2)
    axes.grid(visible=False)
    axes.axvline(1, color=SOFT, linewidth=1)
    axes.set_yticks(places, [words for words, _ in lines], fontsize=7)
    for (_, row), tick in zip(lines, axes.get_yticklabels(), strict=True):
        tick.set(**({"fontweight": "bold", "color": INK} if row is None else {}))
    axes.set_xlabel("times as fast as the authors' loop, an image" + (" (gray: random images)" if chance else ""))
    title = f"Ours against the authors' loop on {shown[-1]['hardware']}"
    return Drawing(name, title, "Both in one run.", f"{title}: {len(shown)} rows", figure)


def _network(row: Row) -> str:
    return f"{row['model']}{', random weights' if row['weights'] == 'random' else ''}"


def _lines(rows: list[Row]) -> list[tuple[str, Row | None]]:
    """Each network's name, then its rows; a task of real and of random images is named once."""
    lines: list[tuple[str, Row | None]] = []
    before: tuple[str, str] | None = None
    for row in rows:
        here = (_network(row), row["task"])
        if before is None or before[0] != here[0]:
            lines += [("", None)] * bool(lines) + [(here[0], None)]
        lines.append(("" if here == before else TASKS[row["task"]], row))
        before = here
    return lines


def growth(rows: list[Row], device: str, name: str) -> Drawing | None:
    """Seconds against the number of labels, whatever they are for, on the machine that was measured last."""
    shown = [row for row in rows if row["task"] == "growth" and row["device"] == device]
    if not shown:
        return None
    shown = [row for row in shown if row["hardware"] == shown[-1]["hardware"]]
    figure, axes = blank(height=3.1, width=5.4)
    lines: list[str] = []
    networks = list(dict.fromkeys(row["model"] for row in shown))
    for model, marker in zip(networks, cycle("os^D"), strict=False):
        points = sorted((row for row in shown if row["model"] == model), key=_labels)
        usual = Counter(row["images"] for row in points if row["patches"] == 1).most_common(1)[0][0]
        for row in points:
            colour = INK if row["patches"] > 1 else ACCENT if row["images"] == usual else MUTED
            axes.plot(_labels(row), _seconds(row), marker, color=colour, markersize=4.5, linewidth=0)
        most = points[-1]
        ends = np.array([_labels(points[0]), _labels(most)], dtype=float)
        axes.plot(ends, ends * _seconds(most) / _labels(most), color=SOFT, linewidth=1.2, zorder=0)
        lines.append(f"{model} {most['ms_a_union']:.2g}")
        if len(networks) > 1:
            words = f"{model}  "
            axes.text(_labels(most), _seconds(most), words, ha="right", va="bottom", fontsize=7, color=MUTED)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.9g}")
    axes.set_xlabel("labels: images times distinct unions of masks")
    axes.set_ylabel("seconds")
    for words, colour in {"2 to 6 masks an axis": ACCENT, "few to many images": MUTED, "two patches": INK}.items():
        axes.plot([], [], "o", color=colour, markersize=4.5, label=words)
    axes.legend(loc="upper left", frameon=False, fontsize=7, handletextpad=0.2)
    title = f"Cost grows with the number of labels on {shown[-1]['hardware']}"
    caption = (
        f"Whole tables of {min(row['images'] for row in shown):,} to {max(row['images'] for row in shown):,} images. "
        f"Lines, in proportion to the most labels, ms each: {', '.join(lines)}"
    )
    return Drawing(name, title, caption, title, figure)


def _labels(row: Row) -> int:
    return int(row["images"] * row["unions"])


def _seconds(row: Row) -> float:
    return float(row["ours_ms"] * row["images"] / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("results/speed/speed.json"))
    given = parser.parse_args()
    rows: list[Row] = json.loads(given.rows.read_text(encoding="utf-8"))
    with style():
        drawn = [ratios(rows, "cpu", "cpu"), ratios(rows, "cuda", "gpu")]
        drawn += [growth(rows, "cpu", "growth"), growth(rows, "cuda", "gpu-growth")]
        for drawing in drawn:
            if drawing is not None:
                save(drawing, given.rows.parent)


if __name__ == "__main__":
    main()
