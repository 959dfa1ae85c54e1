"""Two runs on the same images, compared image by image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from patchcleanser.records.columns import COLUMNS_OF
from patchcleanser.records.metrics import Proportion, mcnemar_p_value, outcomes
from patchcleanser.reports.gallery import Picture, pictures_by_id
from patchcleanser.reports.image_tables import MAX_ROWS, ImageTable, yes_or_no
from patchcleanser.reports.run_results import RunResult
from patchcleanser.reports.tables import Cells, Column, Table

MEASURES = {
    "robust": "Correct under attack",
    "never_wrong_silently": "Never wrong silently",
    "certified": "Certified",
    "detection_certified": "Certified for detection",
    "clean": "Correct without an attack",
}
"""The shares that are compared, by name."""


@dataclass(frozen=True)
class OneSided:
    """Images that only one of the runs gets right, of which some are shown, with the answers of the other run."""

    pictures: list[Picture]
    images: int
    answered_by: str


@dataclass(frozen=True)
class Comparison:
    """Shares of two runs on their common images, with the images on which the runs differ."""

    images: int
    only_by_id: bool
    """Whether the data of the runs have different hashes, so that equal ids and labels are all that ties the images."""
    shares: dict[str, tuple[Proportion, Proportion]]
    """Of both runs, by the keys of MEASURES."""
    measures: Table
    differing: ImageTable
    gallery: dict[str, OneSided]
    """By a sentence on what differs."""


def compare(first: RunResult, second: RunResult, names: tuple[str, str], each: int) -> Comparison | str:
    """Compare two runs on the images that both have answered, or say why that is impossible."""
    if first.detects != second.detects:
        return "one of them only detects, which is another promise"
    rows = _common_rows(first, second)
    if isinstance(rows, str):
        return rows
    hits = [outcomes(part) for part in rows]
    keys = [key for key in MEASURES if all(key in hit for hit in hits)]
    shares = {key: (_share(hits[0][key]), _share(hits[1][key])) for key in keys}
    measures = [_measure(MEASURES[key], hits[0][key], hits[1][key]) for key in keys]
    ids = np.array(rows[0]["id"].to_pylist(), dtype=object)
    differing = _differing_table((first, second), rows, keys, hits, names)
    only = {key: [set(ids[hits[a][key] & ~hits[1 - a][key]].tolist()) for a in (0, 1)] for key in keys}
    return Comparison(
        images=len(ids),
        only_by_id=first.run.job["data"] != second.run.job["data"],
        shares=shares,
        measures=_measures_table(measures, names),
        differing=ImageTable(differing, min(MAX_ROWS // 2, len(differing.rows))),
        gallery={
            f"{MEASURES[key]} only with {names[side]}": OneSided(pictures, len(images), names[1 - side])
            for key, sides in only.items()
            for side, images in enumerate(sides)
            if (pictures := pictures_by_id(*((second, first) if side == 0 else (first, second)), images, each))
        }
        if not first.attacked
        else {},
    )


def _common_rows(first: RunResult, second: RunResult) -> tuple[pa.Table, pa.Table] | str:
    """The rows of the images that both runs have answered, in one order; or why these are not the same images."""
    tables = [result.run.read([*COLUMNS_OF[result.run.kind], "id"]) for result in (first, second)]
    left, right = (table.filter(compute.is_null(table["skipped"])).combine_chunks() for table in tables)
    for result, table in ((first, left), (second, right)):
        if compute.count_distinct(table["id"]).as_py() < len(table):
            return f"several images of {result.run.folder.resolve().name} have the same id"
    left = left.filter(compute.is_in(left["id"], value_set=right["id"]))
    if not len(left):
        return "no id of an image is in both"
    right = right.take(compute.index_in(left["id"], value_set=right["id"]))
    relabelled = left.filter(compute.not_equal(left["label"], right["label"]))
    if len(relabelled):
        more = f" and {len(relabelled) - 1:,} more" if len(relabelled) > 1 else ""
        return f"the label of {relabelled['id'][0].as_py()}{more} differs between them, so the images are not the same"
    return left, right


def _measure(title: str, first: np.ndarray, second: np.ndarray) -> Cells:
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return {
        "measure": title,
        "first": _share(first),
        "second": _share(second),
        "only_first": only_first,
        "only_second": only_second,
        "p_value": f"{mcnemar_p_value(only_first, only_second):.2g}",
    }


def _share(hits: np.ndarray) -> Proportion:
    return Proportion(int(hits.sum()), len(hits))


def _measures_table(rows: list[Cells], names: tuple[str, str]) -> Table:
    columns = (
        Column("measure", "Share"),
        Column("first", f"{names[0]}, %"),
        Column("second", f"{names[1]}, %"),
        Column("only_first", f"Only with {names[0]}"),
        Column("only_second", f"Only with {names[1]}"),
        Column("p_value", "p"),
    )
    return Table("comparison", "Both runs on the same images", columns, rows, stacks=True)


def _differing_table(
    results: tuple[RunResult, RunResult],
    tables: tuple[pa.Table, pa.Table],
    keys: list[str],
    hits: list[dict[str, np.ndarray]],
    names: tuple[str, str],
) -> Table:
    """The images on which a measure differs, with the answers and measures of both runs."""
    differing = np.flatnonzero(np.any([hits[0][key] != hits[1][key] for key in keys], axis=0))
    pairs = zip(*(table.take(pa.array(differing)).to_pylist() for table in tables), strict=True)
    rows: list[Cells] = []
    for index, pair in zip(differing, pairs, strict=True):
        cells: Cells = {"image": pair[0]["id"], "label": results[0].class_name(pair[0]["label"])}
        for side, (result, row) in enumerate(zip(results, pair, strict=True)):
            cells[f"answer_{side}"] = "an alert" if row["alert"] else result.answer_name(row["answer"])
            cells |= {f"{key}_{side}": yes_or_no(bool(hits[side][key][index])) for key in keys if key != "clean"}
        rows.append(cells)
    columns = [Column("image", "Image"), Column("label", "True label")]
    for side, name in enumerate(names):
        columns.append(Column(f"answer_{side}", f"Answer with {name}"))
        columns += [Column(f"{key}_{side}", f"{MEASURES[key]} with {name}") for key in keys if key != "clean"]
    return Table("comparison-images", "Images on which the runs differ", tuple(columns), rows, formats=("csv",))
