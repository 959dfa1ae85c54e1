"""patchcleanser attack: search for patches that mislead, and count how often they do, undefended and defended."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.attacks import ADAPTIVE, ATTACKS
from patchcleanser.cli.options import (
    AsJson,
    DryRun,
    RunnerOptions,
    RunOptions,
    default_folder,
    keeping,
)
from patchcleanser.core.counts import counted
from patchcleanser.errors import ContradictionError, InputError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from patchcleanser.core.geometry import Window
    from patchcleanser.data import Dataset
    from patchcleanser.records.run import Run

SHEET_ROWS = 6
"""Attacked images on the sheet."""
PANEL_HEIGHT = 256
"""Height of an enlarged image on a sheet, in pixels."""


@dataclass(frozen=True)
class BudgetOptions:
    """The fields of AttackSettings that are options."""

    iterations: Annotated[int, typer.Option(help="Steps of the attack.")] = 100
    locations: Annotated[int, typer.Option(help="Places tried for each image; the worst counts.")] = 1
    restarts: Annotated[int, typer.Option(help="Random starts at each place.")] = 1
    places: Annotated[str, typer.Option(help="random places, or searched (the worst of a scan).")] = "random"
    loss: Annotated[str, typer.Option(help="The loss that the attack minimizes: margin, ce or dlr.")] = "margin"
    target: Annotated[int | None, typer.Option(help="The wrong label to reach; by default any wrong one.")] = None


def attack(
    options: RunOptions,
    budget: BudgetOptions,
    cluster: RunnerOptions,
    attack: Annotated[
        str, typer.Option(help=f"{', '.join(ATTACKS)}. square needs no gradients, {ADAPTIVE} knows the defense.")
    ] = "apgd",
    task: Annotated[
        str, typer.Option(help="classify; or multilabel: attack single classes, knowing the defense.")
    ] = "classify",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Attack images, ask the undefended and the defended classifier, and keep a row for each."""
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.cli.config import call
    from patchcleanser.cli.cost import announce
    from patchcleanser.cli.progress import shown, waiting
    from patchcleanser.evaluation import AttackJob, evaluate
    from patchcleanser.records.run import Run

    if task == "multilabel":
        from patchcleanser.cli.multilabel import attack_labels

        flags = {"attack": attack not in ("apgd", ADAPTIVE), "dry-run": dry_run, "on": cluster.on != "here"}
        several = AttackSettings(**vars(budget), seed=options.seed)
        attack_labels(options, several, flags=flags, as_json=as_json)
        return
    if task != "classify":
        raise InputError(f"attack takes --task classify or multilabel, got {task!r}")
    by_defense = options.of_defenses()
    budget_settings = AttackSettings(**vars(budget), seed=options.seed)
    classifier = options.loader(device=cluster.device(options.device))
    dataset = options.images(classifier)
    base = options.job(classifier, dataset, options=by_defense.get(options.defense, {}))
    job = AttackJob(base, attack, budget_settings)
    with cluster.start(options.loader) as runner:
        with waiting("checking the masks"):
            identity = runner.begin(job.workload(skip=options.skip))
        name = f"{options.model}-{options.data}-{base.threat.shape}-{options.defense}-{attack}"
        folder = options.out or default_folder(name, identity)
        Run.found(folder, identity)  # raises before anything is timed, if the folder is not for this job
        with keeping([folder]):
            (seconds,) = announce([(job, folder)], cluster, batch=options.batch, dry_run=dry_run, as_json=as_json)
            if dry_run:
                return
            settings: dict[str, Any] = {"batch": options.batch, "skip": options.skip, "metadata": call().metadata()}
            run = evaluate(job, folder, **settings, progress=shown(), seconds=seconds, runner=runner)
    _print_run(run, options.model, sheet=_draw_attacked(run, dataset), as_json=as_json)


def _print_run(run: Run, model: str, *, sheet: Path | None, as_json: bool) -> None:
    """Print the accuracies under attack. ContradictionError if a certified image was fooled."""
    from patchcleanser.cli.progress import blank, shown
    from patchcleanser.evaluation.attack_jobs import attack_shares
    from patchcleanser.records.metrics import certified_fooled

    rows = run.read()
    shares, fooled = attack_shares(rows), certified_fooled(rows)
    settings, defense, attack = run.job["settings"], run.job["defense"], run.job["attack"]
    if as_json:
        result = {"run": str(run.folder), "job": run.job, **run.integrity, "model": model, "defense": defense}
        result |= {"attack": attack, **settings, "images": next(iter(shares.values())).total}
        result |= {"certified_images_fooled": len(fooled)}
        result |= {name.replace(" ", "_"): share.to_dict() for name, share in shares.items()}
        print(json.dumps(result, indent=1))
    else:
        places = "weakest" if attack == ADAPTIVE else settings["places"]
        locations = counted(settings["locations"], f"{places} location")
        budget = f"{counted(settings['iterations'], 'iteration')}, {locations}"
        print(f"{blank()}{run.threat}, {defense}, attacked by {attack}: {budget}")
        for name, share in shares.items():
            print(f"  {name:24} {share.with_interval()}")
        print(f"  {'certified images fooled':24} {len(fooled):6}    (must be 0)")
        print(f"  rows and pictures in {run.folder}" + (f"; {sheet} shows some" if sheet else ""))
        if shown():
            print(f"\nfor a report: {shlex.join(['patchcleanser', 'report', str(run.folder)])}")
    if fooled:
        names = ", ".join(fooled["id"].to_pylist()[:5])
        raise ContradictionError(
            f"{counted(len(fooled), 'certified image')} fooled ({names}); their attacked pictures are in "
            f"{run.folder / 'gallery'}, their rows in {run.folder}; the same command finds them again"
        )


def _draw_attacked(run: Run, dataset: Dataset) -> Path | None:
    """Draw some images before and after the attack, with their labels, if pictures of them were saved."""
    from patchcleanser.core.geometry import Window
    from patchcleanser.data.codec import decode
    from patchcleanser.evaluation.saved_images import ATTACKED, picture_path

    rows = [row for row in run.read().to_pylist() if row["skipped"] is None]
    rows = [row for row in rows if picture_path(run, row["index"], ATTACKED).is_file()]
    rows = sorted(rows, key=lambda row: (not row["undefended_fooled"], row["fooled"], row["index"]))[:SHEET_ROWS]
    if not rows or dataset.image(rows[0]["index"]).shape[0] != 3:
        return None
    names: dict[int, str] = dict(enumerate(dataset.classes))  # the model may have more classes than the data
    panels: list[list[Image.Image]] = []
    for row in rows:
        clean, attacked = (
            decode(picture_path(run, row["index"], suffix).read_bytes(), "picture") for suffix in ("", ATTACKED)
        )
        true, undefended, answer = (
            names.get(label, f"class {label}")
            for label in (row["label"], row["attacked_undefended"], row["attacked_answer"])
        )
        caption = f"{undefended}, defended {'alert' if row['attacked_alert'] else answer}"
        window = Window(*row["patches"][:4])
        panels.append([draw_panel(clean, f"true: {true}"), draw_panel(attacked, caption, window)])
    path = run.folder / "attacked.png"
    draw_sheet(panels, path)
    return path


def draw_panel(pixels: Tensor, caption: str, window: Window | None = None, *, hide: bool = False) -> Image.Image:
    """An enlarged image [C, H, W] with a caption. A window is framed in red, or hidden as by a mask."""
    from PIL import Image, ImageDraw, ImageFont

    from patchcleanser.data.codec import as_picture

    picture = as_picture(pixels)
    scale = max(1, PANEL_HEIGHT // picture.height)
    size = picture.width * scale, picture.height * scale
    panel = Image.new("RGB", (size[0], size[1] + 28), "white")
    panel.paste(picture.resize(size, Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(panel)
    if window is not None:
        left, top, right, bottom = (scale * v for v in (window.left, window.top, window.right, window.bottom))
        if hide:
            draw.rectangle((left, top, right - 1, bottom - 1), "grey", "grey", width=3)
        else:
            draw.rectangle((left - 3, top - 3, right + 2, bottom + 2), None, "red", width=3)
    draw.text((0, size[1] + 6), caption, "black", ImageFont.load_default(15))
    return panel


def draw_sheet(rows: list[list[Image.Image]], path: Path) -> None:
    """Write rows of panels as one PNG file."""
    from PIL import Image

    from patchcleanser.records.atomic import whole_file

    gap = 12
    widths = [sum(panel.width + gap for panel in row) + gap for row in rows]
    heights = [max(panel.height for panel in row) + gap for row in rows]
    sheet = Image.new("RGB", (max(widths), sum(heights)), "white")
    top = gap
    for row, height in zip(rows, heights, strict=True):
        left = gap
        for panel in row:
            sheet.paste(panel, (left, top))
            left += panel.width + gap
        top += height
    with whole_file(path) as part:
        sheet.save(part, format="PNG")
