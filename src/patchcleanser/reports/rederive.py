"""The numbers of a claim, derived again from what it names: a run's rows, a table of ours, an audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from patchcleanser.attacks import ADAPTIVE, ATTACKS
from patchcleanser.core.counts import counted
from patchcleanser.errors import PatchCleanserError, RecordError
from patchcleanser.records.atomic import require_inside
from patchcleanser.records.audits import AUDIT, read_audit
from patchcleanser.records.derive import VERDICTS, detection, verdicts
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run
from patchcleanser.reports.claims import DefenseClaim

DIGITS = 2
"""Decimal digits of a claim's numbers."""
SETTING = ("data", "patch", "masks", "grid", "defense")
"""What an entry of a table, or of an attack, says in the words of a claim."""
MEASURED = ("options", "undefended", "clean", "classifications", "milliseconds", "hardware", "labels", *SETTING, "at")
"""What a claim may say only if the entry of its table says it."""
ATTACKED = ("attack", "attacked", "fooled")
"""What a claim of ours may say only if its audit, or the table of an attack, says it."""
Numbers = dict[str, Any]
"""Values by the fields of a claim."""


def claim_of(run: Run, *, method: str, data: str, measured_by: str, **facts: Any) -> DefenseClaim:
    """The claim of a run: its numbers, and what only its author can say."""
    numbers = numbers_of(run) | (audited(run) if (run.folder / AUDIT).is_file() else {})
    return DefenseClaim(method=method, data=data, measured_by=measured_by, **facts, **numbers)


def numbers_of(run: Run, defense: str | None = None, options: str | None = None) -> Numbers:
    """What the rows of a finished run show.

    `defense` and `options` may name another defense, which follows from the run's stored tables.
    """
    if run.kind != "certify" or not run.finished:
        if run.kind != "certify":
            raise RecordError(f"a claim is about a run of certify; {run.folder} is an attack; name the run it attacked")
        missing = counted(len(run.missing()), "batch")
        raise RecordError(
            f"a claim is about a finished run of certify; {run.folder} is {missing} short of its end: "
            "finish it with the command that began it"
        )
    if run.threat.region is not None:
        raise RecordError(f"a claim is about patches anywhere; those of {run.folder} lie inside {run.threat.region}")
    if skipped := run.images - run.read(["skipped"])["skipped"].null_count:
        raise RecordError(
            f"a claim counts every image; {run.folder} skipped {skipped}: certify with --unreadable stop "
            "(in Python skip=False)"
        )
    own = ", ".join(f"{name}={value}" for name, value in sorted(run.job["options"].items())) or None
    numbers = {**_setting(run), "defense": run.job["defense"], "options": own, **_accuracies(run)}
    if defense not in (None, run.job["defense"]):
        numbers |= {"defense": defense, "options": options, **_derived(run, str(defense), options)}
    return {"run": run.folder.as_posix(), "run_key": run.key, "run_digest": run.digest, **numbers}


def _setting(run: Run) -> Numbers:
    """Threat, masks and labels; the side of the patch where all images are squares of one size."""
    rows = run.read(["height", "width", "row_certified", "unconfirmed"]).to_pylist()
    sizes = {(row["height"], row["width"]) for row in rows}
    statistical = any(row["row_certified"] and row["unconfirmed"] != 0 for row in rows)
    side = at = None
    if len(sizes) == 1:
        ((height, width),) = sizes
        shapes = run.threat.shapes((height, width))
        if height == width and len(shapes) == 1 and shapes[0][0] == shapes[0][1]:
            side, at = shapes[0][0], height
    return {
        "patch": run.job["threat"]["shape"],
        "count": run.threat.count,
        "grid": run.threat.grid,
        "side": side,
        "at": at,
        "masks": "x".join(map(str, run.job["masks"])) if run.job["masks"] else None,
        "labels": "fast" if statistical and run.job["precision"] == "fast" else "exact",
    }


def _accuracies(run: Run) -> Numbers:
    summary = run.summary()
    detects = "detection_certified" in summary.shares
    shares = {**summary.shares, "certified": summary.shares["detection_certified" if detects else "certified"]}
    hardware = run.metadata.get("versions", {}).get("hardware")
    return {
        "promise": "detection" if detects else "recovery",
        "images": summary.images,
        **{name: rounded(shares[name]) for name in ("undefended", "clean", "certified")},
        "classifications": rounded(summary.classifications / summary.images),
        "milliseconds": rounded(1000 * summary.seconds / summary.images) if hardware else None,
        "hardware": hardware,
    }


def _derived(run: Run, defense: str, options: str | None) -> Numbers:
    """The numbers of another defense, from the stored tables; what it would cost is not known.

    Recovery defenses share their certificates if they share the coarse round. Their other options would change answers.
    """
    cost: Numbers = dict.fromkeys(("classifications", "milliseconds", "hardware"))
    if defense == "minority-reports":
        (point,) = detection(run, [_threshold(options)])
        shares = {"clean": rounded(point.clean), "certified": rounded(point.detection_certified)}
        return {**cost, **shares, "promise": "detection"}
    if defense not in VERDICTS or options != (f"coarse={run.coarse}" if run.coarse else None):
        text = f" with {options}" if options else ""
        raise RecordError(f"{defense}{text} does not follow from the rows of {run.folder}; certify with it")
    clean, _ = verdicts(run, defense, coarse=bool(run.coarse))
    return {**cost, "clean": rounded(clean)}


def _threshold(options: str | None) -> float:
    """That of Minority Reports; RecordError if the options say something else."""
    text = "threshold=0.5" if options is None else options
    with suppress(ValueError):
        value = float(text.removeprefix("threshold="))
        if text.startswith("threshold=") and 0 <= value <= 1:
            return value
    raise RecordError(f"options of minority-reports are threshold=NUMBER, from 0 to 1, got {text}")


def audited(run: Run) -> Numbers:
    """What the audit of these very rows examined; RecordError if it failed."""
    audit = read_audit(run)
    if audit["contradictions"]:
        raise RecordError(f"the audit in {run.folder / AUDIT} has contradictions, so its run supports no claim")
    numbers = {"audit_key": audit["signature"], "rederived": len(audit["derived"])}
    if audit["attacked"]:
        numbers |= {"attack": _attack(audit["settings"]), "attacked": len(audit["attacked"]), "fooled": 0}
    return numbers


def _attack(entry: dict[str, Any]) -> str:
    """An attack as claims name it; without a name it is the adaptive one, as audits run it."""
    title, steps, places = ATTACKS[entry.get("attack", ADAPTIVE)].title, entry["iterations"], entry["locations"]
    return f"{title}, {counted(steps, 'step')}, {counted(places, 'place')}"


def rounded(value: Proportion | float) -> float:
    """A share in percent, or a number, as claims write it."""
    return round(value.percent if isinstance(value, Proportion) else value, DIGITS)


def problems_of(claim: DefenseClaim, root: Path) -> Iterator[str]:
    """Each way in which a claim does not follow from the files that it names, below `root`."""
    try:
        if claim.run:
            yield from _differences(claim, _of_run(claim, root), "its rows give")
        if claim.table:
            unknown = dict.fromkeys(MEASURED if claim.attack_table else (*MEASURED, *ATTACKED))
            yield from _differences(claim, unknown | _of_table(root, claim.table), f"{claim.table} has")
        if claim.attack_table:
            yield from _differences(claim, _of_attack(entry_at(root, claim.attack_table)), f"{claim.attack_table} has")
    except PatchCleanserError as error:
        yield str(error)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a hostile or damaged file
        yield f"what it names cannot be read: {error!r}"


def _differences(claim: DefenseClaim, numbers: Numbers, what: str) -> Iterator[str]:
    for name, value in numbers.items():
        if getattr(claim, name) != value:
            yield f"{name} is {getattr(claim, name)}, but {what} {value}; write {json.dumps(value, ensure_ascii=False)}"


def _of_run(claim: DefenseClaim, root: Path) -> Numbers:
    folder = root / str(claim.run)
    require_inside(folder, root)
    run = Run.open(folder)
    unknown = {} if claim.attack_table else dict.fromkeys(ATTACKED)
    numbers = numbers_of(run, claim.defense, claim.options) | unknown | (audited(run) if claim.audit_key else {})
    return {**_named_data(run), **numbers, "run": claim.run}


def _named_data(run: Run) -> Numbers:
    """The dataset that the run was made with, if it has a name that means the same everywhere."""
    name = run.metadata.get("data")
    return {"data": name} if isinstance(name, str) and ":" not in name else {}


def entry_at(root: Path, address: str) -> dict[str, Any]:
    """The entry of a JSON file that FILE#POINTER names, as results/zoo.json#/2."""
    name, _, pointer = address.partition("#")
    require_inside(root / name, root)
    try:
        value = json.loads((root / name).read_text(encoding="utf-8"))
        for part in filter(None, pointer.split("/")):
            value = value[int(part) if isinstance(value, list) else part]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecordError(f"{address} names no entry ({error!r}); name one as results/zoo.json#/2") from error
    if not isinstance(value, dict):
        raise RecordError(f"{address} is no entry, but {type(value).__name__}; name one as results/zoo.json#/2")
    return value


def _of_table(root: Path, address: str) -> Numbers:
    """The numbers of an entry of zoo.json and the like, of baselines.json, or of results/reproduce."""
    entry = entry_at(root, address)
    values, origin = {**entry, **entry.get("values", {})}, entry.get("origin", entry)
    detects = values.get("detection_certified") is not None
    shares = {"certified": values["detection_certified" if detects else "certified"]}
    shares |= {name: values[name] for name in ("undefended", "clean") if name in values}
    percents = {name: 100 * value[0] / value[1] if isinstance(value, list) else value for name, value in shares.items()}
    numbers: Numbers = {"images": entry["images"], "count": 1, "promise": "detection" if detects else "recovery"}
    numbers |= {name: rounded(value) for name, value in percents.items()}
    if "ms" in values or "seconds" in values:  # entries of the first kind count over all images
        images = 1 if {"values", "ms"} & set(entry) else entry["images"]
        milliseconds = values.get("ms") or 1000 * values["seconds"] / images
        numbers |= {"classifications": rounded(values["classifications"] / images)}
        numbers |= {"milliseconds": rounded(milliseconds), "hardware": origin["versions"]["hardware"]}
    if "labels_rechecked" in entry or origin.get("precision") == "fast":
        numbers["labels"] = "fast"
    if entry.get("options"):
        numbers["options"] = ", ".join(f"{name}={value}" for name, value in entry["options"].items())
    return numbers | (_named(address) if "origin" in entry else _setting_of(entry, "at"))


def _setting_of(entry: dict[str, Any], *more: str) -> Numbers:
    """Setting of an entry; one with masks that names no defense is of double-masking, as in zoo.json."""
    setting = {name: entry[name] for name in (*SETTING, *more) if name in entry}
    return {"defense": "double-masking", **setting} if "masks" in entry else setting


def _named(address: str) -> Numbers:
    """Setting of a row of results/reproduce, by its name: MODEL-DATA-SIDE-GRID-MASKS|DEFENSE."""
    name, _, defense = address.rpartition("/")[2].partition("|")
    data, side, grid, masks = name.split("-")[-4:]
    size = {"at": 32} if data == "cifar10" else {}
    return {"data": data, "patch": f"{side}x{side}", "grid": grid, "masks": masks, "defense": defense, **size}


def _of_attack(entry: dict[str, Any]) -> Numbers:
    """The attack of an entry of results/: on what, how many images it tried, and how many certified ones it fooled."""
    attacked = entry.get("certified_images_attacked_adaptively", entry.get("certified_images_attacked"))
    fooled = entry.get("certified_images_fooled", len(entry.get("contradictions", [])))
    numbers = {"attack": _attack(entry), "attacked": entry["images"] if attacked is None else attacked}
    return {**_setting_of(entry), **numbers, "fooled": fooled}
