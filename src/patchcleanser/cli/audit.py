"""patchcleanser audit: check a finished run against the reference implementation, and attack its certificates."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from patchcleanser.cli.options import AsJson, Root, RunnerOptions, Seed, TrustCode
from patchcleanser.core.counts import counted
from patchcleanser.errors import ContradictionError, InputError, RecordError

if TYPE_CHECKING:
    from patchcleanser.classifiers import Classifier
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.audit import Audit, AuditWorkload
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
    from patchcleanser.records.run import Run

MAX_LINES = 10
"""Contradictions that are printed; the file has all of them."""


def audit(
    cluster: RunnerOptions,
    run: Annotated[Path, typer.Argument(help="A finished run of certify.")],
    sample: Annotated[int, typer.Option(help="Rows to derive again, one masked image at a time.")] = 50,
    attack: Annotated[int, typer.Option(help="Certified images to attack, knowing the defense.")] = 10,
    iterations: Annotated[int, typer.Option(help="Steps of the attack.")] = 50,
    locations: Annotated[int, typer.Option(help="Places tried for each image, the weakest first.")] = 2,
    seed: Seed = 0,
    model: Annotated[str | None, typer.Option(help="The model, if it is not where the run says.")] = None,
    data: Annotated[str | None, typer.Option(help="The data, if they are not where the run says.")] = None,
    root: Root = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default what the run was made on.")] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Derive rows again with a slow reference, attack certified images, and fail on any contradiction."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.progress import progress
    from patchcleanser.evaluation.audit import audit as audit_run
    from patchcleanser.evaluation.audit import write_audit
    from patchcleanser.records.run import Run

    if sample < 0 or attack < 0 or sample + attack < 1:
        raise InputError(
            f"--sample and --attack are 0 or more, one of them at least 1; got --sample {sample} --attack {attack}"
        )
    stored = Run.open(run)
    from_model, from_data = _named(stored, "model", model), _named(stored, "data", data)
    here = cluster.device(device or ("auto" if cluster.on == "ray" else stored.job["device"]))
    load = partial(load_classifier, from_model.name, trust_code=trust_code, named_by=from_model.file)
    places: dict[str, Any] = {"root": root, "trust_code": trust_code, "named_by": from_data.file}
    job, workload = _job(stored, load(device=here), from_data.name, places)
    settings = AttackSettings(iterations=iterations, locations=locations, seed=seed)
    counts = {"sample": sample, "attack": attack}
    with cluster.start(load) as runner, progress("audit") as show:
        result = audit_run(stored, job, **counts, settings=settings, on_progress=show, runner=runner, workload=workload)
    path = write_audit(result, stored, settings, **counts)
    if as_json:
        print(json.dumps({"run": str(run), **stored.integrity, **result.to_dict()}, indent=1, ensure_ascii=False))
    else:
        _print_audit(result, stored, path)
    if result.contradictions:
        raise ContradictionError(
            f"{counted(len(result.contradictions), 'contradiction')} in {run}; {path} has all it takes to repeat them; "
            f"the same audit: patchcleanser audit {run} --sample {sample} --attack {attack} --iterations {iterations} "
            f"--locations {locations} --seed {seed}"
        )


class NamedSource(NamedTuple):
    """What loads a model or data, and the file that says so; None if it was typed."""

    name: str
    file: Path | None


def _named(run: Run, what: str, typed: str | None) -> NamedSource:
    """The model or the data: as typed, or as the run says."""
    from patchcleanser.records.provenance import MANIFEST

    if typed is not None:
        return NamedSource(typed, None)
    if what not in run.metadata:
        raise InputError(f"{run.folder} does not say its {what}; name it with --{what}")
    name = run.metadata[what]
    if not isinstance(name, str):
        raise RecordError(f"{run.folder / MANIFEST} is damaged: its {what} is not a name; name it with --{what}")
    return NamedSource(name, run.folder / MANIFEST)


def _job(
    run: Run, classifier: Classifier, data: str, places: Mapping[str, Any]
) -> tuple[Job | MultiLabelJob, type[AuditWorkload]]:
    """The job of a run with its model and images, and how its rows are checked."""
    from patchcleanser.data import load_dataset
    from patchcleanser.data.multilabel_sets import load_multilabel
    from patchcleanser.evaluation.audit import AuditWorkload, audited_job
    from patchcleanser.evaluation.multilabel_audit import MultiLabelAudit, audited_labels

    if run.kind == "multilabel":
        return audited_labels(run, classifier, load_multilabel(data, **places)), MultiLabelAudit
    dataset = load_dataset(data, split=run.metadata.get("split") or "test", **places)
    return audited_job(run, classifier, dataset), AuditWorkload


def _print_audit(result: Audit, run: Run, path: Path) -> None:
    print(f"{run.threat}, {run.job['defense']}: {counted(result.rows, 'row')}, none contradicts itself")
    print(f"  run digest {run.digest}")
    labels = counted(result.labels, "classification")
    print(f"  {len(result.derived)} derived again, one masked image at a time ({labels})")
    fooled = sum("patches" in entry for entry in result.contradictions)
    print(f"  {counted(len(result.attacked), 'certified image')} attacked, {fooled} fooled")
    print(f"  {len(result.near_ties)} images or labels near a tie, where rounding decides")
    for note in result.notes:
        print(f"  note: {note}")
    for entry in result.contradictions[:MAX_LINES]:
        image = f"image {entry['index']} ({entry['id']}, label {entry['label']})"
        print(f"  CONTRADICTION {image}: {entry['what']}: stored {entry['stored']}, found {entry['found']}")
    print(f"  {'no contradiction' if not result.contradictions else 'FAILED'}; all of it, signed, in {path}")
    if run.kind == "certify":
        print(f"  {shlex.join(['patchcleanser', 'report', str(run.folder)])} shows it")
