"""Cells for people, spreadsheets, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io

import pytest

from patchcleanser.records.metrics import Proportion
from patchcleanser.reports.tables import Column, Table, latex_text, markdown_text, to_csv, to_latex, to_markdown

NASTY = '50%_of & $x$ #1 {a} ~^ \\ <b> | "q" a\nb'
TABLE = Table(
    "t",
    "A caption with 100% & more",
    (Column("name", "Name"), Column("share", "Share, %"), Column("count", "Count"), Column("time", "Time", 2)),
    [
        {"name": NASTY, "share": Proportion(3, 4), "count": 12345, "time": 0.125},
        {"name": "plain", "share": Proportion(0, 0), "count": None, "time": None},
    ],
)


def test_csv_holds_the_share_its_interval_and_its_count() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
    assert rows[0]["name"] == NASTY
    assert float(rows[0]["share"]) == 75
    assert [float(rows[0][k]) for k in ("share_low95", "share_high95")] == [
        round(b, 4) for b in Proportion(3, 4).interval
    ]
    assert (rows[0]["share_count"], rows[0]["share_total"], rows[0]["count"]) == ("3", "4", "12345")
    assert rows[1]["share"] == rows[1]["count"] == ""


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@x"])
def test_csv_text_is_never_a_formula(cell: str) -> None:
    table = Table("t", "t", (Column("a", "A"),), [{"a": cell}])
    assert to_csv(table).splitlines()[1] == f"'{cell}"


def test_latex_text_holds_no_bare_special_signs() -> None:
    text = latex_text(NASTY)
    for sign in "%&$#_":
        assert sign not in text.replace(f"\\{sign}", "")
    assert r"50\%\_of \& \$x\$ \#1 \{a\}" in text
    assert r"\textasciitilde{}\textasciicircum{} \textbackslash{} \textless{}b\textgreater{}" in text
    assert "\n" not in text


def test_latex_rows_have_as_many_cells_as_columns() -> None:
    lines = to_latex(TABLE).splitlines()
    rows = [line for line in lines if line.endswith(r"\\")]
    assert len(rows) == 3
    assert all(line.replace(r"\&", "").count("&") == 3 for line in rows)
    assert r"\begin{tabular}{lrrr}" in lines
    assert "75.0 (30.1--95.4)" in to_latex(TABLE)


def test_markdown_rows_have_as_many_cells_as_columns() -> None:
    lines = to_markdown(TABLE).splitlines()[2:]
    assert len(lines) == 4
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)
    assert markdown_text("<b>*x*") == r"\<b\>\*x\*"
