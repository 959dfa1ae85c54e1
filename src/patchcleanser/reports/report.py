"""write_report: runs in; a page, tables and figures out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchcleanser.core.files import whole_file
from patchcleanser.core.metrics import Derived
from patchcleanser.core.records import Run
from patchcleanser.reports.contents import make_report
from patchcleanser.reports.drawing import save
from patchcleanser.reports.page import page
from patchcleanser.reports.tables import write_tables


def write_report(
    runs: Sequence[tuple[Run, Derived | None]], out: Path, *, title: str | None = None, pictures: bool = True
) -> Path:
    """Write report.html (one file, nothing loaded from elsewhere), tables/ and figures/; return the page's path."""
    made = make_report(runs, title=title, pictures=pictures)
    write_tables(made.all_tables(), out / "tables")
    for drawing in made.all_figures():
        save(drawing, out / "figures")
    target = out / "report.html"
    with whole_file(target) as part:
        part.write_text(page(made), encoding="utf-8", errors="replace")
    return target
