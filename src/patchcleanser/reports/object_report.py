"""The report of a detector's run: recall of objects, clean and proved, and the placements that could hide one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.cover import positions
from patchcleanser.core.geometry import Window, image_window
from patchcleanser.core.hiding import PLACES, Place
from patchcleanser.core.threats import Threat
from patchcleanser.errors import RecordError
from patchcleanser.records.derive_objects import (
    ANY_SIZE,
    NEEDED,
    RecordedObject,
    derived_promises,
    derived_threats,
    recorded_objects,
)
from patchcleanser.records.metrics import OVERLAP, Proportion, object_values, summary
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, style
from patchcleanser.reports.gallery import saved_picture, saved_rows
from patchcleanser.reports.sections import PageSection, numbered, write_sections
from patchcleanser.reports.tables import Cells, Column, Table

PICTURES = 8
"""Objects that are drawn."""
OVERLAPS = (0.0, 0.25, 0.5, 0.7)
"""Shares of an object at which the table counts it; at 0 any part counts."""
WHERE: dict[Place, str] = {"over": "over", "near": "near", "far": "far from"}


@dataclass(frozen=True)
class ObjectPicture:
    """An object on its picture, and the patches that could hide it."""

    id: str
    uri: str
    height: int
    width: int
    name: str
    box: Window
    weak: list[Window]
    """Where the center of a patch may lie that could hide the object; of overlapping places each once."""
    patch: Window | None
    """A placement over, near or far where the least is promised; None if the object is certified everywhere."""
    over: float | None
    near: float | None
    far: float | None


def write_object_report(runs: Sequence[Run], out: Path, *, title: str | None = None, pictures: bool = True) -> Path:
    """Write report.html, tables/ and figures/ for runs of detectors; return the path of the page."""
    sections = [_section(run, slug, pictures) for run, slug in numbered(runs)]
    lead = sections[0].summary.shares["certified_far"]
    headline = title or f"{lead.percent:.1f}% of objects certified against a patch far from them"
    return write_sections(sections, out, "objects.html.jinja", headline, threat_name=threat_name)


def _section(run: Run, slug: str, pictures: bool) -> PageSection:
    rows = run.read()
    totals = summary(rows)
    if not totals.images or not totals.shares["undefended"].total:
        raise RecordError(f"{run.folder} has no image with objects that has an answer yet, so there is nothing to show")
    promises = derived_promises(run, rows, derived_threats(run))
    clean = {name: object_values(rows, name) for name in ("undefended", "defended")}
    tables = [_recall_table(clean, promises, slug), _boxes_table(rows, slug)]
    return PageSection(run, totals, tables, _curve(run, clean, promises, slug), _pictures(run) if pictures else [])


def threat_name(threat: Threat) -> str:
    """A threat in a few words."""
    return "any size" if threat.shape == ANY_SIZE.shape else wording.patch(threat)


def share_at(values: NDArray[np.float64], overlap: float) -> Proportion:
    """The share of objects that reach an overlap, of those that have a placement; at 0 any overlap above 0."""
    counted_values = values[~np.isnan(values)]
    return Proportion(int(((counted_values >= overlap) & (counted_values > 0)).sum()), len(counted_values))


Promises = dict[Threat, dict[Place, NDArray[np.float64]]]


def _recall_table(clean: dict[str, NDArray[np.float64]], promises: Promises, slug: str) -> Table:
    """A row for each of clean and certified recall, a column for each overlap."""
    series = [("Undefended, clean", "–", clean["undefended"]), ("Defended, clean", "–", clean["defended"])]
    for threat, by_place in promises.items():
        series += [
            (f"Certified, patch {WHERE[place]} the object", threat_name(threat), by_place[place]) for place in PLACES
        ]
    keys = {overlap: f"at_{overlap:g}".replace(".", "_") for overlap in OVERLAPS}
    rows: list[Cells] = []
    for what, patch, values in series:
        shares = {key: share_at(values, overlap) for overlap, key in keys.items()}
        rows.append({"what": what, "patch": patch, "objects": int((~np.isnan(values)).sum()), **shares})
    titles = ["any part, %", *(f"{overlap:.0%} covered, %" for overlap in OVERLAPS[1:])]
    columns = (
        Column("what", "Recall of objects"),
        Column("patch", "Patch"),
        *(Column(key, text) for key, text in zip(keys.values(), titles, strict=True)),
        Column("objects", "Objects"),
    )
    return Table(f"objects{slug}", "Objects covered by a box of their class, clean and proved", columns, rows, True)


def _boxes_table(rows: pa.Table, slug: str) -> Table:
    """How many boxes there are on clean images, and how many lie on an object of their class."""
    images = rows["skipped"].null_count
    cells: list[Cells] = []
    for who in ("undefended", "defended"):
        boxes, matched = (int(compute.sum(rows[f"{who}_{what}"]).as_py() or 0) for what in ("boxes", "matched"))
        cells.append({"who": who.capitalize(), "each": boxes / images, "matched": Proportion(matched, boxes)})
    columns = (
        Column("who", "Boxes on clean images"),
        Column("each", "Boxes per image"),
        Column("matched", "On an object of their class, %"),
    )
    caption = "The price of the defense: more boxes, of which fewer lie on an annotated object"
    return Table(f"boxes{slug}", caption, columns, cells)


def _curve(run: Run, clean: dict[str, NDArray[np.float64]], promises: Promises, slug: str) -> Drawing:
    """Clean and certified recall over the overlap, for the run's own threat and for any size."""
    overlaps = np.linspace(0, 1, 101)
    with style():
        figure, axes = blank(height=3.4)
        series = [("defended, clean", clean["defended"], INK, "-")]
        for place, colour in zip(PLACES, (SOFT, MUTED, ACCENT), strict=True):
            series.append((f"certified, {place}", promises[run.threat][place], colour, "-"))
        if run.threat != ANY_SIZE and ANY_SIZE in promises:
            series.append(("certified, far, any size", promises[ANY_SIZE]["far"], ACCENT, "--"))
        for name, values, colour, line in series:
            axes.plot(overlaps, [share_at(values, o).percent for o in overlaps], line, color=colour, label=name)
        axes.set_xlabel("share of the object that is covered, at least")
        axes.set_ylabel("recall, %")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    caption = (
        "Recall of objects over the share that a box of their class covers. Certified: proved against a patch of "
        f"{threat_name(run.threat)}, wherever over, near or far from the object it is."
    )
    far = share_at(promises[run.threat]["far"], OVERLAP)
    return Drawing(f"recall{slug}", "Recall by overlap", caption, f"{far} certified far at half an object", figure)


def _pictures(run: Run) -> list[ObjectPicture]:
    """One object of each saved picture: the largest one that the clean image shows."""
    drawn = (_picture(run, row) for row in saved_rows(run, ["index", "id", *NEEDED]))
    return [picture for picture in drawn if picture is not None][:PICTURES]


def _picture(run: Run, row: Row) -> ObjectPicture | None:
    uri = saved_picture(run, f"{row['index']}.png")
    if uri is None:
        return None
    size = (row["height"], row["width"])
    objects = [each for each in recorded_objects(row, run.mask_set(size)) if each.undefended >= OVERLAP]
    if not objects:
        return None
    largest = max(objects, key=lambda each: each.window.area)
    certificate = largest.certificate(run.threat)
    failing = [place for place in PLACES if place in certificate.weakest and not certificate.certified(place, OVERLAP)]
    names = run.metadata.get("classes") or []
    return ObjectPicture(
        id=str(row["id"]),
        uri=uri,
        height=size[0],
        width=size[1],
        name=names[largest.label] if largest.label < len(names) else str(largest.label),
        box=largest.window,
        weak=weak_centers(largest, run.threat),
        patch=certificate.weakest[failing[-1]] if failing else None,
        **{place: getattr(certificate, place) for place in PLACES},
    )


def weak_centers(each: RecordedObject, threat: Threat) -> list[Window]:
    """Where the center of a patch lies that could leave less than half of the object; none for a patch of any size."""
    size, weak = each.masks.image, []
    if size in threat.shapes(size):
        return []
    for shape in threat.shapes(size):
        tops, lefts, hides = positions(each.masks.masks, shape, image_window(size))
        safe = np.where(hides, each.promises, 0.0).max(axis=2) >= OVERLAP
        heights = np.diff([*tops, size[0] - shape[0] + 1])
        widths = np.diff([*lefts, size[1] - shape[1] + 1])
        for row, column in zip(*np.nonzero(~safe), strict=True):
            top, left = int(tops[row]) + shape[0] // 2, int(lefts[column]) + shape[1] // 2
            weak.append(Window(top, left, int(heights[row]), int(widths[column])))
    return weak
