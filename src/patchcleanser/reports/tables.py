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
NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A column; `digits` behind the point of a number, and whether readers see it or only CSV has it."""

    key: str
    title: str
    digits: int = 1
    page: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key. The first shown column names the row; a wide table stacks its cells on a phone."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: list[dict[str, Cell]]
    stacks: bool = False

    def shown(self) -> Table:
        """Without the columns that only CSV has."""
        return replace(self, columns=tuple(c for c in self.columns if c.page))

    def without_empty(self) -> Table:
        """Without the columns that have nothing to say in any row."""
        full = tuple(c for c in self.columns if any(row.get(c.key) is not None for row in self.rows))
        return replace(self, columns=full)

    def is_number(self, column: Column) -> bool:
        """Whether a column is set to the right."""
        return any(isinstance(row.get(column.key), int | float | Proportion) for row in self.rows)


def text_of(cell: Cell, digits: int = 1) -> str:
    """A cell for people; a share without its interval.

    >>> [text_of(cell) for cell in (Proportion(77, 100), 12345, 3.14159, "cat", None)]
    ['77.0', '12,345', '3.1', 'cat', '–']
    """
    if (
        cell is None
        or (isinstance(cell, Proportion) and not cell.total)
        or (isinstance(cell, float) and math.isnan(cell))
    ):
        return NOTHING
    if isinstance(cell, Proportion):
        return f"{cell.percent:.{digits}f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else cell


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
    """Numbers for machines: a share becomes percent, both ends of its interval, count and total (if known)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    shares = {c.key for c in table.columns if any(isinstance(row.get(c.key), Proportion) for row in table.rows)}
    parts = ("", "_low95", "_high95", "_count", "_total")
    writer.writerow([c.key + part for c in table.columns for part in (parts if c.key in shares else ("",))])
    for row in table.rows:
        cells = [_csv_share(row.get(c.key)) if c.key in shares else [_csv_cell(row.get(c.key))] for c in table.columns]
        writer.writerow([value for several in cells for value in several])
    return out.getvalue()


def _csv_share(cell: Cell) -> list[object]:
    if not isinstance(cell, Proportion):
        return [_csv_cell(cell), "", "", "", ""]  # a printed number has no interval and no count
    if not cell.total:
        return [""] * 5
    return [round(cell.percent, 4), *(round(b, 4) for b in cell.interval), cell.count, cell.total]


def _csv_cell(cell: Cell) -> object:
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{cell}"  # a spreadsheet would take it for a formula
    return "" if cell is None else round(cell, 6) if isinstance(cell, float) else cell


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
    r"""Text that Markdown takes for nothing else.

    >>> markdown_text("a|b_c<i>")
    'a\\|b\\_c\\<i\\>'
    """
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", _one_line(text))


LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
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
    r"""Text that LaTeX sets as it stands.

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
    """Every table in every format; the files."""
    for table in tables:
        for ending, written in FORMATS.items():
            with whole_file(folder / f"{table.name}.{ending}") as part:
                part.write_text(written(table), encoding="utf-8", errors="replace", newline="")
    return [folder / f"{table.name}.{ending}" for table in tables for ending in FORMATS]
