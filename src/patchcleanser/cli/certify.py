"""patchcleanser certify: certify a dataset against one threat, or sweep several."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.config import call
from patchcleanser.cli.multilabel import MultiLabelTask
from patchcleanser.cli.objects import DetectTask
from patchcleanser.cli.options import AsJson, Option, RunnerOptions, RunOptions, default_folder, keeping, slug
from patchcleanser.cli.tasks import CertifyTask
from patchcleanser.core.counts import counted
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.dataset_jobs import DatasetJob
    from patchcleanser.records.metrics import Summary
    from patchcleanser.records.run import Run


def certify(
    options: RunOptions,
    cluster: RunnerOptions,
    option: Option = None,
    table: Annotated[bool, typer.Option("--table", help="Keep every two-mask label, to derive more later.")] = False,
    confirm: Annotated[
        str,
        typer.Option(
            help="With --precision fast: all computes every label of a certified image again in float32, so that its "
            "certificate is a proof; sampled leaves certificates statistical."
        ),
    ] = "sampled",
    task: Annotated[
        str,
        typer.Option(
            help="classify; multilabel: several labels may be right; or detect: certify the objects that a detector "
            "sees, each by itself."
        ),
    ] = "classify",
    lines: Annotated[
        int, typer.Option(help="With --task detect: also mask both sides of this many rows and columns. 0 is none.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it will cost; nothing is written. Not with --task detect.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Certify images with known labels, keep a row for each, and say what share no patch can change.

    A comma list of --patch, --masks or --defense makes a sweep: one run for each combination.
    """
    flags = {"table": table, "confirm": confirm != "sampled", "lines": lines != 0, "dry-run": dry_run}
    work = TASKS[task](options, cluster, option or [], table, confirm, lines)
    work.refuse({**flags, "on": cluster.on != "here"})
    from patchcleanser.cli.progress import shown

    runs = _evaluated(work, dry_run=dry_run, as_json=as_json)
    if dry_run:
        return
    print_runs(runs, TASKS[task], as_json=as_json)
    if not as_json and shown():
        folders = [options.out] if options.out else [run.folder for run in runs]
        print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', *map(str, folders)])}")


def _evaluated(task: CertifyTask, *, dry_run: bool, as_json: bool) -> list[Run]:
    """Say what the jobs of a task cost, and run them; none with `dry_run`."""
    from patchcleanser.cli.cost import announce
    from patchcleanser.cli.progress import shown, waiting
    from patchcleanser.evaluation import evaluate
    from patchcleanser.records.leftovers import RUNS_BELOW, require_free
    from patchcleanser.records.provenance import key_of
    from patchcleanser.records.run import Run

    options, jobs = task.options, task.jobs()
    settings: dict[str, Any] = {"batch": options.batch, "skip": options.skip, "metadata": call().metadata()}
    if options.out and len(jobs) > 1:
        require_free(options.out, ours=RUNS_BELOW)
    with task.cluster.start(options.loader) as runner:
        # All jobs are checked before hours are spent on the first. A job that was given twice runs once.
        with waiting("checking the masks"):
            identities = [runner.begin(job.workload(skip=options.skip)) for job in jobs]
        unique = {key_of(identity): (job, identity) for job, identity in zip(jobs, identities, strict=True)}
        work: list[tuple[Any, Path]] = [
            (job, _folder(task, job, identity, several=len(jobs) > 1)) for job, identity in unique.values()
        ]
        for (_, folder), (_, identity) in zip(work, unique.values(), strict=True):
            Run.found(folder, identity)  # raises before anything is timed, if the folder is not for this job
        with keeping(folder for _, folder in work):
            seconds: list[float | None] = [None] * len(work)
            if task.timed:
                seconds = announce(work, task.cluster, batch=options.batch, dry_run=dry_run, as_json=as_json)
            pairs = [] if dry_run else zip(work, seconds, strict=True)
            return [
                evaluate(job, folder, **settings, progress=shown(), seconds=most, runner=runner)
                for (job, folder), most in pairs
            ]


def _folder(task: CertifyTask, job: DatasetJob, identity: Mapping[str, Any], *, several: bool) -> Path:
    """Where the rows go: --out, or a folder in it for each of several runs; by default a name of the job's own."""
    options, name = task.options, task.job_name(job)
    if options.out:
        return options.out / slug(name) if several else options.out
    return default_folder(f"{options.model}-{options.data}-{name}", identity)


class ClassifyTask(CertifyTask):
    """One label for each image: the share of images that no patch can change."""

    name = "classify"

    def jobs(self) -> list[Job]:
        options, confirm = self.options, self.confirm
        if self.lines:
            raise InputError(f"--lines belongs to --task detect, got --lines {self.lines}")
        if confirm != "sampled" and options.precision != "fast":
            raise InputError("--confirm belongs to --precision fast; exact labels need no confirmation")
        by_defense = options.of_defenses(list(self.texts))
        classifier = options.loader(device=self.cluster.device(options.device))
        dataset = options.images(classifier)
        sweep = product(options.patch.split(","), options.masks.split(",") if options.masks else [None], by_defense)
        points = [replace(options, patch=patch, masks=masks, defense=defense) for patch, masks, defense in sweep]
        return [
            point.job(classifier, dataset, table=self.table, confirm=confirm, options=by_defense[point.defense])
            for point in points
        ]

    def job_name(self, job: Job) -> str:
        """Threat, masks (or options) and defense."""
        threat = f"{job.threat.count}of{job.threat.shape}" if job.threat.count > 1 else str(job.threat.shape)
        options = "-".join(f"{name}{value}" for name, value in sorted(job.options.items())) or "default"
        return f"{threat}-{job.grid if job.has_masks else options}-{job.defense}"

    @staticmethod
    def described(run: Run, result: Summary) -> Iterator[str]:
        coarse = run.job.get("options", {}).get("coarse")
        rounds = f" after a coarse round of {coarse}×{coarse}" if coarse else ""
        yield f"{run.threat}, {_mask_count(run)}{run.job['defense']}{rounds}: {counted(result.images, 'image')}"
        for name, share in result.shares.items():
            if name != "row_certified" or share != result.shares.get("certified"):
                yield f"{name.replace('_', ' '):20} {share.with_interval()}"
        if run.job["precision"] == "fast":
            yield _fast_labels(run)


TASKS: dict[str, type[CertifyTask]] = {task.name: task for task in (ClassifyTask, MultiLabelTask, DetectTask)}
"""What --task takes."""


def print_runs(
    runs: Sequence[Run],
    task: type[CertifyTask] = ClassifyTask,
    *,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the shares of runs of certify as text, or as JSON with `more` entries if it is one run."""
    from patchcleanser.cli.progress import blank

    results = [(run, run.summary()) for run in runs]
    if as_json:
        rows = [{"run": str(run.folder), "job": run.job, **run.integrity, **r.to_dict()} for run, r in results]
        print(json.dumps({**rows[0], **(more or {})} if len(rows) == 1 else rows, indent=1))
        return
    for run, result in results:
        headline, *lines = task.described(run, result)
        if result.skipped:
            lines.append(f"{'skipped':20} {result.skipped:6}    reasons are in the rows and in the report")
        print("\n  ".join([f"{blank()}{headline}", *lines, f"rows in {run.folder}"]))


def _fast_labels(run: Run) -> str:
    """How many fast labels were computed again, how many were audited, and what came of it."""
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
        why = "" if run.statistical else f" (runs of fewer than {MIN_IMAGES} images use float32 only)"
        text += f"none was audited{why}"
    return text + (f"; {run.statistical}" if run.statistical else "")


def _mask_count(run: Run) -> str:
    """How many masks each image had, if any. Families of shapes have more than the number per axis says."""
    from pyarrow import compute

    lengths = compute.list_value_length(run.read(["one_mask_labels"])["one_mask_labels"])
    counts = lengths.drop_null().unique().to_pylist()
    if not counts and run.job["masks"] is None and run.job["stride"] is None:
        return ""
    least, most = min(counts, default=0), max(counts, default=0)
    if least < most:
        return f"{least} to {most} masks, "
    down, across = run.job["masks"] or (0, 0)
    return f"{down}×{across} masks ({most}), " if down * across == most else f"{counted(most, 'mask')}, "
