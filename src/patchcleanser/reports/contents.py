"""Contents: all that a report shows, gathered from its runs before anything is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchcleanser.core.metrics import Derived
from patchcleanser.core.records import Run
from patchcleanser.errors import RecordError
from patchcleanser.reports import results, wording
from patchcleanser.reports.drawing import Drawing
from patchcleanser.reports.figures import run_figures
from patchcleanser.reports.gallery import Kind, Picture, each_of, gallery
from patchcleanser.reports.studies import Study, read_study
from patchcleanser.reports.sweeps import sweep_figures
from patchcleanser.reports.tables import Table


@dataclass(frozen=True)
class Chapter:
    """What a report says of one run."""

    study: Study
    name: str
    slug: str
    tables: dict[str, Table]
    figures: dict[str, Drawing]
    gallery: list[tuple[Kind, list[Picture]]]


@dataclass(frozen=True)
class Report:
    """Everything that is on the page. Runs without a single answer are only named."""

    title: str | None
    recovery: list[Study]
    detection: list[Study]
    names: dict[Study, str]
    empty: list[Run]
    tables: dict[str, Table]
    figures: list[Drawing]
    chapters: list[Chapter]
    pictures: bool

    def all_tables(self) -> list[Table]:
        """Of all runs together, and of each."""
        return [*self.tables.values(), *(table for chapter in self.chapters for table in chapter.tables.values())]

    def all_figures(self) -> list[Drawing]:
        """Of all runs together, and of each."""
        return [*self.figures, *(figure for chapter in self.chapters for figure in chapter.figures.values())]


def make_report(
    runs: Sequence[tuple[Run, Derived | None]], *, title: str | None = None, pictures: bool = True
) -> Report:
    """All that a report shows, nothing written yet."""
    found = [(run, read_study(run, derived)) for run, derived in runs]
    studies = [made for _, made in found if made is not None]
    empty = [run for run, made in found if made is None]
    if not studies:
        raise RecordError(_nothing_there(empty))
    names = dict(zip(studies, wording.names(studies), strict=True))
    recovery = [made for made in studies if not made.detects]
    detection = [made for made in studies if made.detects]
    slugs = _slugs(studies)
    each = each_of(studies) if pictures else 0
    return Report(
        title=title,
        recovery=recovery,
        detection=detection,
        names=names,
        empty=empty,
        tables=_shared_tables(recovery, detection, names),
        figures=sweep_figures(recovery) if len(recovery) > 1 else [],
        chapters=[_chapter(made, names[made], slug, each) for made, slug in zip(studies, slugs, strict=True)],
        pictures=pictures,
    )


def _nothing_there(empty: Sequence[Run]) -> str:
    run = empty[0]
    rows = run.read(["skipped"])
    if len(rows):
        return f"no image of {run.folder} has an answer: all {len(rows)} were left out ({rows['skipped'][0].as_py()})"
    again = run.about.get("command")
    return f"{run.folder} holds no rows yet" + (f"; go on with: {again}" if again else "; run it first")


def _shared_tables(recovery: Sequence[Study], detection: Sequence[Study], names: dict[Study, str]) -> dict[str, Table]:
    studies = list(names)
    found: dict[str, Table | None] = {
        "runs": results.runs_table(recovery) if recovery else None,
        "detection": results.detection_table(detection) if detection else None,
        "published": results.published_table(studies),
        "cost": results.cost_table(studies, names),
        "skipped": results.skipped_table(studies, names),
    }
    return {key: table for key, table in found.items() if table is not None}


def _chapter(study: Study, name: str, slug: str, each: int) -> Chapter:
    found: dict[str, Table | None] = {
        "classes": results.classes_table(study),
        "cases": results.cases_table(study) if study.cases else None,
        "answers": results.answers_table(study),
        "smaller": results.smaller_table(study),
        "thresholds": results.thresholds_table(study),
    }
    tables = {key: replace(table, name=f"{table.name}{slug}") for key, table in found.items() if table is not None}
    return Chapter(study, name, slug, tables, run_figures(study, slug), gallery(study, each) if each else [])


def _slugs(studies: Sequence[Study]) -> list[str]:
    """What tells the files of several runs apart: their folders' names, each once."""
    if len(studies) == 1:
        return [""]
    found: list[str] = []
    for study in studies:
        name = re.sub(r"[^A-Za-z0-9]+", "-", study.run.folder.resolve().name).strip("-") or "run"
        tries = (f"-{name}{ending}" for ending in ("", *(f"-{n}" for n in range(2, len(studies) + 2))))
        found.append(next(slug for slug in tries if slug not in found))
    return found
