"""patchcleanser demo: certify, attack and report on what comes with the package, offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, keeping
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation import Job
    from patchcleanser.records.run import Row, Run

PATCH_SIDE = 5
ATTACKED_IMAGES = 8
"""The first images, which are attacked too. They are not picked by their outcome, so their accuracy is honest."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the report and the attacked picture.")] = Path("demo"),
    limit: Annotated[int, typer.Option(help="How many of the 300 sample images.")] = 100,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Certify real CIFAR-10 images with the packaged classifier, attack some, write the report. About a minute."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.cli.certify import print_runs
    from patchcleanser.cli.config import call
    from patchcleanser.cli.progress import shown
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import chosen, load_dataset
    from patchcleanser.evaluation import AttackJob, Job, evaluate
    from patchcleanser.records.derive import derive
    from patchcleanser.records.leftovers import RUNS_BELOW, require_free
    from patchcleanser.reports import write_report

    if limit < 10:
        raise InputError(f"the demo needs at least 10 images to show anything, got --limit {limit}")
    require_free(out, ours=RUNS_BELOW)
    dataset = chosen(load_dataset("sample"), limit)
    job = Job(load_classifier("zoo:tiny", device=device), dataset, Threat.square(PATCH_SIDE), table=True)
    first = replace(job, dataset=chosen(dataset, ATTACKED_IMAGES, subset="first"), table=False)
    budget = AttackSettings(iterations=100, locations=1)  # the weaker of the paper's two attackers
    places, runs = (out / "run", out / "attack"), []
    with keeping(places):
        for work, folder in zip((job, AttackJob(first, "apgd", budget)), places, strict=True):
            runs.append(evaluate(work, folder, metadata=call().metadata(), progress=shown()))
        certified, attacked = runs
        story = _story(job, attacked, out / "attack.png")
        page = write_report([(certified, derive(certified)), (attacked, None)], out / "report")
    print_runs([certified], as_json=as_json, more={"attack": story, "report": str(page)})
    if not as_json:
        print(f"\nthe attack: {story['words']}\n  drawn in {story['picture']}\nthe report: {page}")


def _story(job: Job, run: Run, picture: Path) -> dict[str, Any]:
    """One image that a patch changes for the undefended classifier and not for the defended one."""
    rows = [row for row in run.read().to_pylist() if row["skipped"] is None]
    recovered = [
        row for row in rows if row["undefended"] == row["label"] == row["attacked_answer"] != row["attacked_undefended"]
    ]
    if not recovered:
        return {"words": f"none of {len(rows)} images was lost undefended and recovered", "picture": None}
    return _recovery(job, run, max(recovered, key=lambda row: bool(row["certified"])), picture)


def _recovery(job: Job, run: Run, row: Row, picture: Path) -> dict[str, Any]:
    """Draw one recovered image, and describe it."""
    from patchcleanser.cli.attack import draw_panel, draw_sheet
    from patchcleanser.core.geometry import Window
    from patchcleanser.data.codec import decode
    from patchcleanser.evaluation.saved_images import ATTACKED, picture_path

    image, patched = (
        decode(picture_path(run, row["index"], suffix).read_bytes(), "picture") for suffix in ("", ATTACKED)
    )
    (verdict,) = job.masking.predict([patched])
    names = job.dataset.classes
    true, fooled, answer = names[row["label"]], names[row["attacked_undefended"]], names[verdict.label]
    masks = job.masking.mask_set((image.shape[1], image.shape[2]))
    hiding = None if verdict.deciding_mask is None else masks.masks[verdict.deciding_mask][0]
    window = Window(*row["patches"][:4])
    panels = [
        draw_panel(image, f"clean: {true}"),
        draw_panel(patched, f"patched, undefended: {fooled}", window),
        draw_panel(patched, f"patched, defended: {answer}", hiding, hide=True),
    ]
    draw_sheet([panels], picture)
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
