"""patchcleanser audit: check a finished run against the reference implementation, and attack its certificates."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import AsJson, Root, RunnerOptions, Seed, TrustCode
from patchcleanser.core.counts import counted
from patchcleanser.errors import ContradictionError, InputError, RecordError

if TYPE_CHECKING:
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.audit import Audit
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
    from patchcleanser.data import load_dataset
    from patchcleanser.data.multilabel_sets import load_multilabel
    from patchcleanser.evaluation.audit import AuditWorkload, audited_job, write_audit
    from patchcleanser.evaluation.audit import audit as audit_run
    from patchcleanser.evaluation.multilabel_audit import MultiLabelAudit, audited_labels
    from patchcleanser.records.provenance import MANIFEST
    from patchcleanser.records.run import Run

    if sample < 0 or attack < 0 or sample + attack < 1:
        raise InputError(f"an audit checks at least 1 row, got --sample {sample} and --attack {attack}")
    stored = Run.open(run)
    for name, value in (("model", model), ("data", data)):
        if value is None and name not in stored.metadata:
            raise InputError(f"{run} does not say its {name}; name it with --{name}")
        if value is None and not isinstance(stored.metadata[name], str):
            raise RecordError(f"{run / MANIFEST} is damaged: its {name} is not a name; name it with --{name}")
    here = cluster.device(device or ("auto" if cluster.on == "ray" else stored.job["device"]))
    load = partial(
        load_classifier,
        model or stored.metadata["model"],
        trust_code=trust_code,
        named_by=None if model else run / MANIFEST,
    )
    classifier = load(device=here)
    address, named_by = data or stored.metadata["data"], None if data else run / MANIFEST
    job: Job | MultiLabelJob
    workload: type[AuditWorkload]
    if stored.kind == "multilabel":
        several = load_multilabel(address, root=root, trust_code=trust_code, named_by=named_by)
        job, workload = audited_labels(stored, classifier, several), MultiLabelAudit
    else:
        split = stored.metadata.get("split") or "test"
        dataset = load_dataset(address, split=split, root=root, trust_code=trust_code, named_by=named_by)
        job, workload = audited_job(stored, classifier, dataset), AuditWorkload
    settings = AttackSettings(iterations=iterations, locations=locations, seed=seed)
    with cluster.start(load) as runner, progress("audit") as show:
        result = audit_run(
            stored,
            job,
            sample=sample,
            attack=attack,
            settings=settings,
            on_progress=show,
            runner=runner,
            workload=workload,
        )
    path = write_audit(result, stored, settings, sample=sample, attack=attack)
    if as_json:
        print(json.dumps({"run": str(run), **stored.integrity, **result.to_json()}, indent=1, ensure_ascii=False))
    else:
        _print_audit(result, stored, path)
    if result.contradictions:
        raise ContradictionError(
            f"{counted(len(result.contradictions), 'contradiction')} in {run}; {path} has all it takes to repeat them; "
            f"the same audit: patchcleanser audit {run} --sample {sample} --attack {attack} --iterations {iterations} "
            f"--locations {locations} --seed {seed}"
        )


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
