"""patchcleanser demo: the main job on what comes with the package, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from patchcleanser.attacks import Attacked
    from patchcleanser.core.records import Run
    from patchcleanser.core.verdicts import Verdict
    from patchcleanser.core.windows import Window
    from patchcleanser.evaluation import Job

PATCH = 5
TRIES = 10
"""Certified images attacked until one fools the undefended classifier."""
SIDE = 256
"""Height of the drawn pictures in pixels."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run, the report and the attacked picture.")] = Path("demo"),
    limit: Annotated[int, typer.Option(help="How many of the 300 sample images.")] = 100,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Certify real CIFAR-10 images with the packaged classifier, attack one, write the report. About two minutes."""
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
    from patchcleanser.classifiers.torch import TorchClassifier

    assert isinstance(job.classifier, TorchClassifier)  # the packaged one is
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
    names = job.dataset.classes
    true, fooled, answer = names[label], names[found.label], names[verdict.label]
    masks = job.built.mask_set((image.shape[1], image.shape[2]))
    hiding = None if verdict.deciding_mask is None else masks.masks[verdict.deciding_mask][0]
    frames = [
        frame(image, f"clean: {true}", None, hide=False),
        frame(found.image, f"patched, undefended: {fooled}", found.windows[0], hide=False),
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


def frame(pixels: Tensor, words: str, window: Window | None, *, hide: bool) -> Image.Image:
    """An enlarged picture with a caption; a window is framed, or hidden as by a mask."""
    from PIL import Image, ImageDraw, ImageFont

    array = (pixels * 255).round().byte().permute(1, 2, 0).numpy()
    scale = max(1, SIDE // array.shape[0])
    size = array.shape[1] * scale, array.shape[0] * scale
    frame = Image.new("RGB", (size[0], size[1] + 28), "white")
    frame.paste(Image.fromarray(array).resize(size, Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(frame)
    if window is not None:
        left, top, right, bottom = (scale * v for v in (window.left, window.top, window.right, window.bottom))
        inside, outside = (left, top, right - 1, bottom - 1), (left - 3, top - 3, right + 2, bottom + 2)
        draw.rectangle(inside if hide else outside, "grey" if hide else None, "grey" if hide else "red", width=3)
    draw.text((0, size[1] + 6), words, "black", ImageFont.load_default(15))
    return frame


def draw_sheet(rows: list[list[Image.Image]], path: Path) -> None:
    """Frames in rows on one white sheet."""
    from PIL import Image

    from patchcleanser.core.files import whole_file

    gap = 12
    widths = [sum(f.width + gap for f in frames) + gap for frames in rows]
    heights = [max(f.height for f in frames) + gap for frames in rows]
    sheet = Image.new("RGB", (max(widths), sum(heights)), "white")
    top = gap
    for frames, height in zip(rows, heights, strict=True):
        left = gap
        for one in frames:
            sheet.paste(one, (left, top))
            left += one.width + gap
        top += height
    with whole_file(path) as part:
        sheet.save(part, format="PNG")
