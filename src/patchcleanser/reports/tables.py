"""Table: named columns and plain cells, written as CSV, Markdown and LaTeX, and shown on the page.

All four come from the same cells, so they cannot disagree. CSV has every column, the others those of the page.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchcleanser.records.atomic import whole_file
from patchcleanser.records.metrics import Proportion

Cell = str | int | float | Proportion | None
Cells = dict[str, Cell]
"""Cells by column key."""
WIDE = {"data", "patch", "masks", "defense", "labels", "attack", "run", "grid", "source"}
"""Columns of words, which have a line of their own where a row is stacked."""


@dataclass(frozen=True)
class Column:
    """A column; decimal `digits` of its numbers, and whether pages show it or only CSV has it."""

    key: str
    title: str
    digits: int = 1
    page: bool = True


UNDEFENDED = Column("undefended", "Undefended, %")
CLEAN = Column("clean", "Clean, %")
CERTIFIED = Column("certified", "Certified, %")
ROW_CERTIFIED = Column("row_certified", "Row-certified, %")
CLASSIFICATIONS = Column("classifications", "Classifications an image", 1)
DETECTION = Column("detection_certified", "Certified for detection, %")
ALERTS = Column("alerts", "Alerts on clean images, %")


@dataclass(frozen=True)
class Table:
    """Columns and rows. The first shown column names the row; a wide table (`stacks`) stacks its cells on a phone."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: list[Cells]
    stacks: bool = False
    formats: tuple[str, ...] = ("csv", "md", "tex")

    def shown(self) -> Table:
        """Without the columns that only CSV has."""
        return replace(self, columns=tuple(c for c in self.columns if c.page))

    def without_empty(self) -> Table:
        """Without the columns that are empty in every row."""
        full = tuple(c for c in self.columns if any(row.get(c.key) is not None for row in self.rows))
        return replace(self, columns=full)

    def without_copy(self, key: str, of: str) -> Table:
        """Without a column on the page if it equals another one in every row; CSV keeps it."""
        copies = all(row.get(key) == row.get(of) for row in self.rows)
        return replace(self, columns=tuple(replace(c, page=not copies) if c.key == key else c for c in self.columns))

    def numbers_in(self, row: Cells) -> int:
        """How many cells of a row stand side by side where it is stacked."""
        return sum(row.get(c.key) is not None for c in self.shown().columns[1:] if c.key not in WIDE)

    def is_number(self, column: Column) -> bool:
        """Whether a column holds numbers, which are aligned to the right."""
        return any(isinstance(row.get(column.key), int | float | Proportion) for row in self.rows)


def text_of(cell: Cell, digits: int = 1) -> str:
    """A cell as readers see it; a share without its interval.

    >>> [text_of(cell) for cell in (Proportion(77, 100), 12345, 3.14159, "cat", None)]
    ['77.0', '12,345', '3.1', 'cat', '–']
    """
    value = cell.percent if isinstance(cell, Proportion) else cell
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits}f}" if isinstance(value, float) else value


def interval_of(cell: Cell) -> str:
    """The interval of a share, or nothing.

    >>> interval_of(Proportion(77, 100))
    '67.8–84.2'
    """
    if not isinstance(cell, Proportion) or not cell.total:
        return ""
    low, high = cell.interval
    return f"{low:.1f}–{high:.1f}"


def to_csv(table: Table) -> str:
    """CSV with every column; a share becomes percent, both ends of its interval, count and total."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    shares = {c.key for c in table.columns if any(isinstance(row.get(c.key), Proportion) for row in table.rows)}
    parts = ("", "_low95", "_high95", "_count", "_total")
    writer.writerow([c.key + part for c in table.columns for part in (parts if c.key in shares else ("",))])
    for row in table.rows:
        cells = ((row.get(c.key), c.key in shares) for c in table.columns)
        writer.writerow([value for cell, is_share in cells for value in _csv_cells(cell, is_share)])
    return out.getvalue()


def _csv_cells(cell: Cell, is_share: bool) -> list[object]:
    """The values of a cell: five in a column of shares, one elsewhere."""
    if isinstance(cell, Proportion):
        if not cell.total:
            return [""] * 5
        return [round(cell.percent, 4), *(round(b, 4) for b in cell.interval), cell.count, cell.total]
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        cell = f"'{cell}"  # a spreadsheet would read it as a formula
    value = "" if cell is None else round(cell, 6) if isinstance(cell, float) else cell
    return [value, "", "", "", ""] if is_share else [value]  # a published number has no interval and no count


def to_markdown(table: Table) -> str:
    """A Markdown table; a share is followed by its interval."""
    lines = [
        _piped([markdown_text(c.title) for c in table.columns]),
        _piped(["---:" if table.is_number(c) else "---" for c in table.columns]),
        *(_piped([markdown_text(_with_interval(row.get(c.key), c)) for c in table.columns]) for row in table.rows),
    ]
    return f"{markdown_text(table.caption)}\n\n" + "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """A LaTeX table for the booktabs package."""
    kinds = "".join("r" if table.is_number(c) else "l" for c in table.columns)
    rows = [[latex_text(_with_interval(row.get(c.key), c)) for c in table.columns] for row in table.rows]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{latex_text(table.caption)}}}",
            f"\\begin{{tabular}}{{{kinds}}}",
            "\\toprule",
            " & ".join(latex_text(c.title) for c in table.columns) + " \\\\",
            "\\midrule",
            *(" & ".join(row) + " \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
            "",
        ]
    )


def _with_interval(cell: Cell, column: Column) -> str:
    interval = interval_of(cell)
    return text_of(cell, column.digits) + (f" ({interval})" if interval else "")


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_text(text: str) -> str:
    r"""Escape text for Markdown.

    >>> markdown_text("a|b_c<i>")
    'a\\|b\\_c\\<i\\>'
    """
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", _one_line(text))


LATEX = {sign: f"\\{sign}" for sign in "{}&%$#_"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "×": r"$\times$",
    "≤": r"$\le$",
    "·": r"$\cdot$",
    "–": "--",
    "…": r"\ldots{}",
}


def latex_text(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> latex_text(r"50% of a_b \ {x}")
    '50\\% of a\\_b \\textbackslash{} \\{x\\}'
    """
    return "".join(LATEX.get(sign, sign) for sign in _one_line(text))


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)


FORMATS: dict[str, Callable[[Table], str]] = {
    "csv": to_csv,
    "md": lambda table: to_markdown(table.shown()),
    "tex": lambda table: to_latex(table.shown()),
}


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write every table in its formats; return the files."""
    for table in tables:
        for ending in table.formats:
            with whole_file(folder / f"{table.name}.{ending}") as part:
                part.write_text(FORMATS[ending](table), encoding="utf-8", errors="replace", newline="")
    return [folder / f"{table.name}.{ending}" for table in tables for ending in table.formats]
