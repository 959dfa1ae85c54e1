"""patchcleanser demo: the main job on what comes with the package, offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation import Job
    from patchcleanser.records.run import Row, Run

PATCH = 5
ATTACKED = 8
"""The first images, which are attacked too: not picked, so that the report may give their accuracy."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the report and the attacked picture.")] = Path("demo"),
    limit: Annotated[int, typer.Option(help="How many of the 300 sample images.")] = 100,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Certify real CIFAR-10 images with the packaged classifier, attack some, write the report. About a minute."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.certify import about_run, run_job, tell
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import chosen, load_dataset
    from patchcleanser.evaluation import Job
    from patchcleanser.records.derive import derive
    from patchcleanser.reports import write_report

    if limit < 10:
        raise InputError(f"the demo needs at least 10 images to show anything, got --limit {limit}")
    dataset = chosen(load_dataset("sample"), limit)
    job = Job(load_classifier("zoo:tiny", device=device), dataset, Threat.square(PATCH), table=True)
    metadata = about_run("zoo:tiny", "sample", None, job)
    run = run_job(job, out / "run", metadata, batch=None, skip=False, quiet=as_json)
    attacked = _attack(job, out / "attack", metadata, quiet=as_json)
    story = _story(job, attacked, out / "attack.png")
    page = write_report([(run, derive(run)), (attacked, None)], out / "report")
    tell([run], as_json=as_json, more={"attack": story, "report": str(page)})
    if as_json:
        return
    print(f"\nthe attack: {story['words']}\n  drawn in {story['picture']}\nthe report: {page}")


def _attack(job: Job, folder: Path, metadata: dict[str, Any], *, quiet: bool) -> Run:
    """A small run of attacks on the first images."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.cli.attack import run_attack
    from patchcleanser.data import chosen
    from patchcleanser.evaluation.attack_jobs import AttackJob

    some = replace(job, dataset=chosen(job.dataset, ATTACKED, subset="first"), table=False)
    settings = AttackSettings(iterations=100, locations=1)  # the weaker of the paper's two attackers
    return run_attack(AttackJob(some, "apgd", settings), folder, metadata, batch=None, skip=False, quiet=quiet)


def _story(job: Job, run: Run, picture: Path) -> dict[str, Any]:
    """One image that a patch changes for the undefended classifier and not for the defended one."""
    rows = [row for row in run.read().to_pylist() if row["skipped"] is None]
    recovered = [
        row for row in rows if row["undefended"] == row["label"] == row["attacked_answer"] != row["attacked_undefended"]
    ]
    if not recovered:
        return {"words": f"none of {len(rows)} images was lost undefended and recovered", "picture": None}
    return _told(job, run, max(recovered, key=lambda row: bool(row["certified"])), picture)


def _told(job: Job, run: Run, row: Row, picture: Path) -> dict[str, Any]:
    from patchcleanser.cli.pictures import draw_sheet, frame
    from patchcleanser.core.geometry import Window
    from patchcleanser.data.codec import decode
    from patchcleanser.evaluation.gallery import gallery_path

    image, patched = (decode(gallery_path(run, row["index"], end).read_bytes(), "picture") for end in ("", "-attacked"))
    (verdict,) = job.masking.predict([patched])
    names = job.dataset.classes
    true, fooled, answer = names[row["label"]], names[row["attacked_undefended"]], names[verdict.label]
    masks = job.masking.mask_set((image.shape[1], image.shape[2]))
    hiding = None if verdict.deciding_mask is None else masks.masks[verdict.deciding_mask][0]
    window = Window(*row["patches"][:4])
    frames = [
        frame(image, f"clean: {true}"),
        frame(patched, f"patched, undefended: {fooled}", window),
        frame(patched, f"patched, defended: {answer}", hiding, hide=True),
    ]
    draw_sheet([frames], picture)
    how = f"in case '{verdict.case.value}' after {verdict.classifications} classifications"
    return {
        "true": true,
        "undefended": fooled,
        "defended": answer,
        "certified": row["certified"],
        "case": verdict.case.value,
        "patch": str(window),
        "run": str(run.folder),
        "picture": str(picture),
        "words": f"a printed patch ({window}) makes the undefended classifier say {fooled}, not {true}; "
        f"the defended one says {answer}, {how}",
    }
