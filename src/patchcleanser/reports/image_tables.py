"""One row for each image: as a table with every row, and as the data that the page's script sorts and filters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow.compute as compute

from patchcleanser.records.run import Row
from patchcleanser.reports import wording
from patchcleanser.reports.gallery import Picture
from patchcleanser.reports.run_results import RunResult
from patchcleanser.reports.tables import Cell, Cells, Column, Table

MAX_CHOICES = 4
"""A column of more different texts is searched, not chosen from; true labels are always chosen from."""
MAX_ROWS = 20_000
"""Rows of all tables of images together that one page holds; files hold all of them."""

IMAGE, LABEL = Column("image", "Image"), Column("label", "True label")
UNDEFENDED, ANSWER = Column("undefended", "Undefended"), Column("answer", "Answer")
CORRECT = Column("correct", "Correct")
PROVED = (
    Column("certified", "Certified"),
    Column("row_certified", "Row-certified"),
    Column("detection_certified", "Certified for detection"),
)
UNPROVED = Column("unproved", "Unproved places, %")
MARGIN = Column("margin", "Margin", 3)
CLASSIFICATIONS = Column("classifications", "Classifications", page=False)
COLUMNS = {
    "certify": (
        *(IMAGE, LABEL, UNDEFENDED, ANSWER, CORRECT, Column("case", "Case")),
        *(*PROVED, UNPROVED, MARGIN, CLASSIFICATIONS),
    ),
    "attack": (
        *(IMAGE, LABEL, UNDEFENDED, Column("attacked_undefended", "Undefended, attacked"), ANSWER),
        *(Column("attacked_answer", "Answer, attacked"), Column("attacked_case", "Case, attacked")),
        *(*PROVED, Column("fooled", "Fooled"), replace(MARGIN, page=False)),
    ),
}
"""By the kind of run."""
CASES = {"coarse": "coarse", "agreed": "I", "disagreer": "II", "majority": "III"}


@dataclass(frozen=True)
class ImageTable:
    """A table of images, and how many of its rows the page holds."""

    table: Table
    shown: int
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    """Of images that the page shows nowhere else, by their ids."""

    def data(self) -> dict[str, Any]:
        """The shown columns for the page's script: titles and values, repeated texts only once.

        Ids are shortened where that leaves them different. `pictures` are by the number of the row.
        """
        shown = self.table.shown()
        rows = shown.rows[: self.shown]
        ids = [str(row["image"]) for row in rows]
        short = [wording.short_id(name) for name in ids]
        columns = [_column(c, [row.get(c.key) for row in rows]) for c in shown.columns]
        small = {at: self.pictures[name] for at, name in enumerate(ids) if name in self.pictures}
        return {
            "caption": shown.caption,
            "columns": columns,
            "names": short if ids != short and len({*short}) == len({*ids}) else None,
            "pictures": {at: [picture.uri, picture.width, picture.height] for at, picture in small.items()},
        }


def _column(column: Column, cells: list[Cell]) -> dict[str, Any]:
    if any(isinstance(cell, int | float) for cell in cells):
        return {"title": column.title, "digits": column.digits, "cells": [_rounded(cell, column) for cell in cells]}
    texts = sorted({str(cell or "–") for cell in cells}, key=lambda text: (text == "–", text == "no", text))
    if 2 * len(texts) > len(cells) and column.key != LABEL.key:
        return {"title": column.title, "cells": cells}
    chosen = {"choose": column.key == LABEL.key or len(texts) <= MAX_CHOICES}
    codes = {text: code for code, text in enumerate(texts)}
    return {"title": column.title, **chosen, "texts": texts, "cells": [codes[str(cell or "–")] for cell in cells]}


def _rounded(cell: Cell, column: Column) -> Cell:
    """JSON has neither NaN nor infinity."""
    if isinstance(cell, float):
        return round(cell, column.digits) if math.isfinite(cell) else None
    return cell


def images_table(result: RunResult) -> Table:
    """Every image that has an answer."""
    columns = COLUMNS[result.run.kind]
    derived = ("image", "correct", "unproved")
    names = {"index", "id", "skipped", "alert", *(c.key for c in columns if c.key not in derived)}
    names |= {"attacked_alert"} if result.attacked else set()
    rows = result.run.read(sorted(names))
    rows = rows.filter(compute.is_null(rows["skipped"]))
    cells = [image_cells(result, row) for row in rows.to_pylist()]
    name = "attacked-images" if result.attacked else "images"
    table = Table(name, "All images", columns, cells, formats=("csv",))
    return table.without_empty().without_copy("row_certified", "certified")


def image_cells(result: RunResult, row: Row) -> Cells:
    """What a row says of its image, in words."""
    cells: Cells = {"image": row["id"], "label": result.class_name(row["label"])}
    has_margin = result.attacked or row["certified"] or row["detection_certified"]
    cells |= {"margin": row["margin"] if has_margin else None, "classifications": row.get("classifications")}
    for key in ("undefended", "attacked_undefended"):
        cells[key] = result.answer_name(row[key]) if key in row else None
    for prefix in ("", "attacked_"):
        if f"{prefix}answer" in row:
            alert = row[f"{prefix}alert"]
            cells[f"{prefix}answer"] = "an alert" if alert else result.answer_name(row[f"{prefix}answer"])
        cells[f"{prefix}case"] = CASES.get(row.get(f"{prefix}case") or "")
    if result.derived is not None and row["row_certified"] is False:
        cells["unproved"] = 100 * result.derived.unproved[row["index"]]
    cells["correct"] = yes_or_no(row["answer"] == row["label"] and not row["alert"])
    for key in ("certified", "row_certified", "detection_certified", "fooled"):
        cells[key] = yes_or_no(row.get(key))
    return cells


def yes_or_no(flag: bool | None) -> str | None:
    """A flag in a word; None stays None."""
    return None if flag is None else "yes" if flag else "no"
