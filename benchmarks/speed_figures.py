"""Figures of what was measured: python benchmarks/speed_figures.py draws results/speed/speed.json beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from patchcleanser.reports.drawing import ACCENT, INK, SOFT, Drawing, blank, save, settled, style

TASKS = {
    "labels": "labels of a table, unchecked",
    "labels, nothing shared": "the same, nothing shared",
    "table": "whole table",
    "certify": "certify",
    "predict clean": "predict, masks agree",
    "predict worst": "predict, none agree",
}
Row = dict[str, Any]


def _named(row: Row) -> str:
    chance = ", random weights" if row["weights"] == "random" else ""
    chance += "" if row["real_images"] else ", random images"
    return f"{row['model']}, {TASKS[row['task']]}{chance}"


def ratios(rows: list[Row], device: str, name: str) -> Drawing | None:
    """Times faster than the authors' loop, by network and task, on the machine that was measured last."""
    shown = [row for row in rows if row.get("device") == device and row["task"] in TASKS]
    if not shown:
        return None
    shown = [row for row in shown if row["hardware"] == shown[-1]["hardware"]]
    shown.sort(key=lambda row: (row["model"], list(TASKS).index(row["task"])))
    figure, axes = blank(height=0.9 + 0.27 * len(shown), width=6.4)
    places = np.arange(len(shown))[::-1].astype(float)
    axes.barh(places, [row["ratio"] for row in shown], height=0.55, color=ACCENT, linewidth=0)
    for place, row in zip(places, shown, strict=True):
        words = f"{row['ratio']:.1f}×   {row['ours_ms']:,.1f} ms against {row['authors_ms']:,.0f} ms"
        axes.text(row["ratio"] * 1.05, place, words, va="center", fontsize=7, color=INK)
    axes.set_xscale("log")
    largest = max(row["ratio"] for row in shown)
    axes.set_xlim(1, max(60 * largest, largest**2))  # words stand behind the bars
    axes.set_xticks([1, 10, 100], ["1×", "10×", "100×"])
    axes.grid(visible=False)
    axes.axvline(1, color=SOFT, linewidth=1)
    axes.set_yticks(places, [_named(row) for row in shown], fontsize=7)
    axes.set_xlabel("times as fast as the authors' loop, an image")
    title = f"Ours against the authors' loop on {shown[-1]['hardware']}"
    return Drawing(name, title, "Both in one run.", f"{title}: {len(shown)} tasks", figure)


def growth(rows: list[Row]) -> Drawing | None:
    """Cost of an image against the number of distinct unions of masks."""
    shown = [row for row in rows if row["task"] == "growth"]
    if not shown:
        return None
    figure, axes = blank(height=2.9, width=4.6)
    for patches, colour in ((1, ACCENT), (2, INK)):
        mine = [row for row in shown if row["patches"] == patches]
        axes.plot([r["unions"] for r in mine], [r["ms_an_image"] for r in mine], "o", color=colour, markersize=5)
    ends = np.array([min(r["unions"] for r in shown), max(r["unions"] for r in shown)], dtype=float)
    middle = float(np.median([row["ms_a_union"] for row in shown]))
    axes.plot(ends, middle * ends, color=SOFT, linewidth=1.2, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("distinct unions of masks")
    axes.set_ylabel("ms an image")
    title = "Cost grows with the number of distinct unions"
    caption = f"tiny, whole tables, 2 to 6 masks an axis, 1 to 32 images; dark: two patches; line: {middle:.2f} ms"
    return Drawing("growth", title, caption, title, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("results/speed/speed.json"))
    given = parser.parse_args()
    rows: list[Row] = json.loads(given.rows.read_text(encoding="utf-8"))
    with style():
        for drawing in settled([ratios(rows, "cpu", "cpu"), ratios(rows, "cuda", "gpu"), growth(rows)]):
            save(drawing, given.rows.parent)


if __name__ == "__main__":
    main()
