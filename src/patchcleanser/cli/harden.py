"""patchcleanser harden: fine-tune a copy of a classifier, on unlabelled photos, so that its labels survive masks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from patchcleanser.cli.options import (
    PATCH,
    AsJson,
    Device,
    Grid,
    Limit,
    Patch,
    Seed,
    TrustCode,
    parse_threat,
    require_outside,
)
from patchcleanser.cli.train import Out, load_trainable, print_card


@dataclass(frozen=True)
class HardenOptions:
    """The fields of HardenSettings that are options."""

    epochs: Annotated[int, typer.Option(help="Most passes over the photos.")] = 60
    batch: Annotated[int, typer.Option(help="Photos per step.")] = 64
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 5e-5
    tries: Annotated[int, typer.Option(help="Places tried for each mask to find the worst.")] = 2
    greedy: Annotated[float, typer.Option(help="Share of the steps with the worst masks; the rest are random.")] = 0.5
    mix: Annotated[float, typer.Option(help="The most of another photo blended into one; few photos need it.")] = 0.5
    unmasked: Annotated[float, typer.Option(help="Share of the loss that keeps unmasked answers.")] = 0.3
    sharp: Annotated[int, typer.Option(help="How often an epoch shows photos that fill the input.")] = 1
    features: Annotated[float, typer.Option(help="Weight of feature distillation, such as 5; 0 is none.")] = 0.0
    mirror: Annotated[bool, typer.Option("--mirror", help="Ask the original about mirror images too.")] = False
    frozen: Annotated[
        list[str] | None, typer.Option(help="A layer that stays as it is, as layer4; repeatable.", show_default=False)
    ] = None
    patience: Annotated[int, typer.Option(help="Stop after so many checks without improvement.")] = 8


def harden(
    model: Annotated[str, typer.Option(help="Classifier to harden: timm:NAME, python:module:make, inpaint:SPEC, …")],
    images: Annotated[list[str], typer.Option(help="Unlabelled photos: a folder, parquet:PATH, cifar10; repeatable.")],
    out: Out,
    options: HardenOptions,
    patch: Patch = PATCH,
    grid: Grid = None,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Harden a classifier with unlabelled photos; the original is not changed."""
    from patchcleanser.classifiers.trained import bare_spec
    from patchcleanser.cli.progress import progress
    from patchcleanser.data import load_dataset, together
    from patchcleanser.data.catalog import full_name
    from patchcleanser.records.atomic import interruptible
    from patchcleanser.records.provenance import origin
    from patchcleanser.training.artifacts import CHECKPOINT, write_model
    from patchcleanser.training.harden import harden as run
    from patchcleanser.training.recipes import HardenSettings

    settings = HardenSettings(**{**vars(options), "frozen": tuple(options.frozen or ())})
    threat = parse_threat(patch, 1, grid)
    names = [full_name(name) for name in images]
    require_outside(out, *names)
    classifier = load_trainable(model, device, out, trust_code=trust_code)
    photos = together([load_dataset(name, split="train") for name in names], limit=limit, seed=seed)
    with progress(f"hardening {model}") as show, interruptible((out / CHECKPOINT).is_file):
        done = run(classifier, photos, threat, settings=settings, seed=seed, out=out, on_progress=show)
    before, best = done.checks[0], done.best
    card = {
        "model": bare_spec(model),
        "preprocessing": asdict(classifier.preprocessing),
        "classes": list(classifier.names or ()),
        "hardened_from": classifier.fingerprint,
        "photos": {"names": names, "number": len(photos), "sha256": photos.fingerprint},
        "patch": patch,
        "grid": threat.grid,
        "settings": asdict(settings),
        "seed": seed,
        "criterion": "most agreement with the original, of those within one standard error, photo by photo, of the "
        "most held-out photos with its label under all two-mask views; also part of the way back to the original",
        "before": before.to_dict(),
        "best": best.to_dict(),
        "checks": [check.to_dict() for check in done.checks],
        **origin(),
    }
    outcome = f"invariance under masks {before.invariance:.3f} → {best.invariance:.3f}, agreement {best.agreement:.3f}"
    if best is before:
        unchanged = f"the copy equals the original (invariance {best.invariance:.3f})"
        outcome = f"nothing improved, so {unchanged}; try more photos"
    card = write_model(done.classifier.module, out, card)
    print_card(card, out, outcome, as_json=as_json)
