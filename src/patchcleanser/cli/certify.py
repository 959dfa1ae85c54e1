"""patchcleanser certify: a dataset, one threat or a sweep of them; stops and goes on at will."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import (
    AsJson,
    Data,
    Device,
    Grid,
    Limit,
    Model,
    Patches,
    Precision,
    Root,
    Seed,
    Split,
    Stride,
    pair,
    threat_of,
)
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.core.records import Run
    from patchcleanser.evaluation import Job
    from patchcleanser.running.local import Progress

LINES_APART = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def certify(
    model: Model = "zoo:tiny",
    data: Data = "sample",
    patch: Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1%; a comma list sweeps.")] = "5",
    patches: Patches = 1,
    masks: Annotated[str | None, typer.Option(help="Masks per axis: 6, or 6x4; a comma list sweeps.")] = None,
    stride: Stride = None,
    grid: Grid = None,
    defense: Annotated[
        str, typer.Option(help="double-masking, challenger-masking or minority-reports; a comma list sweeps.")
    ] = "double-masking",
    threshold: Annotated[float | None, typer.Option(help="Confidence threshold of minority-reports.")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Keep every two-mask label: maps and smaller patches follow without model.")
    ] = False,
    limit: Limit = None,
    subset: Annotated[str, typer.Option(help="With --limit: random, first, or authors (as the authors chose).")] = (
        "random"
    ),
    split: Split = "test",
    root: Root = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "exact",
    unreadable: Annotated[str, typer.Option(help="An image that cannot be read: stop, or skip (and count).")] = "stop",
    batch: Annotated[int | None, typer.Option(help="Images kept at a time; a stop loses at most one batch.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default one in runs/, named after the job.")] = None,
    as_json: AsJson = False,
) -> None:
    """Certify images with known labels, keep a row for each, and say what share no patch can change."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.data import chosen, load_dataset
    from patchcleanser.evaluation import Job

    if unreadable not in ("stop", "skip"):
        raise InputError(f"--unreadable is stop or skip, got {unreadable!r}")
    if batch is not None and batch < 1:
        raise InputError(f"--batch is at least 1 image, got {batch}")
    dataset = chosen(load_dataset(data, split=split, root=root), limit, seed=seed, subset=subset)
    first = Job(
        load_classifier(model, device=device),
        dataset,
        threat_of(patch.split(",")[0], patches, grid),
        precision=precision,  # type: ignore[arg-type]  # checked by the defense
        stride=pair(stride, "stride"),
        table=table,
    )
    jobs = [
        replace(
            first,
            threat=threat_of(size, patches, grid),
            masks=pair(count, "masks"),
            defense=kind,
            options=_options(kind, threshold),
        )
        for size, count, kind in product(patch.split(","), (masks.split(",") if masks else [None]), defense.split(","))
    ]
    about = about_run(model, data, split, first)
    # Folders are named, and so all jobs checked, before hours are spent on the first.
    work = list(_folders(jobs, out, model, data))
    skip = unreadable == "skip"
    results = [run_job(job, folder, about, batch=batch, skip=skip, quiet=as_json) for job, folder in work]
    tell(results, as_json=as_json)


def _options(defense: str, threshold: float | None) -> dict[str, float]:
    return {"threshold": threshold} if threshold is not None and defense == "minority-reports" else {}


def about_run(model: str, data: str, split: str, job: Job) -> dict[str, Any]:
    """What a manifest says besides the job itself."""
    from patchcleanser.training.cards import origin

    classes = list(job.dataset.classes) or list(job.classifier.names or ())
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"model": model, "data": data, "split": split, "classes": classes, "created": created, **origin()}


def _folders(jobs: list[Job], out: Path | None, model: str, data: str) -> Iterator[tuple[Job, Path]]:
    """A folder for each job; without --out its name carries the job's key, so the same command goes on."""
    from patchcleanser.core.records import key_of

    for job in jobs:
        plan = "x".join(map(str, job.identity["masks"] or job.identity["stride"]))
        threat = f"{job.threat.count}of{job.threat.shape}" if job.threat.count > 1 else str(job.threat.shape)
        name = f"{threat}-{plan}-{job.defense}"
        if out is None:
            yield job, Path("runs") / _slug(f"{model}-{data}-{name}-{key_of(job.identity)[:8]}")
        else:
            yield job, out if len(jobs) == 1 else out / _slug(name)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._%-]+", "-", text.replace("%", "pct")).strip("-.")


def run_job(job: Job, folder: Path, about: dict[str, Any], *, batch: int | None, skip: bool, quiet: bool) -> Run:
    """One job with its progress on standard error."""
    from patchcleanser.cli.progress import progress
    from patchcleanser.running import evaluate

    with progress(f"{job.threat}", quiet=quiet) as report:
        watch = _watcher(report)
        return evaluate(job, folder, batch=batch, skip=skip, about=about, watch=watch)


def _watcher(report: Callable[[int, int, str], None]) -> Callable[[Progress], None]:
    """Says rate, remaining time and accuracies; on a terminal always, elsewhere now and then."""
    started = time.monotonic()
    said = [started]

    def watch(state: Progress) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() and now - said[0] < LINES_APART and state.done < state.total:
            return
        said[0] = now
        rate = state.here / max(now - started, 1e-9)
        left = time.strftime("%H:%M:%S", time.gmtime((state.total - state.done) / max(rate, 1e-9)))
        shares = "  ".join(
            f"{name.replace('_', ' ')} {share.percent:.1f}%" for name, share in state.summary.shares.items()
        )
        skipped = f"  skipped {state.summary.skipped}" if state.summary.skipped else ""
        report(state.done, state.total, f"{shares}{skipped}  {rate:.2f} images/s  {left} left")

    return watch


def tell(runs: list[Run], *, as_json: bool, more: dict[str, Any] | None = None) -> None:
    """What the runs show, in words or as JSON (with `more` beside it)."""
    from patchcleanser.core.metrics import COLUMNS, summary

    found = [(run, summary(run.read(COLUMNS))) for run in runs]
    if as_json:
        rows = [{"run": str(run.folder), "job": run.job, **result.to_json()} for run, result in found]
        print(json.dumps({**rows[0], **(more or {})} if len(rows) == 1 else rows, indent=1))
        return
    for run, result in found:
        plan = "x".join(map(str, run.job["masks"] or run.job["stride"]))
        print(f"\n{run.threat}, {plan} masks, {run.job['defense']}: {result.images} images")
        for name, share in result.shares.items():
            low, high = share.interval
            print(f"  {name.replace('_', ' '):20} {share.percent:6.2f}%   95%: {low:.1f} to {high:.1f}")
        if result.skipped:
            print(f"  {'skipped':20} {result.skipped:6}    reasons are in the rows and in the report")
        print(f"  rows in {run.folder}")
    where = " ".join(str(run.folder) for run in runs)
    print(f"\nfor a report: patchcleanser report {where}")
