"""The contents of a report, gathered from its runs before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from patchcleanser.errors import RecordError
from patchcleanser.records.derive import Derived
from patchcleanser.records.run import Run
from patchcleanser.reports import run_tables, wording
from patchcleanser.reports.comparison import Comparison, compare
from patchcleanser.reports.drawing import Drawing
from patchcleanser.reports.figures import run_figures
from patchcleanser.reports.gallery import BeforeAfter, Picture, attack_gallery, gallery, group_sizes, thumbnails
from patchcleanser.reports.image_tables import MAX_ROWS, ImageTable, images_table
from patchcleanser.reports.run_results import RunResult, read_result
from patchcleanser.reports.sweeps import sweep_figures
from patchcleanser.reports.tables import Table

MAX_THUMBNAILS = 1_500_000
"""Characters of all pictures of small images beside their rows."""
FIRST_PICTURES = 4
"""Pictures at the top of the page."""
FIRST_GROUPS = (
    *("certified-fooled", "certified", "detection-certified", "not-proved", "recovered", "wrong", "disagreer"),
    *("majority", "alert", "detected", "fooled", "attack-failed", "clean-wrong"),
)
"""Their groups, the most telling first."""


@dataclass(frozen=True)
class RunSection:
    """What a report shows of one run; `slug` makes the names of its files unique."""

    result: RunResult
    name: str
    slug: str
    tables: dict[str, Table]
    figures: dict[str, Drawing]
    gallery: dict[str, list[Picture]]
    attack_gallery: dict[str, list[BeforeAfter]]
    group_sizes: dict[str, int]
    """How many images of the run belong to each group of the galleries; not all of them are shown."""
    images: ImageTable


@dataclass(frozen=True)
class ReportContents:
    """Everything that is on the page."""

    title: str | None
    recovery: list[RunResult]
    detection: list[RunResult]
    attacks: list[RunResult]
    names: dict[RunResult, str]
    left_out: list[tuple[Run, str]]
    """Runs that are only named, and why: no image has an answer, or an attack on something else."""
    tables: dict[str, Table]
    figures: list[Drawing]
    sections: list[RunSection]
    attack_sections: list[RunSection]
    pictures: bool
    comparison: Comparison | str | None
    """Of two runs, image by image, or why they cannot be compared; None unless the report is about two runs."""

    @property
    def pictured(self) -> RunSection | None:
        """The run whose pictures stand at the top, one that the headline is about first; None if no run has any."""
        sections = sorted(self.all_sections, key=lambda section: section.result not in self.recovery)
        return next((s for s in sections if s.gallery or s.attack_gallery), None)

    @property
    def first_pictures(self) -> dict[str, Picture]:
        """A picture of each of the first groups, by the name of the group; no image twice, right answers first.

        Beside a single run that certifies, a rescue from an attack takes the place of decisions on clean images.
        """
        if self.pictured is None:
            return {}
        groups = {**self.pictured.gallery}
        attacks = self.attack_sections if len(self.leading) == 1 else [self.pictured]
        for section in attacks:
            groups |= {group: [pair.after for pair in pairs] for group, pairs in section.attack_gallery.items()}
        first: dict[str, Picture] = {}
        for group in (group for group in FIRST_GROUPS if group in groups):
            shown = {picture.id for picture in first.values()}
            unshown = [picture for picture in groups[group] if picture.id not in shown]
            first |= {group: max(unshown, key=lambda picture: picture.right)} if unshown else {}
        return dict(islice(first.items(), FIRST_PICTURES))

    @property
    def sweep(self) -> list[Drawing]:
        """The figures of certified against what varies between the runs."""
        return [figure for figure in self.figures if figure.name != "accuracy"]

    @property
    def sweep_title(self) -> str:
        """Names what varies in the figures of the sweep: "Certified by patch size, number of masks and cost"."""
        *first, last = [figure.title.removeprefix("By ") for figure in self.sweep]
        return f"Certified by {', '.join(first)}{' and ' if first else ''}{last}"

    @property
    def leading(self) -> list[RunResult]:
        """The runs that the page is about: those that certify, or the attacks if there are no others."""
        return [*self.recovery, *self.detection] or self.attacks

    @property
    def all_sections(self) -> list[RunSection]:
        return [*self.sections, *self.attack_sections]

    def all_tables(self) -> list[Table]:
        tables = [*self.tables.values()]
        if isinstance(self.comparison, Comparison):
            tables += [self.comparison.measures, self.comparison.differing.table]
        return tables + [t for s in self.all_sections for t in (*s.tables.values(), s.images.table)]

    def all_figures(self) -> list[Drawing]:
        return [*self.figures, *(figure for section in self.all_sections for figure in section.figures.values())]


def gather(
    runs: Sequence[tuple[Run, Derived | None]], *, title: str | None = None, pictures: bool = True
) -> ReportContents:
    """Gather all that a report shows; RecordError if no image has an answer."""
    unrelated = misfits([run for run, _ in runs])
    folders = {run.folder for run, _ in unrelated}
    read = [(run, read_result(run, derived)) for run, derived in runs if run.folder not in folders]
    results = [result for _, result in read if result is not None]
    empty = [run for run, result in read if result is None]
    if not results:
        raise RecordError(_why_empty(empty[0]))
    attacks = [result for result in results if result.attacked]
    certifying = [result for result in results if not result.attacked]
    recovery = [result for result in certifying if not result.detects]
    detection = [result for result in certifying if result.detects]
    groups = [group for group in (certifying, attacks) if group]
    names = {result: name for group in groups for result, name in zip(group, wording.run_names(group), strict=True)}
    each = (8 if len(results) == 1 else 4 if len(results) <= 6 else 2) if pictures else 0
    leading = [*recovery, *detection] or attacks
    rows = MAX_ROWS // len(results)
    return ReportContents(
        title=title,
        recovery=recovery,
        detection=detection,
        attacks=attacks,
        names=names,
        left_out=[*((run, "none of its images has an answer yet") for run in empty), *unrelated],
        tables=_shared_tables(recovery, detection, attacks, names),
        figures=sweep_figures(recovery) if len(recovery) > 1 else [],
        sections=[_section(result, names[result], slug, each, rows) for result, slug in _slugs(certifying)],
        attack_sections=[_section(result, names[result], slug, each, rows) for result, slug in _slugs(attacks)],
        pictures=pictures,
        comparison=compare(leading[0], leading[1], (names[leading[0]], names[leading[1]]), each)
        if len(leading) == 2
        else None,
    )


def misfits(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """Attacks on another model, data or patch than the certifying runs beside them, and what differs."""
    certifying = [_subject(run) for run in runs if run.kind != "attack"]
    unrelated = []
    for run in runs:
        if run.kind == "attack" and certifying and _subject(run) not in certifying:
            names = ("model", "data", "patch")
            values = zip(names, _subject(run), *certifying, strict=True)
            differs = [name for name, attacked, *certified in values if attacked not in certified]
            what = f"another {' and '.join(differs)}" if differs else "another combination of model, data and patch"
            unrelated.append((run, f"it attacks {what} than the certified runs beside it; report it alone"))
    return unrelated


def _subject(run: Run) -> tuple[object, ...]:
    """Model, data and patch of a run. A part of a dataset is the same data: tables give the number of images."""
    data = (run.metadata["data"], run.metadata.get("split")) if run.metadata.get("data") else run.job["data"]
    return run.job["classifier"], data, run.threat


def _why_empty(run: Run) -> str:
    rows = run.read(["skipped"])
    if len(rows):
        return f"no image of {run.folder} has an answer: all {len(rows)} were left out ({rows['skipped'][0].as_py()})"
    command = run.metadata.get("command")
    return f"{run.folder} holds no rows yet" + (f"; go on with: {command}" if command else "; run it first")


def _shared_tables(
    recovery: list[RunResult], detection: list[RunResult], attacks: list[RunResult], names: dict[RunResult, str]
) -> dict[str, Table]:
    """The tables of all runs together, without those that would be empty."""
    certifying = [result for result in names if not result.attacked]
    attacked_recovery = [result for result in attacks if not result.detects]
    attacked_detection = [result for result in attacks if result.detects]
    return _existing(
        {
            "runs": run_tables.runs_table(recovery) if recovery else None,
            "detection": run_tables.runs_table(detection) if detection else None,
            "empirical": run_tables.empirical_table(attacked_recovery) if attacked_recovery else None,
            "attacks": run_tables.attacks_table(attacked_recovery) if attacked_recovery else None,
            "detection_attacks": run_tables.attacks_table(attacked_detection) if attacked_detection else None,
            "published": run_tables.published_table(certifying),
            "cost": run_tables.cost_table(certifying, names) if certifying else None,
            "skipped": run_tables.skipped_table(list(names), names),
        }
    )


def _section(result: RunResult, name: str, slug: str, each: int, rows: int) -> RunSection:
    tables, sizes = {"cases": run_tables.cases_table(result)}, group_sizes(result) if each else {}
    table = images_table(result)
    table, shown = replace(table, name=f"{table.name}{slug}"), min(rows, len(table.rows))
    if result.attacked:
        pairs = attack_gallery(result, each)
        return RunSection(result, name, slug, _existing(tables, slug), {}, {}, pairs, sizes, ImageTable(table, shown))
    tables |= {"classes": run_tables.classes_table(result), **run_tables.derived_tables(result)}
    figures, groups = run_figures(result, slug), gallery(result, each)
    pictured = {picture.id for pictures in groups.values() for picture in pictures}
    budget = MAX_THUMBNAILS * rows // MAX_ROWS if each else 0
    images = ImageTable(table, shown, thumbnails(result, pictured, budget))
    return RunSection(result, name, slug, _existing(tables, slug), figures, groups, {}, sizes, images)


def _existing(tables: Mapping[str, Table | None], slug: str = "") -> dict[str, Table]:
    return {key: replace(table, name=f"{table.name}{slug}") for key, table in tables.items() if table is not None}


def _slugs(results: Sequence[RunResult]) -> list[tuple[RunResult, str]]:
    """Unique endings of file names: the folder of each run; empty for a single run."""
    if len(results) == 1:
        return [(results[0], "")]
    slugs: dict[str, RunResult] = {}
    for result in results:
        name = re.sub(r"[^A-Za-z0-9]+", "-", result.run.folder.resolve().name).strip("-") or "run"
        candidates = (f"-{name}{ending}" for ending in ("", *(f"-{n}" for n in range(2, len(results) + 2))))
        slugs[next(slug for slug in candidates if slug not in slugs)] = result
    return [(result, slug) for slug, result in slugs.items()]
