"""Runs of attacks: their tables, and pictures before and after. An attack refutes; it proves nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchcleanser.core.geometry import Window
from patchcleanser.records.run import Row
from patchcleanser.reports import wording
from patchcleanser.reports.gallery import TOLD, Kind, Picture, clean_picture, encoded, shown
from patchcleanser.reports.results import ALERTS, CERTIFIED, CLEAN, DETECTION, ROW_CERTIFIED, UNDEFENDED, told_apart
from patchcleanser.reports.studies import CASES, Study
from patchcleanser.reports.tables import Cell, Column, Table

SETTING = ("Model", "Data", "Patch", "Masks", "Labels")
"""What an attack and a defense were tried on."""
ALWAYS = ("Model", "Defense", "Attack")
"""What a reader of attacks asks first, so it is shown even where it does not differ."""

BARE = Column("undefended_under_attack", "Undefended, attacked, %")
ROBUST = Column("robust", "Defended, attacked, %")
SILENT = Column("never_wrong_silently", "Never wrong silently, attacked, %")
ALERTED = Column("alerts_under_attack", "Alerts, attacked, %")
FOOLED = Column("fooled", "Certified images fooled")
BUDGET = (Column("iterations", "Iterations"), Column("locations", "Locations"), Column("images", "Images"))
COST = (
    Column("queries", "Attacker's classifications an image", 0, page=False),
    Column("seconds", "Seconds an image", 3, page=False),
)


def attacks_table(studies: Sequence[Study]) -> Table:
    """Attacks on recovery defenses: what was left, and what was proved before."""
    caption = "Accuracy without and with an attack, with 95% intervals"
    return _overview("attacks", caption, studies, (ROBUST, CERTIFIED, ROW_CERTIFIED))


def detection_attacks_table(studies: Sequence[Study]) -> Table:
    """Attacks on detection: a weaker promise, and so a table of their own."""
    caption = "Attacks on detection, a weaker promise: an alert under attack is no mistake, and no answer"
    return _overview("detection-attacks", caption, studies, (SILENT, DETECTION, ALERTED, ALERTS))


def _overview(name: str, caption: str, studies: Sequence[Study], shares: tuple[Column, ...]) -> Table:
    differs = wording.varying(studies)
    facets = {facet: Column(facet.lower(), facet, page=facet in (*ALWAYS, *differs)) for facet in SETTING + ALWAYS}
    held, promise, *rest = shares
    columns = (
        *facets.values(),
        Column("run", "Run", page=not told_apart(studies)),
        *BUDGET,
        CLEAN,
        replace(UNDEFENDED, page=False),
        *(BARE, held, promise, FOOLED),
        *(replace(column, page=False) for column in rest),
        *COST,
    )
    folders = wording.folders(studies)
    rows = [_overview_row(study, folder) for study, folder in zip(studies, folders, strict=True)]
    return Table(name, caption, columns, rows, stacks=True)


def _overview_row(study: Study, folder: str) -> dict[str, Cell]:
    settings = study.run.job["settings"]
    queries, seconds = study.per_image
    return {
        "run": folder,
        **{facet.lower(): value for facet, value in wording.facets(study).items()},
        "attack": wording.attack_name(study),
        "iterations": settings["iterations"],
        "locations": settings["locations"],
        "images": study.summary.images,
        **study.summary.shares,
        "fooled": study.fooled,
        "queries": queries,
        "seconds": seconds,
    }


def empirical_table(studies: Sequence[Study]) -> Table:
    """The paper's table of empirical against certified accuracy: a row undefended, one for each defense."""
    attacks = {name: _key(name) for name in map(wording.attacker, studies)}
    differs = [name for name in wording.varying(studies) if name in SETTING]
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for study in studies:
        facets, shares = wording.facets(study), study.summary.shares
        setting = (*(facets[name] for name in SETTING), study.run.job["data"])
        where = [wording.told(name, facets[name]) for name in differs]
        bare = rows.setdefault((*setting, ""), _empirical_row(study, [*where, "undefended"], shares["undefended"]))
        ours = rows.setdefault(
            (*setting, facets["Defense"]), _empirical_row(study, [*where, facets["Defense"]], shares["clean"])
        )
        attack = attacks[wording.attacker(study)]
        if study.run.job["attack"] != "adaptive":  # which aims at the defense, not at the bare classifier
            bare.setdefault(attack, shares["undefended_under_attack"])
        ours.setdefault(attack, shares["robust"])
        ours["certified"] = shares["certified"]
    columns = (
        Column("classifier", "Classifier"),
        replace(CLEAN, title="No attack, %"),
        *(Column(key, f"{name[0].upper()}{name[1:]}, %") for name, key in attacks.items()),
        CERTIFIED,
        Column("images", "Images"),
    )
    ordered = sorted(rows, key=lambda key: key[:-1])  # stable: undefended stays before the defenses
    return Table("empirical", "Empirical against certified accuracy", columns, [rows[key] for key in ordered], True)


def _empirical_row(study: Study, names: Sequence[str], clean: Cell) -> dict[str, Cell]:
    return {"classifier": " · ".join(names), "clean": clean, "certified": None, "images": study.summary.images}


def _key(name: str) -> str:
    """The name of a column for machines."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


COLUMNS = [*TOLD, "fooled", "attacked_undefended", "attacked_answer", "attacked_alert", "attacked_case", "patches"]


@dataclass(frozen=True)
class Duel:
    """One image before and after an attack, and what had been proved of it."""

    before: Picture
    after: Picture
    certified: str
    case: str | None


def _promised(row: Row) -> bool:
    return bool(row["row_certified"] or row["detection_certified"])


def _right(row: Row) -> bool:
    """Whether the clean image is answered rightly."""
    return row["answer"] == row["label"] and not row["alert"]


KINDS = (
    Kind(
        "Certified, and fooled",
        "This must not happen. Either the certificate or the run is broken; audit it before you trust any number here.",
        lambda row: row["fooled"] and _promised(row),
    ),
    Kind(
        "Recovered",
        "The patch (outlined) makes the undefended classifier wrong; the defended one still answers rightly.",
        lambda row: (
            row["undefended"] == row["label"] != row["attacked_undefended"]
            and row["attacked_answer"] == row["label"]
            and not row["attacked_alert"]
        ),
    ),
    Kind(
        "Noticed",
        "Under attack there is an alert instead of an answer.",
        lambda row: bool(row["attacked_alert"]),
    ),
    Kind(
        "The defense was fooled",
        "Answered rightly without the patch and wrongly with it. None of these images was certified: the attack shows "
        "that the missing proof was rightly missing.",
        lambda row: _right(row) and row["fooled"] and not _promised(row),
    ),
    Kind(
        "The attack failed",
        "Even the undefended classifier keeps its right answer under the worst patch that was found.",
        lambda row: row["undefended"] == row["label"] == row["attacked_undefended"] and not row["fooled"],
    ),
    Kind(
        "Wrong without any attack",
        "The clean image is answered wrongly already, so it counts as fooled.",
        lambda row: not _right(row) and not row["alert"],
    ),
)


def duels(study: Study, each: int) -> list[tuple[Kind, list[Duel]]]:
    """Up to `each` images of each kind, before and after."""
    return shown(study, each, KINDS, COLUMNS, _duel)


def _duel(study: Study, row: Row, kind: Kind) -> Duel | None:
    clean, attacked = (encoded(study.run, row["index"], end) for end in ("", "-attacked"))
    if clean is None or attacked is None:
        return None
    before = clean_picture(study, row, clean)
    after = replace(
        before,
        uri=attacked,
        outlined=[Window(*row["patches"][i : i + 4]) for i in range(0, len(row["patches"]), 4)],
        undefended=study.answer_name(row["attacked_undefended"]),
        answer="an alert" if row["attacked_alert"] else study.answer_name(row["attacked_answer"]),
        right=row["attacked_answer"] == row["label"] or bool(row["attacked_alert"]),
    )
    return Duel(before, after, _proof(row), CASES.get(row["attacked_case"]))


def _proof(row: Row) -> str:
    if row["detection_certified"] is not None:
        return "certified for detection" if row["detection_certified"] else "not certified"
    return "certified" if row["certified"] else "row-certified" if row["row_certified"] else "not certified"
