"""The tables of a report: what each run measured, beside the other runs and beside published numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from patchcleanser.core.threats import Threat
from patchcleanser.records.metrics import Proportion
from patchcleanser.reports import wording
from patchcleanser.reports.claims import DefenseClaim
from patchcleanser.reports.published import comparable
from patchcleanser.reports.run_results import CASES, RunResult
from patchcleanser.reports.tables import (
    ALERTS,
    CERTIFIED,
    CLEAN,
    DETECTION,
    ROW_CERTIFIED,
    UNDEFENDED,
    Cell,
    Cells,
    Column,
    Table,
)

SHOWN_ENDS = 15
"""Of many classes, the page shows this many of the best and of the worst."""
SHOWN_PUBLISHED = 5
"""Of many published numbers, the page shows a table of this many rows, and folds the others."""
SHOWN_ALL = 40
"""Up to this many classes, the page shows all."""

CLASSIFICATIONS = Column("classifications", "Classifications per image", 1)
SECONDS = Column("seconds", "Seconds per image", 3)
WARMED_UP = 10
"""Seconds of a run below which warming up decides the seconds per image, so that the page does not show these."""

SETTING = ("Model", "Data", "Patch", "Masks", "Labels")
"""The facets of a run that are neither defense nor attack."""
ALWAYS = ("Model", "Defense", "Attack")
"""Facets that a table of attacks shows even if all runs share them."""
BUDGET = (Column("iterations", "Iterations"), Column("locations", "Locations"), Column("images", "Images"))
UNDEFENDED_ATTACKED = Column("undefended_under_attack", "Undefended, attacked, %")
ROBUST = Column("robust", "Defended, attacked, %")
NEVER_SILENT = Column("never_wrong_silently", "Never wrong silently, attacked, %")
ALERTS_ATTACKED = Column("alerts_under_attack", "Alerts, attacked, %")
FOOLED = Column("fooled", "Certified images fooled")
QUERIES = Column("queries", "Attacker's classifications per image", 0)


def runs_table(results: Sequence[RunResult]) -> Table:
    """Accuracy and cost of runs that certify. All recover or all detect: detection has a table of its own."""
    name, shares = "runs", (CERTIFIED, CLEAN, UNDEFENDED, ROW_CERTIFIED)
    caption = "Accuracy of the undefended and the defended model, with 95% intervals"
    if results[0].detects:
        name, shares = "detection-runs", (DETECTION, CLEAN, UNDEFENDED, ALERTS)
        caption = "Detection only, a weaker guarantee: under attack the answer may be an alert instead of a label"
    differs = wording.varying(results)
    facets = [Column(facet.lower(), facet, page=facet in differs) for facet in wording.facets(results[0])]
    run = Column("run", "Run", page=not (differs and _facets_identify(results)))
    first = (*facets, run) if differs else (run, *facets)
    columns = (*first, *shares, CLASSIFICATIONS, Column("images", "Images"), *_files_only(SECONDS))
    return Table(name, caption, columns, _rows(results), stacks=True).without_copy("row_certified", "certified")


def attacks_table(results: Sequence[RunResult]) -> Table:
    """Every run of an attack with its settings. All recover or all detect.

    For recovery a file only: the page shows the same numbers in `empirical_table`.
    """
    name, robust, certified, hidden = "attacks", ROBUST, CERTIFIED, [ROW_CERTIFIED]
    caption = "Accuracy without and with an attack, with 95% intervals"
    if results[0].detects:
        name, robust, certified, hidden = "detection-attacks", NEVER_SILENT, DETECTION, [ALERTS_ATTACKED, ALERTS]
        caption = "Attacks on detection, a weaker guarantee: an alert under attack is neither right nor wrong"
    shown = (*ALWAYS, *wording.varying(results))
    columns = (
        *(Column(facet.lower(), facet, page=facet in shown) for facet in dict.fromkeys(SETTING + ALWAYS)),
        Column("run", "Run", page=not _facets_identify(results)),
        *BUDGET,
        CLEAN,
        *_files_only(UNDEFENDED),
        *(UNDEFENDED_ATTACKED, robust, certified, FOOLED),
        *_files_only(*hidden, QUERIES, SECONDS),
    )
    return Table(name, caption, columns, _rows(results), stacks=True)


def _files_only(*columns: Column) -> Iterator[Column]:
    """Columns that files have and the page has not."""
    return (replace(column, page=False) for column in columns)


def _facets_identify(results: Sequence[RunResult]) -> bool:
    """Whether no two runs share all facets; otherwise their folders must be shown."""
    return len({tuple(wording.facets(result).values()) for result in results}) == len(results)


def _rows(results: Sequence[RunResult]) -> list[Cells]:
    names = wording.run_names(results) if len(results) == 1 else wording.folders(results)
    return [_row(result, name) for result, name in zip(results, names, strict=True)]


def _row(result: RunResult, name: str) -> Cells:
    classifications, seconds = result.per_image
    row: Cells = {
        "run": name,
        **{facet.lower(): value for facet, value in wording.facets(result).items()},
        "images": result.summary.images,
        **result.summary.shares,
        "classifications": classifications,
        "seconds": seconds,
    }
    if result.attacked:
        row |= {name: result.run.job["settings"][name] for name in ("iterations", "locations")}
        row |= {"attack": wording.attack_name(result), "fooled": result.fooled, "queries": classifications}
    return row


def empirical_table(results: Sequence[RunResult]) -> Table:
    """The paper's table of empirical and certified accuracy: a row undefended, one for each defense."""
    attacks = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()) for name in map(wording.attack_with_budget, results)}
    differs = [name for name in wording.varying(results) if name in SETTING]
    rows: dict[tuple[str, ...], Cells] = {}

    def row(result: RunResult, defense: str, clean: str) -> Cells:
        facets = wording.facets(result)
        key = (*(facets[name] for name in SETTING), result.run.job["data"], defense)
        title = " · ".join([*(wording.with_noun(name, facets[name]) for name in differs), defense or "undefended"])
        images = result.summary.images
        cells: Cells = {"classifier": title, "clean": result.summary.shares[clean], "certified": None, "images": images}
        return rows.setdefault(key, cells)

    for result in results:
        shares, attack = result.summary.shares, attacks[wording.attack_with_budget(result)]
        undefended, defended = row(result, "", "undefended"), row(result, wording.defense(result), "clean")
        if result.run.job["attack"] != "adaptive":  # which attacks the defense, not the undefended classifier
            undefended.setdefault(attack, shares["undefended_under_attack"])
        defended.setdefault(attack, shares["robust"])
        by_others = defended.get("fooled")
        fooled = result.fooled + (by_others if isinstance(by_others, int) else 0)
        defended |= {"certified": shares["certified"], "fooled": fooled}
    columns = (
        Column("classifier", "Classifier"),
        replace(CLEAN, title="No attack, %"),
        *(Column(key, f"{name[0].upper()}{name[1:]}, %") for name, key in attacks.items()),
        *(CERTIFIED, FOOLED),
        Column("images", "Images"),
    )
    ordered = sorted(rows, key=lambda key: key[:-1])  # stable: undefended stays before the defenses
    return Table("empirical", "Empirical and certified accuracy", columns, [rows[key] for key in ordered], True)


def published_table(results: Sequence[RunResult]) -> Table | None:
    """The runs beside published numbers for the same data and patch; None if there are none."""
    groups: dict[tuple[DefenseClaim, ...], list[RunResult]] = {}
    for result in results:
        published = tuple(row for row in comparable(result) if (row.promise == "detection") == result.detects)
        if published:
            groups.setdefault(published, []).append(result)
    rows = [
        {"group": number, **row}
        for number, (published, ours) in enumerate(groups.items())
        for row in (*_our_rows(ours), *map(_published_row, published))
    ]
    columns = (
        Column("method", "Method"),
        Column("data", "Data", page=False),
        Column("patch", "Patch", page=False),
        *(CERTIFIED, DETECTION, CLEAN, UNDEFENDED),
        Column("grid", "Patch on"),
        Column("masks", "Masks"),
        Column("source", "Source"),
        Column("paper", "Paper", page=False),
    )
    caption = "The runs of this report beside published numbers for the same data and patch"
    return Table("published", caption, columns, rows, stacks=True).without_empty() if rows else None


def split_by_patch(table: Table) -> list[tuple[Table, Table]]:
    """The published numbers as the page shows them: for each dataset and patch the first few rows, and the rest."""
    groups: dict[Cell, list[Cells]] = {}
    for row in table.rows:
        groups.setdefault(row["group"], []).append(row)
    tables = []
    for rows in groups.values():
        ours, published = rows[0], rows[-1]
        patch = wording.with_noun("Patch", str(published["patch"]))
        caption = f"{published['data']}, {patch}; here: {ours['data']}, {ours['patch']}"
        part, shown = (
            replace(table, caption=caption, rows=rows).without_empty(),
            max(SHOWN_PUBLISHED, ours_in(rows) + 1),
        )
        tables.append((replace(part, rows=rows[:shown]), replace(part, caption=f"{caption}, more", rows=rows[shown:])))
    return tables


def ours_in(rows: Sequence[Cells]) -> int:
    """How many rows are runs of this report."""
    return sum(bool(row.get("ours")) for row in rows)


def _our_rows(results: Sequence[RunResult]) -> list[Cells]:
    """Runs named by all their facets, and by their folders where these are equal."""
    names = [
        f"{wording.model(result)}, {wording.defense(result)}, {wording.with_noun('Masks', wording.masks(result))}, "
        f"{wording.with_noun('Patch', wording.patch(result.run.threat))}"
        for result in results
    ]
    return [
        {
            "ours": True,
            "method": name if names.count(name) == 1 else f"{name}, {folder}",
            "data": wording.data(result),
            "patch": wording.patch(result.run.threat),
            "masks": wording.masks(result),
            "grid": "network's input" if result.run.threat.grid == "input" else "original image",
            **{key: result.summary.shares.get(key) for key in ("undefended", "clean", result.certified_key)},
            "source": "this report",
        }
        for result, name, folder in zip(results, names, wording.folders(results), strict=True)
    ]


def _published_row(row: DefenseClaim) -> Cells:
    return {
        "method": row.method,
        "data": row.data,
        "patch": wording.patch(Threat.parse(row.patch, count=row.count)),
        "masks": row.masks and row.masks.replace("x", "×"),
        "grid": row.grid and "network's input",
        "undefended": row.undefended,
        "clean": row.clean,
        "detection_certified" if row.promise == "detection" else "certified": row.certified,
        "source": row.citation,
        "paper": row.paper,
    }


def cost_table(results: Sequence[RunResult], names: dict[RunResult, str]) -> Table:
    """The cost of certifying, and of answering. The time of an image is left out of runs that hardly warmed up."""
    rows: list[Cells] = []
    for result in results:
        classifications, seconds = result.per_image
        answers = {} if result.derived is None else result.derived.answers
        rows.append(
            {
                "run": names[result],
                "masks": len(result.masks) if result.has_masks else None,
                "most": wording.most_classifications(result),
                "classifications": classifications,
                "seconds": seconds if result.summary.seconds >= WARMED_UP else None,
                "total": result.summary.seconds,
                # Answers after a coarse round come last, and are what such a run's defense costs.
                **{f"predict_{name.split('-')[0]}": cost for name, (_, cost) in answers.items()},
            }
        )
    columns = (
        Column("run", "Run"),
        Column("masks", "Masks", page=False),
        replace(CLASSIFICATIONS, title="Classifications per image, mean"),
        Column("most", "At most"),
        SECONDS,
        Column("total", "Seconds in all, without start-up"),
        Column("predict_double", "To answer by double-masking", 1),
        Column("predict_challenger", "To answer by challenger masking", 1),
    )
    return Table("cost", "Classifications and time", columns, rows, stacks=True).without_empty()


def classes_table(result: RunResult) -> Table:
    """The shares of each true class, the most certified first."""
    rows: list[Cells] = [
        {"class": result.class_name(label), "label": label, "images": shares["clean"].total, **shares}
        for label, shares in by_certified(result)
    ]
    certified, last = (DETECTION, ALERTS) if result.detects else (CERTIFIED, replace(ROW_CERTIFIED, page=False))
    columns = (
        Column("class", "Class"),
        Column("label", "Label", page=False),
        *(certified, CLEAN, UNDEFENDED, last),
        Column("images", "Images"),
    )
    return Table("classes", "Accuracy of each class", columns, rows, stacks=result.detects)


def by_certified(result: RunResult) -> list[tuple[int, dict[str, Proportion]]]:
    """The classes, the most certified first; among equals, those with the narrowest intervals at either end."""
    shares = {label: shares[result.certified_key] for label, shares in result.classes.items()}
    order = sorted(shares, key=lambda label: (-shares[label].percent, -sum(shares[label].interval)))
    return [(label, result.classes[label]) for label in order]


def best_and_worst(table: Table) -> list[Table]:
    """A table of classes as the page shows it: complete, or its best and its worst rows."""
    if len(table.rows) <= SHOWN_ALL:
        return [table]
    best, worst = table.rows[:SHOWN_ENDS], table.rows[-SHOWN_ENDS:][::-1]
    return [
        replace(table, caption=f"The {SHOWN_ENDS} classes most often certified", rows=best),
        replace(table, caption=f"The {SHOWN_ENDS} classes least often certified", rows=worst),
    ]


def cases_table(result: RunResult) -> Table | None:
    """How the answers were reached; None for defenses without such cases."""
    if not result.cases:
        return None
    columns = (Column("case", "Case"), Column("share", "Of all images, %"), Column("right", "Of these correct, %"))
    rows: list[Cells] = [
        {"case": CASES[case], "share": share, "right": right} for case, (share, right) in result.cases.items()
    ]
    name, where = ("attacked-cases", "under attack") if result.attacked else ("cases", "on clean images")
    return Table(name, f"How the answers {where} were reached", columns, rows)


def derived_tables(result: RunResult) -> dict[str, Table]:
    """What follows from stored two-mask labels: other recovery defenses, smaller patches, Minority Reports."""
    if result.derived is None:
        return {}
    answers: list[Cells] = [
        {"defense": wording.defense_title(name), "clean": clean, "classifications": cost}
        for name, (clean, cost) in result.derived.answers.items()
    ]
    smaller: list[Cells] = [{"side": side, "row_certified": share} for side, share in result.derived.smaller]
    thresholds: list[Cells] = [
        {"threshold": d.threshold, "clean": d.clean, "detection_certified": d.detection_certified, "alerts": d.alerts}
        for d in result.derived.detection
    ]
    tables = {
        "answers": Table(
            "defenses",
            "Recovery defenses on the same labels",
            (Column("defense", "Defense"), CLEAN, CLASSIFICATIONS),
            answers,
        ),
        "smaller": Table(
            "smaller-patches",
            "The same masks against smaller square patches",
            (Column("side", "Patch side, px"), ROW_CERTIFIED),
            smaller if len(smaller) > 1 else [],
        ),
        "thresholds": Table(
            "detection",
            "Minority Reports on the same labels: detection only",
            (Column("threshold", "Threshold", 2), CLEAN, DETECTION, ALERTS),
            thresholds,
        ),
    }
    return {key: table for key, table in tables.items() if table.rows}


def smaller_note(result: RunResult) -> str | None:
    """A sentence on smaller patches where they change nothing; None where they do."""
    if result.derived is None or len({share.count for _, share in result.derived.smaller}) != 1:
        return None
    (first, share), (last, _) = result.derived.smaller[0], result.derived.smaller[-1]
    if first == last:
        return None
    return (
        f"The same masks prove no more against a smaller patch: {share.percent:.1f}% of the images are row-certified "
        f"at every side from {first} to {last} px. Masks made for a smaller patch are smaller, and may prove more: "
        "certify with a smaller --patch."
    )


def skipped_table(results: Sequence[RunResult], names: dict[RunResult, str]) -> Table | None:
    """Every image that has no answer, and why."""
    rows: list[Cells] = [
        {"run": names[result], "image": image, "reason": wording.shorten_paths(reason)}
        for result in results
        for image, reason in result.skipped
    ]
    columns = (Column("run", "Run", page=len(names) > 1), Column("image", "Image"), Column("reason", "Reason"))
    return Table("skipped", "Images left out", columns, rows) if rows else None
