"""patchcleanser certify --task multilabel: certify images that show several classes each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchcleanser.cli.config import call
from patchcleanser.cli.options import RunnerOptions, RunOptions, default_folder, slug
from patchcleanser.cli.progress import LOGGER, shown
from patchcleanser.core.counts import counted
from patchcleanser.errors import ContradictionError, InputError
from patchcleanser.records.metrics import BOUNDS, certificates_beaten

if TYPE_CHECKING:
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
    from patchcleanser.records.run import Run

TITLES = {
    "undefended": "undefended, clean",
    "clean": "defended, clean",
    "certified": "certified",
    "one_mask": "bound by one mask",
    "each_class": "bound by each class",
}
"""What the rows count."""


def certify_labels(
    options: RunOptions, texts: Sequence[str], *, unused: Mapping[str, bool], dry_run: bool, as_json: bool
) -> None:
    """Certify the classes of images against each patch of --patch, and print precision and recall."""
    from patchcleanser.cli.cost import announce
    from patchcleanser.evaluation import evaluate

    _refuse(options, unused)
    jobs = _jobs(options, texts)
    for job in jobs:
        job.check(skip=options.skip)
    work = [(job, _folder(options, job, several=len(jobs) > 1)) for job in jobs]
    estimates = announce(work, RunnerOptions(), dry_run=dry_run, as_json=as_json)
    if dry_run:
        return
    settings: dict[str, Any] = {"batch": options.batch, "skip": options.skip, "metadata": call().metadata()}
    pairs = zip(work, estimates, strict=True)
    runs = [evaluate(job, to, **settings, progress=shown(), seconds=seconds) for (job, to), seconds in pairs]
    print_labels(runs, as_json=as_json)
    if not as_json:
        print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', *(str(run.folder) for run in runs)])}")


def _refuse(options: RunOptions, unused: Mapping[str, bool]) -> None:
    """InputError for options that mean nothing where several labels may be right."""
    plain = RunOptions()
    names = ("defense", "coarse", "precision", "split", "labels")
    given = [f"--{name}" for name in names if getattr(options, name) != getattr(plain, name)]
    given += [name for name, used in unused.items() if used]
    if given:
        raise InputError(f"--task multilabel does not take {', '.join(given)}; leave these out")


def _jobs(options: RunOptions, texts: Sequence[str]) -> list[MultiLabelJob]:
    """A job for each patch of a comma list."""
    from patchcleanser.data.multilabel_sets import load_multilabel
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob

    named_by = call().named_by("data")
    images = load_multilabel(options.data, root=options.root, trust_code=options.trust_code, named_by=named_by)
    dataset = images.chosen(options.limit, seed=options.seed, subset=options.subset)
    patches = [replace(options, patch=patch).threat for patch in dict.fromkeys(options.patch.split(","))]
    fields = {**options.mask_set_options, "threshold": options.threshold, **_scores(texts)}
    job = MultiLabelJob.matched(options.loader(device=options.device), dataset, patches[0], **fields)
    left_out = [name for name in dataset.classes if name not in job.dataset.classes]
    if len(job.dataset.classes) < len(dataset.classes):
        LOGGER.info(f"{counted(len(dataset.classes) - len(job.dataset.classes), 'class')} left out: {left_out[:5]}")
    return [replace(job, threat=patch) for patch in patches]


def attack_labels(options: RunOptions, settings: AttackSettings, *, unused: Mapping[str, bool], as_json: bool) -> None:
    """Attack single classes of images, and count those that are turned around. Certified ones must not be."""
    from patchcleanser.evaluation import evaluate
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelAttackJob

    _refuse(options, unused)
    if "," in options.patch:
        raise InputError(f"attack takes one --patch, got {options.patch!r}")
    job = MultiLabelAttackJob(_jobs(options, ())[0], settings)
    job.job.check(skip=options.skip)
    name = f"{options.model}-{options.data}-{job.job.threat.shape}-classes"
    folder = options.out or default_folder(name, job.identity)
    run = evaluate(job, folder, batch=options.batch, skip=options.skip, metadata=call().metadata(), progress=shown())
    print_attacked(run, as_json=as_json)


def print_attacked(run: Run, *, as_json: bool) -> None:
    """Print what an attack on classes did. ContradictionError if a certificate was refuted."""
    result, beaten = run.summary(), certificates_beaten(run.read())
    if as_json:
        content = {"run": str(run.folder), "job": run.job, **run.integrity, **result.to_json()}
        print(json.dumps({**content, "certificates_beaten": len(beaten)}, indent=1))
    else:
        classes = counted(result.shares["robust"].total, "class")
        print(f"\n{run.threat}: {classes} attacked in {counted(result.images, 'image')}, right under attack")
        for name, share in result.shares.items():
            text = share.with_interval() if share.total else "   none was attacked"
            print(f"  {name.replace('_', ' '):36} {text}")
        print(f"  {'images that beat their certificate':36} {len(beaten):6}    (must be 0)")
        print(f"  rows in {run.folder}")
    if len(beaten):
        names = ", ".join(beaten["id"].to_pylist()[:5])
        raise ContradictionError(f"certificates of {counted(len(beaten), 'image')} were refuted ({names})")


def _scores(texts: Sequence[str]) -> dict[str, str]:
    """What --option scores=… says."""
    for text in texts:
        if text not in ("scores=logits", "scores=probabilities"):
            raise InputError(f"--option takes scores=logits or scores=probabilities, got {text!r}")
    return {"scores": texts[-1].partition("=")[2]} if texts else {}


def _folder(options: RunOptions, job: MultiLabelJob, *, several: bool) -> Path:
    """Where the rows go: --out, or a folder in it for each patch; by default a name of the job's own."""
    if options.out:
        return options.out / slug(str(job.threat.shape)) if several else options.out
    return default_folder(f"{options.model}-{options.data}-{job.threat.shape}", job.identity)


def print_labels(runs: Sequence[Run], *, as_json: bool) -> None:
    """Print precision and recall of runs as text, or as JSON."""
    results = [(run, run.summary()) for run in runs]
    if as_json:
        rows = [{"run": str(run.folder), "job": run.job, **run.integrity, **r.to_json()} for run, r in results]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1))
        return
    for run, result in results:
        thresholds = {f"{share:g}" for share in run.job["options"]["threshold"]}
        threshold = f"threshold {thresholds.pop()}" if len(thresholds) == 1 else "a threshold for each class"
        classes = counted(len(run.metadata["classes"]), "class")
        print(f"\n{run.threat}: {counted(result.images, 'image')}, {classes}, {threshold}")
        print(f"  {'':20} precision   recall")
        for bound in BOUNDS:
            precision, recall = result.shares[f"{bound}_precision"], result.shares[f"{bound}_recall"]
            print(f"  {TITLES[bound]:20} {precision.percent:8.2f}% {recall.percent:7.2f}%")
        if result.skipped:
            print(f"  {'skipped':20} {result.skipped:6}    reasons are in the rows and in the report")
        print(f"  rows in {run.folder}")
