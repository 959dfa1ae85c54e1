"""Runs to findings, and findings kept in files: what was measured here goes beside what was measured elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchcleanser.data.boxes import object_shares
from patchcleanser.errors import DataError, RecordError
from patchcleanser.evaluation.timing import Latencies
from patchcleanser.paper.base import Experiment, Finding, Line, Plan, Values
from patchcleanser.paper.images import DATA
from patchcleanser.paper.reading import timed
from patchcleanser.paper.running import Missing
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run
from patchcleanser.reports.wording import brief

Outcomes = Mapping[Plan, Run | Latencies | Missing]
Found = dict[str, Finding]

NOTED = ("command", "created", "seed", "versions", "clock", "load")
"""What a finding keeps of its run's circumstances."""


def collect(experiment: Experiment, outcomes: Outcomes, root: Path | None) -> tuple[Found, dict[str, str]]:
    """What each line of an experiment shows, by its key; and for the others why there is nothing."""
    found: Found = {}
    missing: dict[str, str] = {}
    boxes: dict[Plan, dict[str, float]] = {}
    for line in experiment.lines:
        left = outcomes.get(line.plan)
        if left is None:
            continue
        if isinstance(left, Missing):
            missing[line.key] = left.why
            continue
        try:
            values, circumstances = _values(experiment, line, left, boxes, root), origin(left)
        except (DataError, RecordError) as error:
            missing[line.key] = str(error)
            continue
        found[line.key] = _with_times(Finding(values, _images(left, values), circumstances), line, outcomes)
    return found, missing


def _with_times(finding: Finding, line: Line, outcomes: Outcomes) -> Finding:
    """With the milliseconds that another plan measured under the same masks, and how busy the machine was then."""
    beside = outcomes.get(line.timed) if line.timed else None
    if not isinstance(beside, Latencies):
        return finding
    values = {**finding.values, "milliseconds": timed(beside, _timed_variant(line, beside))["milliseconds"]}
    busy = {key: value for key, value in origin(beside).items() if key in ("clock", "load")}
    return replace(finding, values=values, origin={**finding.origin, **busy})


def _timed_variant(line: Line, times: Latencies) -> str:
    return line.variant if line.variant in times.milliseconds else "double-masking"


def _values(
    experiment: Experiment, line: Line, left: Run | Latencies, boxes: dict[Plan, dict[str, float]], root: Path | None
) -> Values:
    if experiment.boxed is None or not isinstance(left, Run):
        return experiment.read(left, line.variant)
    if line.plan not in boxes:
        where = DATA[line.plan.data].folder(root)
        boxes[line.plan] = object_shares(line.plan.data, left.read(["id"])["id"].to_pylist(), where)
    return experiment.boxed(left, line.variant, boxes[line.plan])


def _images(left: Run | Latencies, values: Values) -> int:
    """How many images a line speaks of: those of its shares, else all."""
    totals = {value.total for value in values.values() if isinstance(value, Proportion)}
    return max(totals) if totals else left.images


def origin(left: Run | Latencies) -> dict[str, Any]:
    """Under which circumstances something was measured."""
    told: dict[str, Any] = {"of": left.images, **{key: left.metadata[key] for key in NOTED if key in left.metadata}}
    if "command" in told:
        told["command"] = brief(told["command"])
    if isinstance(left, Run):
        told |= {"device": left.job["device"], "precision": left.job["precision"], "run": left.key[:12]}
    return told


def read_found(out: Path, name: str) -> Found:
    """The findings of an experiment that a folder holds; none if it holds none."""
    path = out / f"{name}.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: Finding.from_json(found) for key, found in content["findings"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged ({error}); delete it and reproduce again") from error


def keep(experiment: Experiment, found: Found, out: Path) -> Found:
    """Add findings to those that a folder holds, and return all of them.

    Of two findings of one line the one from more images stays, else the newer; lines that are declared no
    more are dropped.
    """
    before = read_found(out, experiment.name)
    best: Found = {}
    for line in experiment.lines:
        known = [finding for finding in (found.get(line.key), before.get(line.key)) if finding is not None]
        if known:
            # Of equals the first, which is the newer. A class or a bucket counts by the images of its whole run.
            best[line.key] = max(known, key=lambda finding: finding.origin.get("of", finding.images))
    if best:
        rows = {key: finding.to_json() for key, finding in best.items()}
        content = {"experiment": experiment.name, "paper": experiment.paper, "findings": rows}
        with whole_file(out / f"{experiment.name}.json") as part:
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return best
