"""The tables of a report: what each run shows, beside the others and beside what was published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from patchcleanser.core.threats import Threat
from patchcleanser.records.metrics import Proportion
from patchcleanser.reports import wording
from patchcleanser.reports.published import Published, comparable
from patchcleanser.reports.studies import CASES, Study
from patchcleanser.reports.tables import Cell, Column, Table

ENDS = 15
"""Of many classes the page shows so many of the best and of the worst."""
ALL = 40
"""Up to so many classes are all shown."""

UNDEFENDED = Column("undefended", "Undefended, %")
CLEAN = Column("clean", "Clean, %")
CERTIFIED = Column("certified", "Certified, %")
ROW_CERTIFIED = Column("row_certified", "Row-certified, %")
DETECTION = Column("detection_certified", "Certified for detection, %")
ALERTS = Column("alerts", "Alerts on clean images, %")
COST = (
    Column("classifications", "Classifications an image", 0),
    Column("seconds", "Seconds an image", 3),
)


def runs_table(studies: Sequence[Study]) -> Table:
    """Recovery runs: the accuracies and what they cost."""
    caption = "Accuracy of the undefended and the defended model, with 95% intervals"
    return _overview("runs", caption, studies, (CERTIFIED, CLEAN, UNDEFENDED, ROW_CERTIFIED))


def detection_table(studies: Sequence[Study]) -> Table:
    """Detection runs: a weaker promise, and so a table of their own."""
    caption = "Detection only, a weaker promise: under attack the answer may be an alert instead of a label"
    return _overview("detection-runs", caption, studies, (DETECTION, CLEAN, UNDEFENDED, ALERTS))


def _overview(name: str, caption: str, studies: Sequence[Study], shares: tuple[Column, ...]) -> Table:
    differs = wording.varying(studies)
    facets = [Column(facet.lower(), facet, page=facet in differs) for facet in wording.facets(studies[0])]
    columns = (
        *(facets if differs else []),
        Column("run", "Run", page=not (differs and told_apart(studies))),
        *([] if differs else facets),
        *shares,
        Column("images", "Images"),
        *COST,
    )
    folders = wording.folders(studies)
    rows = [_overview_row(study, folder) for study, folder in zip(studies, folders, strict=True)]
    return Table(name, caption, columns, rows, stacks=True)


def told_apart(studies: Sequence[Study]) -> bool:
    """Whether what differs tells these runs apart; the folder is needed only where that is not enough."""
    return len({tuple(wording.facets(study).values()) for study in studies}) == len(studies)


def _overview_row(study: Study, folder: str) -> dict[str, Cell]:
    classifications, seconds = study.per_image
    return {
        "run": folder,
        **{facet.lower(): value for facet, value in wording.facets(study).items()},
        "images": study.summary.images,
        **study.summary.shares,
        "classifications": classifications,
        "seconds": seconds,
    }


def published_table(studies: Sequence[Study]) -> Table | None:
    """The runs beside what others printed for the same data and patch; None if nobody did."""
    groups: dict[tuple[Published, ...], list[Study]] = {}
    for study in studies:
        theirs = tuple(row for row in comparable(study) if (row.kind == "detection") == study.detects)
        if theirs:
            groups.setdefault(theirs, []).append(study)
    rows = [
        {"group": number, **row}
        for number, (theirs, ours) in enumerate(groups.items())
        for row in (*_our_rows(ours), *map(_their_row, theirs))
    ]
    columns = (
        Column("method", "Method"),
        Column("data", "Data", page=False),
        Column("patch", "Patch", page=False),
        CERTIFIED,
        DETECTION,
        CLEAN,
        UNDEFENDED,
        Column("grid", "Pixels meant"),
        Column("masks", "Masks"),
        Column("source", "Source"),
        Column("paper", "Paper", page=False),
    )
    caption = "This report's runs beside published numbers for the same data and patch"
    return Table("published", caption, columns, rows, stacks=True).without_empty() if rows else None


def by_patch(table: Table) -> list[Table]:
    """The published numbers as the page shows them: a table for each dataset and patch."""
    found: dict[Cell, list[dict[str, Cell]]] = {}
    for row in table.rows:
        found.setdefault(row["group"], []).append(row)
    return [replace(table, caption=_compared(rows), rows=rows).without_empty() for rows in found.values()]


def _compared(rows: list[dict[str, Cell]]) -> str:
    ours, theirs = rows[0], rows[-1]
    return f"{theirs['data']}, {wording.told('Patch', str(theirs['patch']))}; here: {ours['data']}, {ours['patch']}"


def _our_rows(studies: Sequence[Study]) -> list[dict[str, Cell]]:
    """Runs named by all that may set them apart, and by their folders where that is not enough."""
    said = [
        f"{wording.model(study)}, {wording.defense(study)}, {wording.told('Masks', wording.masks(study))}, "
        f"{wording.told('Patch', wording.patch(study.run.threat))}"
        for study in studies
    ]
    folders = wording.folders(studies)
    return [
        _our_row(study, name if said.count(name) == 1 else f"{name}, {folder}")
        for study, name, folder in zip(studies, said, folders, strict=True)
    ]


def _our_row(study: Study, name: str) -> dict[str, Cell]:
    return {
        "ours": True,
        "method": name,
        "data": wording.data(study),
        "patch": wording.patch(study.run.threat),
        "masks": wording.masks(study),
        "grid": "network's input" if study.run.threat.grid == "input" else "image as it came",
        **{key: study.summary.shares.get(key) for key in ("undefended", "clean", study.promise)},
        "source": "this report",
    }


def _their_row(row: Published) -> dict[str, Cell]:
    promise = "detection_certified" if row.kind == "detection" else "certified"
    return {
        "method": row.method,
        "data": row.dataset,
        "patch": wording.patch(Threat.parse(row.patch, count=row.count)),
        "masks": row.masks and row.masks.replace("x", "×"),
        "grid": row.grid and "network's input",
        "undefended": row.undefended,
        "clean": row.clean,
        promise: row.certified,
        "source": row.citation,
        "paper": row.paper,
    }


def cost_table(studies: Sequence[Study], names: dict[Study, str]) -> Table:
    """What certifying took, and what answering takes."""
    rows: list[dict[str, Cell]] = []
    for study in studies:
        classifications, seconds = study.per_image
        answers = {} if study.derived is None else study.derived.answers
        rows.append(
            {
                "run": names[study],
                "masks": len(study.masks) if study.has_masks else None,
                "classifications": classifications,
                "seconds": seconds,
                "minutes": study.summary.seconds / 60,
                **{f"predict_{name.split('-')[0]}": spent for name, (_, spent) in answers.items()},
            }
        )
    columns = (
        Column("run", "Run"),
        Column("masks", "Masks"),
        *COST,
        Column("minutes", "Minutes in all", 1),
        Column("predict_double", "To answer by double-masking", 1),
        Column("predict_challenger", "To answer by challenger masking", 1),
    )
    return Table("cost", "Classifications and time", columns, rows, stacks=True).without_empty()


def classes_table(study: Study) -> Table:
    """The shares of each true class, the most certified first."""
    rows: list[dict[str, Cell]] = [
        {"class": study.class_name(label), "label": label, "images": shares["clean"].total, **shares}
        for label, shares in by_promise(study)
    ]
    rows_too = Column(ROW_CERTIFIED.key, ROW_CERTIFIED.title, page=False)
    promised = (DETECTION, ALERTS) if study.detects else (CERTIFIED, rows_too)
    columns = (
        Column("class", "Class"),
        Column("label", "Label", page=False),
        *(promised[0], CLEAN, UNDEFENDED, *promised[1:]),
        Column("images", "Images"),
    )
    return Table("classes", "Accuracy of each class", columns, rows)


def by_promise(study: Study) -> list[tuple[int, dict[str, Proportion]]]:
    """The classes, the most certified first; of equals those known best stand at either end."""
    shares = {label: shares[study.promise] for label, shares in study.classes.items()}
    order = sorted(shares, key=lambda label: (-shares[label].percent, -sum(shares[label].interval)))
    return [(label, study.classes[label]) for label in order]


def ends(table: Table) -> list[Table]:
    """A table of classes as the page shows it: whole, or its best and its worst rows."""
    if len(table.rows) <= ALL:
        return [table]
    best, worst = table.rows[:ENDS], table.rows[-ENDS:][::-1]
    return [
        replace(table, caption=f"The {ENDS} classes most often certified", rows=best),
        replace(table, caption=f"The {ENDS} classes least often certified", rows=worst),
    ]


def cases_table(study: Study) -> Table:
    """How the answers were reached."""
    columns = (Column("case", "Case"), Column("share", "Of all images, %"), Column("right", "Of these right, %"))
    rows: list[dict[str, Cell]] = [
        {"case": CASES[case], "share": share, "right": right} for case, (share, right) in study.cases.items()
    ]
    if study.attacked:
        return Table("attacked-cases", "How the answers under attack were reached", columns, rows)
    return Table("cases", "How the answers on clean images were reached", columns, rows)


def answers_table(study: Study) -> Table | None:
    """Both recovery defenses on the same labels."""
    if study.derived is None or not study.derived.answers:
        return None
    columns = (Column("defense", "Defense"), CLEAN, Column("classifications", "Classifications an image", 1))
    rows: list[dict[str, Cell]] = [
        {"defense": wording.defense_title(name), "clean": clean, "classifications": spent}
        for name, (clean, spent) in study.derived.answers.items()
    ]
    return Table("defenses", "Two ways to answer with the same masks and the same certificate", columns, rows)


def smaller_table(study: Study) -> Table | None:
    """The row certificate of the run's masks against smaller patches."""
    if study.derived is None or len(study.derived.smaller) < 2:
        return None
    columns = (Column("side", "Patch side, px"), ROW_CERTIFIED)
    rows: list[dict[str, Cell]] = [{"side": side, "row_certified": share} for side, share in study.derived.smaller]
    return Table("smaller-patches", "The same masks against smaller square patches", columns, rows)


def flat(study: Study) -> str | None:
    """What is said of smaller patches where they change nothing; None where they do."""
    if study.derived is None or len({share.count for _, share in study.derived.smaller}) != 1:
        return None
    (first, share), (last, _) = study.derived.smaller[0], study.derived.smaller[-1]
    if first == last:
        return None
    return (
        f"The same masks prove no more against a smaller patch: {share.percent:.1f}% are row-certified at every side "
        f"from {first} to {last} px. So what is missed is missed because the masks hide too much, not because of the "
        "size of the patch."
    )


def thresholds_table(study: Study) -> Table | None:
    """Minority Reports at each threshold."""
    if study.derived is None or not study.derived.detection:
        return None
    rows: list[dict[str, Cell]] = [
        {
            "threshold": at.threshold,
            "clean": at.clean,
            "detection_certified": at.detection_certified,
            "alerts": at.alerts,
        }
        for at in study.derived.detection
    ]
    columns = (Column("threshold", "Threshold", 2), CLEAN, DETECTION, ALERTS)
    return Table("detection", "Minority Reports on the same labels: detection only", columns, rows)


def skipped_table(studies: Sequence[Study], names: dict[Study, str]) -> Table | None:
    """Every image that has no answer, and why."""
    rows: list[dict[str, Cell]] = [
        {"run": names[study], "image": image, "reason": wording.brief(reason)}
        for study in studies
        for image, reason in study.skipped
    ]
    columns = (Column("run", "Run", page=len(names) > 1), Column("image", "Image"), Column("reason", "Reason"))
    return Table("skipped", "Images left out", columns, rows) if rows else None
