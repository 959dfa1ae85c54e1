"""patchcleanser audit: distrust a finished run, and say what came of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import Address, AsJson, Cpus, Gpus, On, Place, Root, Seed, TrustCode, Workers
from patchcleanser.errors import ContradictionError, InputError, RecordError

if TYPE_CHECKING:
    from patchcleanser.evaluation.audit import Audit
    from patchcleanser.records.run import Run

SHOWN = 10
"""So many contradictions are printed; the file has all of them."""


def audit(
    run: Annotated[Path, typer.Argument(help="A finished run of certify.")],
    sample: Annotated[int, typer.Option(help="Rows to derive again, one masked picture at a time.")] = 50,
    attack: Annotated[int, typer.Option(help="Certified images to attack, by an attacker who knows the defense.")] = 10,
    iterations: Annotated[int, typer.Option(help="Steps of that attacker.")] = 50,
    locations: Annotated[int, typer.Option(help="Places where he tries, the weakest first.")] = 2,
    seed: Seed = 0,
    model: Annotated[str | None, typer.Option(help="The model, if it is not where the run says.")] = None,
    data: Annotated[str | None, typer.Option(help="The data, if they are not where the run says.")] = None,
    root: Root = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default what the run was made on.")] = None,
    on: On = "here",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = 0,
    cpus: Cpus = 1,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Derive rows again with a slow twin of the code, attack certified images, fail on any contradiction."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.progress import progress
    from patchcleanser.data import load_dataset
    from patchcleanser.evaluation.audit import audit as audit_run
    from patchcleanser.evaluation.audit import audited_job, write_audit
    from patchcleanser.records.provenance import MANIFEST
    from patchcleanser.records.run import Run

    if sample < 0 or attack < 0 or sample + attack < 1:
        raise InputError(f"an audit looks at at least 1 row, got --sample {sample} and --attack {attack}")
    found = Run.open(run)
    for name, given in (("model", model), ("data", data)):
        if given is None and name not in found.metadata:
            raise InputError(f"{run} does not say its {name}; name it with --{name}")
        if given is None and not isinstance(found.metadata[name], str):
            raise RecordError(f"{run / MANIFEST} is damaged: its {name} is no name; name it with --{name}")
    place = Place(on, address, workers, gpus, cpus)
    here = place.device(device or ("auto" if on == "ray" else found.job["device"]))
    load = partial(
        load_classifier,
        model or found.metadata["model"],
        trust_code=trust_code,
        named_by=None if model else run / MANIFEST,
    )
    classifier = load(device=here)
    dataset = load_dataset(
        data or found.metadata["data"],
        split=found.metadata.get("split") or "test",
        root=root,
        trust_code=trust_code,
        named_by=None if data else run / MANIFEST,
    )
    job = audited_job(found, classifier, dataset)
    settings = AttackSettings(iterations=iterations, locations=locations, seed=seed)
    with place.runner(load) as runner, progress("audit", quiet=as_json) as report:
        result = audit_run(
            found, job, sample=sample, attack=attack, settings=settings, on_progress=report, runner=runner
        )
    path = write_audit(result, found, settings, sample=sample, attack=attack)
    if as_json:
        print(json.dumps({"run": str(run), **found.integrity, **result.to_json()}, indent=1, ensure_ascii=False))
    else:
        _tell(result, found, path)
    if result.contradictions:
        raise ContradictionError(
            f"{len(result.contradictions)} contradictions in {run}; {path} holds all that is needed to repeat them; "
            f"the same audit: patchcleanser audit {run} --sample {sample} --attack {attack} --iterations {iterations} "
            f"--locations {locations} --seed {seed}"
        )


def _tell(result: Audit, run: Run, path: Path) -> None:
    print(f"{run.threat}, {run.job['defense']}: {result.rows} rows, none contradicts itself")
    print(f"  run digest {run.digest}")
    print(f"  {len(result.derived)} derived again, one masked picture at a time ({result.labels} classifications)")
    fooled = sum("patches" in found for found in result.contradictions)
    print(f"  {len(result.attacked)} certified images attacked, {fooled} fooled")
    print(f"  {len(result.near_ties)} images or labels near a tie, where rounding decides")
    for words in result.notes:
        print(f"  note: {words}")
    for found in result.contradictions[:SHOWN]:
        stored = f"stored {found['stored']}, found {found['found']}"
        print(
            f"  CONTRADICTION image {found['index']} ({found['id']}, label {found['label']}): {found['what']}: {stored}"
        )
    print(f"  {'no contradiction' if not result.contradictions else 'FAILED'}; all of it in {path}")
