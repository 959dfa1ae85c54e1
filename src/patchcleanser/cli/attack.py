"""patchcleanser attack: how often patches that were really searched for mislead, undefended and defended."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import (
    PATCH,
    Address,
    AsJson,
    Batch,
    Cpus,
    Data,
    Device,
    Gpus,
    Grid,
    Images,
    Labels,
    Limit,
    Masks,
    Model,
    On,
    Patch,
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
    threat_of,
)
from patchcleanser.errors import ContradictionError

if TYPE_CHECKING:
    from patchcleanser.evaluation.attack_jobs import AttackJob
    from patchcleanser.evaluation.workloads import Runner
    from patchcleanser.records.run import Run

DRAWN = 6
"""Attacked images on the sheet."""


def attack(
    model: Model = "zoo:tiny",
    data: Data = "sample",
    patch: Patch = PATCH,
    patches: Patches = 1,
    attack: Annotated[
        str, typer.Option(help="apgd, pgd, square (no gradients), or adaptive (knows the defense).")
    ] = "apgd",
    iterations: Annotated[int, typer.Option(help="Steps of the attacker.")] = 100,
    locations: Annotated[int, typer.Option(help="Places tried for each image; the worst counts.")] = 1,
    restarts: Annotated[int, typer.Option(help="Random starts at each place.")] = 1,
    places: Annotated[str, typer.Option(help="Places are random, or searched (the worst of a scan).")] = "random",
    loss: Annotated[str, typer.Option(help="What the attacker makes small: margin, ce or dlr.")] = "margin",
    target: Annotated[int | None, typer.Option(help="The label wanted; without it any wrong one counts.")] = None,
    defense: Annotated[str, typer.Option(help="double-masking, challenger-masking or minority-reports.")] = (
        "double-masking"
    ),
    threshold: Threshold = None,
    masks: Masks = None,
    stride: Stride = None,
    grid: Grid = None,
    limit: Limit = None,
    subset: Subset = "random",
    split: Split = None,
    root: Root = None,
    labels: Labels = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "exact",
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
    """Attack images, ask the undefended and the defended classifier, and keep a row for each."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.certify import about_run
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.attack_jobs import AttackJob, AttackWorkload

    skip, options = checked_run(batch, unreadable), defense_options(defense, threshold)
    require_outside(out, data)
    settings = AttackSettings(
        iterations=iterations,
        locations=locations,
        restarts=restarts,
        places=places,  # type: ignore[arg-type]  # checked by Settings
        loss=loss,  # type: ignore[arg-type]
        target=target,
        seed=seed,
    )
    place = Place(on, address, workers, gpus, cpus)
    load = partial(load_classifier, model, trust_code=trust_code)
    classifier = load(device=place.device(device))
    base = Job(
        classifier,
        Images(data, split, root, labels, limit, subset, seed).load(classifier, quiet=as_json),
        threat_of(patch, patches, grid),
        defense=defense,
        masks=pair_if(masks, "masks"),
        stride=pair_if(stride, "stride"),
        precision=precision,  # type: ignore[arg-type]  # checked by the defense
        options=options.get(defense, {}),
    )
    job = AttackJob(base, attack, settings)
    words = f"{model}-{data}-{base.threat.shape}-{defense}-{attack}"
    metadata = about_run(model, data, split, base)
    with place.runner(load) as runner:
        folder = out or default_folder(words, runner.begin(AttackWorkload(job, skip)))
        run = run_attack(job, folder, metadata, batch=batch, skip=skip, quiet=as_json, runner=runner)
    _tell(run, model, sheet=_sheet(run, base), as_json=as_json)


def run_attack(
    job: AttackJob,
    folder: Path,
    metadata: dict[str, Any],
    *,
    batch: int | None,
    skip: bool,
    quiet: bool,
    runner: Runner | None = None,
) -> Run:
    """One attack with its progress on standard error."""
    from patchcleanser.cli.certify import run_work
    from patchcleanser.evaluation.attack_jobs import AttackWorkload

    work, words = AttackWorkload(job, skip), f"{job.attack}, {job.job.threat}"
    return run_work(work, words, folder, metadata, batch=batch, quiet=quiet, runner=runner)


def _tell(run: Run, model: str, *, sheet: Path | None, as_json: bool) -> None:
    """What the rows show; a certified image that was fooled is an error, whatever else is told."""
    from patchcleanser.evaluation.attack_jobs import attack_shares
    from patchcleanser.records.metrics import certified_fooled

    rows = run.read()
    shares, broken = attack_shares(rows), certified_fooled(rows)
    settings = run.job["settings"]
    if as_json:
        told = {name.replace(" ", "_"): share.to_json() for name, share in shares.items()}
        facts = {
            **run.integrity,
            "model": model,
            "defense": run.job["defense"],
            "attack": run.job["attack"],
            **settings,
        }
        more = {"images": next(iter(shares.values())).total, "certified_images_fooled": len(broken)}
        print(json.dumps({"run": str(run.folder), "job": run.job, **facts, **more, **told}, indent=1))
    else:
        places = "weakest" if run.job["attack"] == "adaptive" else settings["places"]
        budget = f"{settings['iterations']} iterations, {settings['locations']} {places} locations"
        print(f"\n{run.threat}, {run.job['defense']}, attacked by {run.job['attack']}: {budget}")
        for name, share in shares.items():
            print(f"  {name:24} {share.with_interval()}")
        print(f"  {'certified images fooled':24} {len(broken):6}    (must be 0)")
        print(f"  rows and pictures in {run.folder}" + (f"; {sheet} shows some" if sheet else ""))
        print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', str(run.folder)])}")
    if broken:
        names = ", ".join(broken["id"].to_pylist()[:5])
        raise ContradictionError(
            f"{len(broken)} certified images were fooled ({names}); their attacked pictures are in "
            f"{run.folder / 'gallery'}, their rows in {run.folder}; the same command finds them again"
        )


def _sheet(run: Run, base: Any) -> Path | None:
    """A picture of some images before and after, with the labels."""
    from PIL import Image

    from patchcleanser.cli.pictures import draw_sheet, frame
    from patchcleanser.core.geometry import Window
    from patchcleanser.data.codec import decode
    from patchcleanser.evaluation.gallery import gallery_path

    rows = [row for row in run.read().to_pylist() if row["skipped"] is None]
    rows = [row for row in rows if gallery_path(run, row["index"], "-attacked").is_file()]
    rows = sorted(rows, key=lambda row: (not row["undefended_fooled"], row["fooled"], row["index"]))[:DRAWN]
    if not rows or base.dataset.image(rows[0]["index"]).shape[0] != 3:
        return None
    named: dict[int, str] = dict(enumerate(base.dataset.classes))  # the model may know more classes than the data

    def called(label: int) -> str:
        return named.get(label, f"class {label}")

    frames: list[list[Image.Image]] = []
    for row in rows:
        window = Window(*row["patches"][:4])
        clean, attacked = (
            decode(gallery_path(run, row["index"], end).read_bytes(), "picture") for end in ("", "-attacked")
        )
        defended = "alert" if row["attacked_alert"] else called(row["attacked_answer"])
        words = f"{called(row['attacked_undefended'])}, defended {defended}"
        frames.append([frame(clean, f"true: {called(row['label'])}"), frame(attacked, words, window)])
    path = run.folder / "attacked.png"
    draw_sheet(frames, path)
    return path
