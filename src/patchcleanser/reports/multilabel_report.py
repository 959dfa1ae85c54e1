"""The report of a run of images with several labels: precision and recall, classes, and where a patch could matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat
from patchcleanser.errors import RecordError
from patchcleanser.records.columns import BOUNDS
from patchcleanser.records.derive_multilabel import (
    LEVELS,
    answered_rows,
    derived_shares,
    own_thresholds,
    per_label,
    recall_at,
    weak_counts,
)
from patchcleanser.records.metrics import Proportion, precision_and_recall, summary
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, style
from patchcleanser.reports.gallery import saved_picture, saved_rows
from patchcleanser.reports.sections import PageSection, numbered, write_sections
from patchcleanser.reports.tables import Cells, Column, Table

PICTURES = 8
"""Images that are drawn."""
TITLES = {
    "undefended": "Undefended, clean",
    "clean": "Defended, clean",
    "certified": "Certified",
    "one_mask": "Bound that fixes one mask",
    "each_class": "Bound that takes each class by itself",
}
LOOKS = {
    "undefended": (SOFT, "-"),
    "clean": (INK, "-"),
    "certified": (ACCENT, "-"),
    "one_mask": (MUTED, ":"),
    "each_class": (MUTED, "--"),
}
"""Colour and line of each curve."""
SMALLER = 0.01
"""The share of the image that a smaller patch has, against which certificates are derived."""


@dataclass(frozen=True)
class LabelPicture:
    """An image with its classes, and the patches that could change the answer for some of them."""

    id: str
    uri: str
    height: int
    width: int
    names: list[tuple[str, str]]
    """True classes, and for each: certified, not certified, or missing."""
    weak: list[tuple[Window, float]]
    """Where the center of a patch may lie, and the share of the worst place's number of classes not proved there."""
    worst: int
    """The most classes not proved at one place."""
    patch: Window | None
    """A patch at such a place."""


def write_multilabel_report(runs: Sequence[Run], out: Path, *, title: str | None = None, pictures: bool = True) -> Path:
    """Write report.html, tables/ and figures/ for runs of several labels; return the path of the page."""
    sections = [_section(run, slug, pictures) for run, slug in numbered(runs)]
    shares = sections[0].summary.shares
    lead = f"{shares['certified_recall'].percent:.1f}% recall at {shares['certified_precision'].percent:.1f}% precision"
    return write_sections(sections, out, "multilabel.html.jinja", title or f"Certified: {lead}")


def _section(run: Run, slug: str, pictures: bool) -> PageSection:
    rows = run.read()
    totals, answered = summary(rows), answered_rows(rows)
    if not totals.images:
        raise RecordError(f"{run.folder} has no image that has an answer yet, so there is nothing to show")
    tables = [_bounds_table(run, answered, slug), _class_table(run, answered, slug)]
    return PageSection(run, totals, tables, _curves(run, answered, slug), _pictures(run) if pictures else [])


def _bounds_table(run: Run, rows: pa.Table, slug: str) -> Table:
    """Precision and recall at the run's own threshold, and recall at fixed precisions of the curve."""
    lines: list[Cells] = []
    for bound in BOUNDS:
        precision, recall = precision_and_recall(rows, bound)
        at = {f"at_{level}": recall_at(rows, bound, level) for level in LEVELS}
        lines.append({"what": TITLES[bound], "precision": precision[0], "recall": recall[0], **at})
    if _derivable(run):
        derived = derived_shares(run, rows, Threat.share(SMALLER, grid=run.threat.grid))
        lines.append({"what": "Certified, patch of 1%", "precision": derived[0], "recall": derived[1]})
    columns = (
        Column("what", f"Patch of {wording.patch(run.threat)}"),
        Column("precision", "Precision, %"),
        Column("recall", "Recall, %"),
        *(Column(f"at_{level}", f"Recall at {level}% precision") for level in LEVELS),
    )
    caption = (
        "Precision and recall over all classes and images, at the run's threshold and at the best one of the curve"
    )
    return Table(f"bounds{slug}", caption, columns, lines, stacks=True)


def _derivable(run: Run) -> bool:
    """Whether the run's patch is a square of at least 2% anywhere, so that one of 1% lies inside it."""
    shape = str(run.threat.shape)
    plain = run.threat.count == 1 and run.threat.region is None
    return plain and shape.endswith("%") and ":" not in shape and float(shape[:-1]) >= 2


def _class_table(run: Run, rows: pa.Table, slug: str) -> Table:
    """A row for each class, those of most images first."""
    names = run.metadata.get("classes") or []
    lines: list[Cells] = []
    for each in sorted(per_label(run, rows), key=lambda counts: -counts.images):
        absent = len(rows) - each.images
        lines.append(
            {
                "name": str(names[each.label]) if each.label < len(names) else str(each.label),
                "images": each.images,
                "undefended": Proportion(each.undefended, each.images),
                "clean": Proportion(each.clean, each.images),
                "certified": Proportion(each.certified, each.images),
                "false": Proportion(each.false, absent),
                "possible": Proportion(each.possible, absent),
            }
        )
    columns = (
        Column("name", "Class"),
        Column("images", "Images"),
        Column("undefended", "Undefended recall, %"),
        Column("clean", "Clean recall, %"),
        Column("certified", "Certified recall, %"),
        Column("false", "Wrongly present, clean, %"),
        Column("possible", "Possible under attack, %"),
    )
    return Table(f"classes{slug}", "Each class by itself, at its own worst places", columns, lines, stacks=True)


def _curves(run: Run, rows: pa.Table, slug: str) -> Drawing:
    """Precision over recall for each bound, and the run's own threshold as a dot."""
    with style():
        figure, axes = blank(height=3.8)
        for bound in reversed(BOUNDS):
            precision, recall = precision_and_recall(rows, bound)
            points = [(r.percent, p.percent) for p, r in zip(precision, recall, strict=True) if p.total]
            colour, line = LOOKS[bound]
            curve = sorted(points[1:], key=lambda point: point[0])
            axes.plot([x for x, _ in curve], [y for _, y in curve], line, color=colour, label=TITLES[bound])
            axes.plot(*zip(*points[:1], strict=True), "o", color=colour, markersize=4)
        axes.set_xlabel("recall, %")
        axes.set_ylabel("precision, %")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.18))
    caption = (
        "Precision and recall at thresholds for all classes; dots are the run's own threshold. Certified: proved "
        f"against a patch of {wording.patch(run.threat)} at its worst place in each image."
    )
    shares = {bound: precision_and_recall(rows, bound)[1][0] for bound in ("clean", "certified")}
    alt = f"recall {shares['clean']} clean, {shares['certified']} certified"
    return Drawing(f"curve{slug}", "Precision and recall", caption, alt, figure)


def _pictures(run: Run) -> list[LabelPicture]:
    """Saved pictures with their weak places."""
    names = [name for name in run.schema.names if name != "seconds"]
    drawn = (_picture(run, row) for row in saved_rows(run, names))
    return [picture for picture in drawn if picture is not None][:PICTURES]


def _picture(run: Run, row: Row) -> LabelPicture | None:
    uri = saved_picture(run, f"{row['index']}.png")
    if uri is None:
        return None
    weak = weak_counts(row, run.mask_set((row["height"], row["width"])), run.threat)
    worst = max(int(counts.max()) for counts in weak.values())
    patch = Window(*row["weakest"][:4]) if row["weakest"] else None
    return LabelPicture(
        id=str(row["id"]),
        uri=uri,
        height=row["height"],
        width=row["width"],
        names=_class_states(run, row),
        weak=_centers(run, weak, worst),
        worst=worst,
        patch=patch,
    )


def _class_states(run: Run, row: Row) -> list[tuple[str, str]]:
    """The true classes of a row, and what is known of each."""
    thresholds = np.broadcast_to(own_thresholds(run), (len(row["clean_scores"]),))
    names = run.metadata.get("classes") or list(map(str, range(len(thresholds))))

    def state(c: int) -> str:
        if row["lowest_scores"][c] >= thresholds[c]:
            return "certified"
        return "not certified" if row["clean_scores"][c] >= thresholds[c] else "missing"

    return [(str(names[c]), state(c)) for c in row["classes"]]


def _centers(run: Run, weak: dict[Size, NDArray[np.int64]], worst: int) -> list[tuple[Window, float]]:
    """Places with the same count, as windows of patch centers, and the counts as shares of the worst."""
    room = run.threat.region
    top, left = (room.top, room.left) if room else (0, 0)
    windows: list[tuple[Window, float]] = []
    for (height, width), counts in weak.items():
        for i, stop in _runs(counts):
            for j, end in _runs(counts[i : i + 1].T):
                if counts[i, j]:
                    corner = top + i + height // 2, left + j + width // 2
                    windows.append((Window(*corner, stop - i, end - j), float(counts[i, j]) / worst))
    return windows


def _runs(counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where runs of equal rows begin and end."""
    edges = [0, *(np.flatnonzero((np.diff(counts, axis=0) != 0).any(axis=1)) + 1).tolist(), len(counts)]
    return pairwise(edges)
