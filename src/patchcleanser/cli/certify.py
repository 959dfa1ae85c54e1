"""patchcleanser certify: a dataset, one threat or a sweep of them; stops and goes on at will."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import (
    PATCH,
    Address,
    AsJson,
    Batch,
    Confirm,
    Cpus,
    Data,
    DefenseNames,
    Device,
    Gpus,
    Grid,
    Images,
    Labels,
    Limit,
    Model,
    On,
    Options,
    Patches,
    Place,
    Precision,
    Root,
    RunFolder,
    Seed,
    Split,
    Stride,
    Subset,
    Threshold,
    TrustCode,
    Unreadable,
    Workers,
    checked_run,
    default_folder,
    defense_options,
    pair_if,
    require_outside,
    slug,
    threat_of,
)

if TYPE_CHECKING:
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.workloads import BatchWorkload, Progress, Runner
    from patchcleanser.records.run import Run

LINES_APART = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def certify(
    model: Model = "zoo:tiny",
    data: Data = "sample",
    patch: Annotated[str, typer.Option(help="Threat: 32, 2%, 12x83, any:1%; a comma list sweeps.")] = PATCH,
    patches: Patches = 1,
    masks: Annotated[str | None, typer.Option(help="Masks per axis: 6, or 6x4; a comma list sweeps.")] = None,
    stride: Stride = None,
    grid: Grid = None,
    defense: Annotated[str, typer.Option(help=f"{DefenseNames}; a comma list sweeps.")] = "double-masking",
    threshold: Threshold = None,
    option: Options = None,
    table: Annotated[
        bool, typer.Option("--table", help="Keep every two-mask label: maps and smaller patches follow without model.")
    ] = False,
    limit: Limit = None,
    subset: Subset = "random",
    split: Split = None,
    root: Root = None,
    labels: Labels = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "exact",
    confirm: Confirm = "sampled",
    unreadable: Unreadable = "stop",
    batch: Batch = None,
    out: RunFolder = None,
    on: On = "here",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = 0,
    cpus: Cpus = 1,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Certify images with known labels, keep a row for each, and say what share no patch can change."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.workloads import CertifyWorkload

    skip, options = checked_run(batch, unreadable), defense_options(defense, threshold, option)
    require_outside(out, data)
    place = Place(on, address, workers, gpus, cpus)
    load = partial(load_classifier, model, trust_code=trust_code)
    classifier = load(device=place.device(device))
    dataset = Images(data, split, root, labels, limit, subset, seed).load(classifier, quiet=as_json)
    jobs = [
        Job(
            classifier,
            dataset,
            threat_of(size, patches, grid),
            defense=kind,
            masks=pair_if(count, "masks"),
            stride=pair_if(stride, "stride"),
            precision=precision,  # type: ignore[arg-type]  # checked by the defense
            table=table,
            confirm=confirm,  # type: ignore[arg-type]  # checked by the defense
            options=options[kind],
        )
        for size, count, kind in product(patch.split(","), masks.split(",") if masks else [None], options)
    ]
    metadata = about_run(model, data, split, jobs[0])
    with place.runner(load) as runner:
        # All of them are checked before hours are spent on the first.
        planned = [(job, runner.begin(CertifyWorkload(job, skip))) for job in jobs]
        results = [
            run_job(job, folder, metadata, batch=batch, skip=skip, quiet=as_json, runner=runner)
            for job, folder in _folders(planned, out, model, data)
        ]
    tell(results, as_json=as_json, below=out)


def about_run(model: str, data: str, split: str | None, job: Job) -> dict[str, Any]:
    """What a manifest says besides the job itself."""
    from patchcleanser.data.catalog import NAMED
    from patchcleanser.records.provenance import origin

    return {
        "model": model,
        "data": data,
        "split": split or ("test" if data in NAMED else None),
        "classes": list(job.dataset.classes) or list(job.classifier.names or ()),
        "model_classes": list(job.classifier.names or ()),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **origin(),
    }


def _folders(
    planned: list[tuple[Job, dict[str, Any]]], out: Path | None, model: str, data: str
) -> Iterator[tuple[Job, Path]]:
    """A folder for each job with its identity, each job once, however often it was asked for."""
    from patchcleanser.records.provenance import key_of

    for job, identity in {key_of(identity): (job, identity) for job, identity in planned}.values():
        threat = f"{job.threat.count}of{job.threat.shape}" if job.threat.count > 1 else str(job.threat.shape)
        name = f"{threat}-{_plan(job, identity)}-{job.defense}"
        if out is None:
            yield job, default_folder(f"{model}-{data}-{name}", identity)
        else:
            yield job, out if len(planned) == 1 else out / slug(name)


def _plan(job: Job, identity: dict[str, Any]) -> str:
    if not job.has_masks:
        return "-".join(f"{name}{value}" for name, value in sorted(job.options.items())) or "default"
    return "x".join(map(str, identity["masks"] or identity["stride"]))


def run_job(
    job: Job,
    folder: Path,
    metadata: dict[str, Any],
    *,
    batch: int | None,
    skip: bool,
    quiet: bool,
    runner: Runner | None = None,
) -> Run:
    """One job with its progress on standard error."""
    from patchcleanser.evaluation.workloads import CertifyWorkload

    masks = f"{_plan(job, job.identity)} masks, " if job.has_masks else ""
    work, words = CertifyWorkload(job, skip), f"{job.threat}, {masks}{job.defense}"
    return run_work(work, words, folder, metadata, batch=batch, quiet=quiet, runner=runner)


def run_work(
    work: BatchWorkload[Any],
    words: str,
    folder: Path,
    metadata: dict[str, Any],
    *,
    batch: int | None,
    quiet: bool,
    runner: Runner | None,
) -> Run:
    """All batches of a work with their progress on standard error."""
    from patchcleanser.cli.progress import progress
    from patchcleanser.evaluation.workloads import run_workload

    if not quiet:
        _say_continued(folder, work.identity)
    with progress(words, quiet=quiet) as report:
        return run_workload(work, folder, batch=batch, metadata=metadata, on_progress=_watcher(report), runner=runner)


def _say_continued(folder: Path, identity: Mapping[str, Any]) -> None:
    """How much of a run is done, if it was begun before; another job's is about to be refused."""
    from patchcleanser.records.provenance import MANIFEST
    from patchcleanser.records.run import Run

    if not (folder / MANIFEST).is_file():
        return
    run = Run.open(folder)
    elsewhere = {"device": "", "precision": ""}  # Ray's workers may have others than this machine
    if {**run.job, **elsewhere} == {**identity, **elsewhere}:
        done = run.images - sum(len(run.indices(batch)) for batch in run.missing())
        print(f"{folder}: {done} of {run.images} images are already done", file=sys.stderr)


def _watcher(report: Callable[[int, int, str], None]) -> Callable[[Progress], None]:
    """Says rate, remaining time and accuracies; on a terminal always, elsewhere now and then."""
    started = time.monotonic()
    said = [started]

    def on_progress(state: Progress) -> None:
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

    return on_progress


def tell(runs: list[Run], *, as_json: bool, more: dict[str, Any] | None = None, below: Path | None = None) -> None:
    """What the runs show, in words or as JSON; `more` is what there is besides, a report among it or not."""
    from patchcleanser.records.metrics import COLUMNS, summary

    found = [(run, summary(run.read(COLUMNS))) for run in runs]
    if as_json:
        rows = [{"run": str(run.folder), "job": run.job, **run.integrity, **result.to_json()} for run, result in found]
        print(json.dumps({**rows[0], **(more or {})} if len(rows) == 1 else rows, indent=1))
        return
    for run, result in found:
        print(f"\n{run.threat}, {_masks(run)}{run.job['defense']}: {result.images} images")
        for name, share in result.shares.items():
            print(f"  {name.replace('_', ' '):20} {share.with_interval()}")
        if run.job["precision"] == "fast":
            print(f"  {_fast(run)}")
        if result.skipped:
            print(f"  {'skipped':20} {result.skipped:6}    reasons are in the rows and in the report")
        print(f"  rows in {run.folder}")
    if more and "report" in more:
        return
    where = [str(below)] if below is not None else [str(run.folder) for run in runs]
    print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', *where])}")


def _fast(run: Run) -> str:
    """What half precision cost, and how sure its labels are."""
    from pyarrow import compute

    from patchcleanser.engine.fast.calibration import MIN_IMAGES

    rows = run.read(["classifications", "rechecked", "flipped", "audited", "caught"])
    labels, again, wrong, audited, caught = (compute.sum(rows[name]).as_py() or 0 for name in rows.column_names)
    text = f"fast labels: {again:,} of {labels:,} computed again in float32 ({wrong:,} changed); "
    if audited:
        outcome = (
            f"{caught:,} {'was' if caught == 1 else 'were'} wrong (all of their batch was then computed in float32)"
        )
        text += f"of {audited:,} audited ones {outcome if caught else 'none was wrong'}"
    else:
        why = "" if run.statistical else f" (fewer than {MIN_IMAGES} images are computed in float32 throughout)"
        text += f"none was audited{why}"
    return text + (f"; {run.statistical}" if run.statistical else "")


def _masks(run: Run) -> str:
    """How many masks there were, if any; families of shapes have more than the number per axis says."""
    from pyarrow import compute

    numbers = (
        compute.list_value_length(run.read(["one_mask_labels"])["one_mask_labels"]).drop_null().unique().to_pylist()
    )
    if not numbers and run.job["masks"] is None and run.job["stride"] is None:
        return ""
    many = f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else f"{max(numbers, default=0)}"
    return f"{many} masks, "
