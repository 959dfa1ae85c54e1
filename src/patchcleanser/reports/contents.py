"""Contents: all that a report shows, gathered from its runs before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from patchcleanser.errors import RecordError
from patchcleanser.records.derive import Derived
from patchcleanser.records.run import Run
from patchcleanser.reports import attacked, results, wording
from patchcleanser.reports.attacked import Duel
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
    duels: list[tuple[Kind, list[Duel]]]


@dataclass(frozen=True)
class Report:
    """Everything that is on the page. Runs without a single answer, and attacks that do not belong, are only named."""

    title: str | None
    recovery: list[Study]
    detection: list[Study]
    attacks: list[Study]
    names: dict[Study, str]
    left_out: list[tuple[Run, str]]
    tables: dict[str, Table]
    figures: list[Drawing]
    chapters: list[Chapter]
    attack_chapters: list[Chapter]
    pictures: bool

    @property
    def leading(self) -> list[Study]:
        """The runs that the page is about: those that certify, or attacks where there are no others."""
        return [*self.recovery, *self.detection] or self.attacks

    @property
    def every_chapter(self) -> list[Chapter]:
        """Of each run, attacks last."""
        return [*self.chapters, *self.attack_chapters]

    def all_tables(self) -> list[Table]:
        """Of all runs together, and of each."""
        return [*self.tables.values(), *(table for chapter in self.every_chapter for table in chapter.tables.values())]

    def all_figures(self) -> list[Drawing]:
        """Of all runs together, and of each."""
        return [*self.figures, *(figure for chapter in self.every_chapter for figure in chapter.figures.values())]


def make_report(
    runs: Sequence[tuple[Run, Derived | None]], *, title: str | None = None, pictures: bool = True
) -> Report:
    """All that a report shows, nothing written yet."""
    strangers = {run.folder: why for run, why in misfits([run for run, _ in runs])}
    found = [(run, read_study(run, derived)) for run, derived in runs if run.folder not in strangers]
    studies = [made for _, made in found if made is not None]
    empty = [run for run, made in found if made is None]
    if not studies:
        raise RecordError(_nothing_there(empty))
    certifying = [made for made in studies if not made.attacked]
    attacks = [made for made in studies if made.attacked]
    groups = [group for group in (certifying, attacks) if group]
    names = {made: name for group in groups for made, name in zip(group, wording.names(group), strict=True)}
    recovery = [made for made in certifying if not made.detects]
    detection = [made for made in certifying if made.detects]
    each = each_of(studies) if pictures else 0
    return Report(
        title=title,
        recovery=recovery,
        detection=detection,
        attacks=attacks,
        names=names,
        left_out=[(run, "none of its images has an answer yet") for run in empty]
        + [(run, strangers[run.folder]) for run, _ in runs if run.folder in strangers],
        tables=_shared_tables(recovery, detection, attacks, names),
        figures=sweep_figures(recovery) if len(recovery) > 1 else [],
        chapters=[_chapter(made, names[made], slug, each) for made, slug in _slugs(certifying)],
        attack_chapters=[_attack_chapter(made, names[made], slug, each) for made, slug in _slugs(attacks)],
        pictures=pictures,
    )


def misfits(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """Attacks that do not belong beside these certifying runs, and why: they must share model, data and patch."""
    certifying = [_subject(run) for run in runs if run.kind != "attack"]
    found = []
    for run in runs:
        if run.kind == "attack" and certifying and _subject(run) not in certifying:
            sides = zip(SUBJECT, _subject(run), *certifying, strict=True)
            apart = [name for name, mine, *theirs in sides if mine not in theirs]
            what = f"another {' and '.join(apart)}" if apart else "another combination of model, data and patch"
            found.append((run, f"it attacks {what} than the certified runs beside it; report it alone"))
    return found


SUBJECT = ("model", "data", "patch")


def _subject(run: Run) -> tuple[object, ...]:
    """What a run is about. A part of a dataset is still the same data: every table says how many images it has."""
    data = (run.metadata["data"], run.metadata.get("split")) if run.metadata.get("data") else run.job["data"]
    return run.job["classifier"], data, run.threat


def _nothing_there(empty: Sequence[Run]) -> str:
    run = empty[0]
    rows = run.read(["skipped"])
    if len(rows):
        return f"no image of {run.folder} has an answer: all {len(rows)} were left out ({rows['skipped'][0].as_py()})"
    again = run.metadata.get("command")
    return f"{run.folder} holds no rows yet" + (f"; go on with: {again}" if again else "; run it first")


def _shared_tables(
    recovery: Sequence[Study], detection: Sequence[Study], attacks: Sequence[Study], names: dict[Study, str]
) -> dict[str, Table]:
    studies = [made for made in names if not made.attacked]
    recovered, detected = ([made for made in attacks if made.detects == detects] for detects in (False, True))
    found: dict[str, Table | None] = {
        "runs": results.runs_table(recovery) if recovery else None,
        "detection": results.detection_table(detection) if detection else None,
        "empirical": attacked.empirical_table(recovered) if recovered else None,
        "attacks": attacked.attacks_table(recovered) if recovered else None,
        "detection_attacks": attacked.detection_attacks_table(detected) if detected else None,
        "published": results.published_table(studies),
        "cost": results.cost_table(studies, names) if studies else None,
        "skipped": results.skipped_table(list(names), names),
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
    pictures = gallery(study, each) if each else []
    return Chapter(study, name, slug, _named(found, slug), run_figures(study, slug), pictures, [])


def _attack_chapter(study: Study, name: str, slug: str, each: int) -> Chapter:
    found = {"cases": results.cases_table(study) if study.cases else None}
    return Chapter(study, name, slug, _named(found, slug), {}, [], attacked.duels(study, each) if each else [])


def _named(found: Mapping[str, Table | None], slug: str) -> dict[str, Table]:
    return {key: replace(table, name=f"{table.name}{slug}") for key, table in found.items() if table is not None}


def _slugs(studies: Sequence[Study]) -> list[tuple[Study, str]]:
    """What tells the files of several runs apart: their folders' names, each once."""
    if len(studies) == 1:
        return [(studies[0], "")]
    found: dict[str, Study] = {}
    for study in studies:
        name = re.sub(r"[^A-Za-z0-9]+", "-", study.run.folder.resolve().name).strip("-") or "run"
        tries = (f"-{name}{ending}" for ending in ("", *(f"-{n}" for n in range(2, len(studies) + 2))))
        found[next(slug for slug in tries if slug not in found)] = study
    return [(study, slug) for slug, study in found.items()]
