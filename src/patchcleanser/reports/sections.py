"""A page with a section for each run of one kind: its tables, a figure, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.records.atomic import whole_file
from patchcleanser.records.metrics import Summary
from patchcleanser.records.run import Run
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import Drawing, save
from patchcleanser.reports.page import template_environment
from patchcleanser.reports.tables import Table, write_tables


@dataclass(frozen=True)
class PageSection:
    """What the page shows of one run."""

    run: Run
    summary: Summary
    tables: list[Table]
    figure: Drawing
    pictures: Sequence[Any]
    """As the template of this kind of run draws them."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.run.folder.resolve().name


def numbered(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    """Each run, and what its tables and figures have at the end of their names: nothing if it is the only one."""
    for number, run in enumerate(runs, start=1):
        yield run, f"-{number}" if len(runs) > 1 else ""


def write_sections(sections: Sequence[PageSection], out: Path, template: str, headline: str, **words: Any) -> Path:
    """Write report.html, tables/ and figures/; return the path of the page. `words` are for the template only."""
    write_tables([table for section in sections for table in section.tables], out / "tables")
    for section in sections:
        save(section.figure, out / "figures")
    target = out / "report.html"
    with whole_file(target) as part:
        page = template_environment().get_template(template)
        text = page.render(sections=sections, headline=headline, wording=wording, **words)
        part.write_text(text, encoding="utf-8", errors="replace")
    return target
