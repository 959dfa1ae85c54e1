"""write_report: runs in; a page, tables and figures out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from patchcleanser.records.atomic import whole_file
from patchcleanser.records.derive import Derived
from patchcleanser.records.run import Run
from patchcleanser.reports.contents import make_report
from patchcleanser.reports.drawing import save
from patchcleanser.reports.page import page
from patchcleanser.reports.tables import write_tables


def write_report(
    runs: Sequence[tuple[Run, Derived | None]], out: Path, *, title: str | None = None, pictures: bool = True
) -> Path:
    """Write report.html (one file, nothing loaded from elsewhere), tables/ and figures/; return the page's path.

    Tables and figures of an earlier report there, of other runs, do not stay beside them.
    """
    made = make_report(runs, title=title, pictures=pictures)
    files = write_tables(made.all_tables(), out / "tables")
    for drawing in made.all_figures():
        files += save(drawing, out / "figures")
    target = out / "report.html"
    with whole_file(target) as part:
        part.write_text(page(made), encoding="utf-8", errors="replace")
    _replace({path.relative_to(out).as_posix() for path in files}, out)
    return target


def _replace(written: set[str], out: Path) -> None:
    """Delete what an earlier report wrote here and this one did not."""
    listed = out / "report-files.json"
    with suppress(OSError, ValueError, TypeError):  # there was none, or nobody can tell what it wrote
        for name in {*json.loads(listed.read_text(encoding="utf-8"))} - written:
            if Path(name).parent.as_posix() in ("tables", "figures"):
                (out / name).unlink(missing_ok=True)
    with whole_file(listed) as part:
        part.write_text(json.dumps(sorted(written), indent=1) + "\n", encoding="utf-8")
