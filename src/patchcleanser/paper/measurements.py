"""Measurements: read from finished runs without a model, and merged into JSON files with those of other machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import compute

from patchcleanser.data.catalog import object_shares
from patchcleanser.errors import DataError, RecordError
from patchcleanser.evaluation.attack_jobs import attack_shares
from patchcleanser.evaluation.timing import Latencies
from patchcleanser.paper.experiments import MASKING, Experiment, Measurement, PaperRow, RunSpec, Values
from patchcleanser.paper.models import PAPER_DATASETS, PaperDataset
from patchcleanser.paper.runners import Missing, Outcome
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.columns import COLUMNS
from patchcleanser.records.derive import detection, verdicts
from patchcleanser.records.metrics import Proportion, per_class, summary
from patchcleanser.records.run import Run
from patchcleanser.reports.wording import shorten_paths


def accuracies(run: Run, variant: str = "") -> Values:
    """Undefended, clean, certified and row-certified accuracy, and the cost per image."""
    totals = summary(run.read(COLUMNS))
    images = max(1, totals.images)
    return {**totals.shares, "classifications": totals.classifications / images, "seconds": totals.seconds / images}


def recovery_defense(run: Run, variant: str) -> Values:
    """Clean accuracy and classifications per image of the recovery defense `variant`, from stored two-mask labels."""
    clean, classifications = verdicts(run, variant)
    certified = summary(run.read(COLUMNS)).shares["certified"]
    return {"clean": clean, "certified": certified, "classifications": classifications}


def minority_reports(run: Run, variant: str) -> Values:
    """Minority Reports at the threshold `variant`, from stored one-mask labels; or double-masking of the same run."""
    if variant == MASKING:
        return accuracies(run)
    (point,) = detection(run, [float(variant)])
    return {"clean": point.clean, "detection_certified": point.detection_certified, "alerts": point.alerts}


def under_attack(run: Run, variant: str = "") -> Values:
    """Accuracy under the attack that was run, and certified accuracy."""
    return {name.replace(" ", "_"): share for name, share in attack_shares(run.read()).items()}


def latency(times: Latencies, variant: str) -> Values:
    """Milliseconds and classifications per image of one defense, or of the undefended classifier."""
    return {"milliseconds": times.milliseconds[variant], "classifications": times.classifications[variant]}


QUANTILES = {
    "least certified class": 0.0,
    "10% of the classes below": 0.1,
    "median class": 0.5,
    "90% of the classes below": 0.9,
    "most certified class": 1.0,
}


def class_quantile(run: Run, variant: str) -> Values:
    """Certified accuracy of the class at a quantile of all classes."""
    shares = sorted((s["certified"] for s in per_class(run.read(COLUMNS)).values()), key=lambda s: s.percent)
    return {"certified": shares[round(QUANTILES[variant] * (len(shares) - 1))]}


def object_size(run: Run, variant: str, shares: dict[str, float]) -> Values:
    """Clean and certified accuracy of the images whose objects cover LOW–HIGH% of the pixels, LOW excluded.

    `shares` maps image ids to the covered share, in [0, 1]; images without boxes do not count.
    """
    low, high = (float(end) / 100 for end in variant.removesuffix("%").split("–"))
    rows = run.read(["id", "label", "answer", "certified", "skipped"])
    rows = rows.filter(compute.is_null(rows["skipped"]))
    covered = np.array([shares.get(name, np.nan) for name in rows["id"].to_pylist()])
    inside = (covered > low) & (covered <= high)
    correct = rows["answer"].to_numpy() == rows["label"].to_numpy()
    certified = rows["certified"].to_numpy(zero_copy_only=False).astype(bool)
    return {
        "clean": Proportion(int(correct[inside].sum()), int(inside.sum())),
        "certified": Proportion(int(certified[inside].sum()), int(inside.sum())),
    }


Outcomes = Mapping[RunSpec, Outcome]
Measurements = dict[str, Measurement]
"""By the key of their row."""


def collect(experiment: Experiment, outcomes: Outcomes, root: Path | None) -> tuple[Measurements, dict[str, str]]:
    """The measurement of each row by its key, and for rows without one the reason."""
    measurements: Measurements = {}
    missing: dict[str, str] = {}
    boxes: dict[RunSpec, dict[str, float]] = {}
    for row in experiment.rows:
        outcome = outcomes.get(row.spec)
        if isinstance(outcome, Missing):
            missing[row.key] = outcome.reason
        elif outcome is not None:
            try:
                if experiment.read_boxed is not None and isinstance(outcome, Run):
                    if row.spec not in boxes:
                        boxes[row.spec] = _object_shares(outcome, PAPER_DATASETS[row.spec.data], root)
                    values = experiment.read_boxed(outcome, row.variant, boxes[row.spec])
                else:
                    values = experiment.read(outcome, row.variant)
                totals = [value.total for value in values.values() if isinstance(value, Proportion)]
                measurement = Measurement(values, max(totals, default=outcome.images), _origin(outcome))
                measurements[row.key] = _with_timing(measurement, row, outcomes)
            except (DataError, RecordError) as error:
                missing[row.key] = str(error)
    return measurements, missing


def _object_shares(run: Run, dataset: PaperDataset, root: Path | None) -> dict[str, float]:
    return object_shares(dataset.name, run.read(["id"])["id"].to_pylist(), dataset.folder(root))


def _with_timing(measurement: Measurement, row: PaperRow, outcomes: Outcomes) -> Measurement:
    """Add the milliseconds that another run measured under the same masks, with its clock and machine load."""
    times = outcomes.get(row.spec.timing)
    if not row.timed or not isinstance(times, Latencies):
        return measurement
    defense = row.variant if row.variant in times.milliseconds else MASKING
    values = {**measurement.values, "milliseconds": times.milliseconds[defense]}
    clock = {key: value for key, value in _origin(times).items() if key in ("clock", "load")}
    return replace(measurement, values=values, origin={**measurement.origin, **clock})


def _origin(outcome: Run | Latencies) -> dict[str, Any]:
    """The circumstances of a run that its measurements keep."""
    keys = ("command", "created", "seed", "versions", "clock", "load")
    facts: dict[str, Any] = {
        "of": outcome.images,
        **{key: outcome.metadata[key] for key in keys if key in outcome.metadata},
    }
    if "command" in facts:
        facts["command"] = shorten_paths(facts["command"])
    if isinstance(outcome, Run):
        facts |= {"device": outcome.job["device"], "precision": outcome.job["precision"], "run": outcome.key[:12]}
    return facts


def read_measurements(folder: Path, name: str) -> Measurements:
    """The measurements of an experiment in a folder; empty if it has none."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: Measurement.from_dict(entry) for key, entry in content["findings"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged ({error}); delete it and reproduce again") from error


def merge_measurements(experiment: Experiment, new: Measurements, folder: Path) -> Measurements:
    """Add measurements to those in a folder, and return all of them.

    Of two measurements of one row the one with more images stays, else the newer. Rows that the experiment no longer
    declares are dropped.
    """
    old = read_measurements(folder, experiment.name)
    best: Measurements = {}
    for row in experiment.rows:
        candidates = [entry for entry in (new.get(row.key), old.get(row.key)) if entry is not None]
        if candidates:
            # Of equals max takes the first, the newer. A class or a bucket counts by the images of its run.
            best[row.key] = max(candidates, key=lambda entry: entry.origin.get("of", entry.images))
    if best:
        findings = {key: entry.to_dict() for key, entry in best.items()}
        content = {"experiment": experiment.name, "paper": experiment.paper, "findings": findings}
        with whole_file(folder / f"{experiment.name}.json") as part:
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return best
