"""patchcleanser certify --task detect: certify the objects of images, each by itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from patchcleanser.cli.config import call
from patchcleanser.cli.options import RunOptions, default_folder, slug
from patchcleanser.cli.progress import LOGGER, shown
from patchcleanser.core.counts import counted
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation.detect_jobs import DetectJob
    from patchcleanser.records.run import Run

SETTINGS = ("score", "masked_score", "prune")
"""What --option may set."""


def certify_objects(
    options: RunOptions, texts: Sequence[str], *, lines: int, unused: Mapping[str, bool], as_json: bool
) -> None:
    """Certify the objects of a dataset against each patch of --patch, and print what share of them stays in sight."""
    from patchcleanser.evaluation import evaluate

    _refuse(options, unused)
    jobs = _jobs(options, texts, lines)
    for job in jobs:
        job.check(skip=options.skip)
    settings = {"batch": options.batch, "skip": options.skip, "metadata": call().metadata(), "progress": shown()}
    runs = [evaluate(job, _folder(options, job, several=len(jobs) > 1), **settings) for job in jobs]  # type: ignore[arg-type]
    print_objects(runs, as_json=as_json)
    if not as_json:
        print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', *(str(run.folder) for run in runs)])}")


def _refuse(options: RunOptions, unused: Mapping[str, bool]) -> None:
    """InputError for options that mean nothing for a detector."""
    plain = RunOptions()
    names = ("patches", "grid", "defense", "coarse", "threshold", "precision", "split", "labels")
    given = [f"--{name}" for name in names if getattr(options, name) != getattr(plain, name)]
    given += [name for name, used in unused.items() if used]
    if given:
        raise InputError(f"--task detect does not take {', '.join(given)}; leave these out")


def _jobs(options: RunOptions, texts: Sequence[str], lines: int) -> list[DetectJob]:
    """A job for each patch of a comma list."""
    from patchcleanser.data.object_sets import load_objects
    from patchcleanser.detectors import load_detector
    from patchcleanser.evaluation.detect_jobs import DetectJob

    detector = load_detector(options.model, device=options.device)
    objects = load_objects(options.data, root=options.root)
    dataset, missing = objects.renumbered(detector.classes)
    dataset = dataset.chosen(options.limit, seed=options.seed, subset=options.subset)
    if missing:
        LOGGER.info(f"objects of {counted(len(missing), 'class')} are left out: {', '.join(missing[:5])}")
    sides = options.mask_set_options
    patches = [Threat.parse(patch) for patch in dict.fromkeys(options.patch.split(","))]
    job = DetectJob(detector, dataset, patches[0], sides["masks"], sides["stride"], lines, spec=options.model)
    job = replace(job, **_thresholds(texts))  # type: ignore[arg-type]  # numbers only
    return [replace(job, threat=patch) for patch in patches]


def _thresholds(texts: Sequence[str]) -> dict[str, float]:
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not equals or name not in SETTINGS:
                raise ValueError
            values[name] = float(value)
        except ValueError as error:
            raise InputError(f"--option takes {', '.join(SETTINGS)} as name=number, got {text!r}") from error
    return values


def _folder(options: RunOptions, job: DetectJob, *, several: bool) -> Path:
    """Where the rows go: --out, or a folder in it for each patch; by default a name of the job's own."""
    if options.out:
        return options.out / slug(str(job.threat.shape)) if several else options.out
    return default_folder(f"{options.model}-{options.data}-{job.threat.shape}", job.identity)


def print_objects(runs: Sequence[Run], *, as_json: bool) -> None:
    """Print the shares of objects of runs as text, or as JSON."""
    results = [(run, run.summary()) for run in runs]
    if as_json:
        rows = [{"run": str(run.folder), "job": run.job, **run.integrity, **r.to_json()} for run, r in results]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1))
        return
    for run, result in results:
        objects = result.shares["undefended"].total
        print(
            f"\n{run.threat}: {counted(objects, 'object')} in {counted(result.images, 'image')}, half of each covered"
        )
        for name, share in result.shares.items():
            text = share.with_interval() if share.total else "   no such placement"
            print(f"  {name.replace('_', ' '):20} {text}")
        if result.skipped:
            print(f"  {'skipped':20} {result.skipped:6}    reasons are in the rows and in the report")
        print(f"  rows in {run.folder}")
