"""patchcleanser demo: the main job on what comes with the package, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from patchcleanser.attacks import Attacked
    from patchcleanser.core.records import Run
    from patchcleanser.core.verdicts import Verdict
    from patchcleanser.evaluation import Job

PATCH = 5
TRIES = 10
"""Certified images attacked until one fools the undefended classifier."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run, the report and the attacked picture.")] = Path("demo"),
    limit: Annotated[int, typer.Option(help="How many of the 300 sample images.")] = 100,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Certify real CIFAR-10 images with the packaged classifier, attack one, write the report. About a minute."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.certify import about_run, run_job, tell
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import chosen, load_dataset
    from patchcleanser.evaluation import Job
    from patchcleanser.evaluation.derive import derive
    from patchcleanser.reports import write_report

    if limit < 10:
        raise InputError(f"the demo needs at least 10 images to show anything, got --limit {limit}")
    dataset = chosen(load_dataset("sample"), limit)
    job = Job(load_classifier("zoo:tiny", device=device), dataset, Threat.square(PATCH), table=True)
    about = about_run("zoo:tiny", "sample", None, job)
    run = run_job(job, out / "run", about, batch=None, skip=False, quiet=as_json)
    story = _attack(run, job, out / "attack.png")
    page = write_report([(run, derive(run))], out / "report")
    if as_json:
        tell([run], as_json=True, more={"attack": story, "report": str(page)})
        return
    tell([run], as_json=False)
    print(f"\nthe attack: {story['words']}\n  drawn in {story['picture']}\nthe report: {page}")


def _attack(run: Run, job: Job, picture: Path) -> dict[str, Any]:
    """Attack certified images in turn until the undefended classifier is fooled, and ask the defense."""
    from patchcleanser.attacks import PatchPGD, Settings

    attack = PatchPGD(job.classifier, job.threat, Settings(iterations=40, locations=8))
    rows = run.read(["index", "label", "certified", "margin"]).to_pylist()
    easiest = sorted((row for row in rows if row["certified"]), key=lambda row: row["margin"])
    for row in easiest[:TRIES]:
        image = job.dataset.image(row["index"])
        found = attack.attack(image, row["label"])
        if found.fooled:
            (verdict,) = job.built.predict([found.image])
            return _story(job, image, found, row["label"], verdict, picture)
    return {"words": f"none of {TRIES} certified images could be fooled even undefended", "picture": None}


def _story(job: Job, image: Tensor, found: Attacked, label: int, verdict: Verdict, picture: Path) -> dict[str, Any]:
    from patchcleanser.cli.pictures import draw_sheet, frame

    names = job.dataset.classes
    true, fooled, answer = names[label], names[found.label], names[verdict.label]
    masks = job.built.mask_set((image.shape[1], image.shape[2]))
    hiding = None if verdict.deciding_mask is None else masks.masks[verdict.deciding_mask][0]
    frames = [
        frame(image, f"clean: {true}"),
        frame(found.image, f"patched, undefended: {fooled}", found.windows[0]),
        frame(found.image, f"patched, defended: {answer}", hiding, hide=True),
    ]
    draw_sheet([frames], picture)
    how = f"in case '{verdict.case.value}' after {verdict.classifications} classifications"
    return {
        "true": true,
        "undefended": fooled,
        "defended": answer,
        "case": verdict.case.value,
        "patch": str(found.windows[0]),
        "picture": str(picture),
        "words": f"a printed patch ({found.windows[0]}) makes the undefended classifier say {fooled}, not {true}; "
        f"the defended one says {answer}, {how}",
    }
