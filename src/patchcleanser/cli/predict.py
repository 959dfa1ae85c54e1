"""patchcleanser predict: the defended label of pictures, and how it was reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import (
    PATCH,
    AsJson,
    DefenseNames,
    Device,
    Grid,
    Masks,
    Model,
    Options,
    Patch,
    Patches,
    Precision,
    Stride,
    Threshold,
    TrustCode,
    defense_options,
    pair_if,
    threat_of,
)
from patchcleanser.core.geometry import Window
from patchcleanser.errors import DataError, ImageError, InputError, OutOfMemoryError, OutputError, ThreatError

if TYPE_CHECKING:
    from patchcleanser.core.masks import MaskSet
    from patchcleanser.core.results import DetectionVerdict, LocalVerdict, Verdict


def predict(
    images: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.")],
    model: Model = "zoo:tiny",
    patch: Patch = PATCH,
    patches: Patches = 1,
    masks: Masks = None,
    stride: Stride = None,
    grid: Grid = None,
    defense: Annotated[str, typer.Option(help=DefenseNames)] = "double-masking",
    threshold: Threshold = None,
    option: Options = None,
    device: Device = "auto",
    precision: Precision = "exact",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Defended labels. Nothing is certified here: a picture you were handed may already carry a patch."""
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.data.codec import decode
    from patchcleanser.data.folders import SUFFIXES
    from patchcleanser.defenses import DEFENSES
    from patchcleanser.defenses.mask_defense import MaskDefense

    if defense not in DEFENSES:
        raise InputError(f"no defense {defense!r}; there are {', '.join(DEFENSES)}")
    plan: dict[str, Any] = {
        "masks": pair_if(masks, "masks"),
        "stride": pair_if(stride, "stride"),
        "precision": precision,
    }
    kind = DEFENSES[defense].load()
    if not issubclass(kind, MaskDefense):
        if masks or stride or precision != "exact":
            raise InputError(f"{defense} has no masks; leave out --masks, --stride and --precision")
        plan = {}
    plan |= defense_options(defense, threshold, option)[defense]
    classifier = load_classifier(model, device=device, trust_code=trust_code)
    built = kind(classifier, threat_of(patch, patches, grid), **plan)
    found: list[dict[str, Any]] = []
    broken = 0
    for path in _files(images, SUFFIXES):
        try:
            pixels = decode(_read(path), str(path))
            (verdict,) = built.predict([pixels])
        except (DataError, ImageError, OutOfMemoryError, OutputError, ThreatError) as error:
            # One bad picture, or one that is too small for the patch, must not cost the answers to the others.
            said = str(error).removeprefix("image 0: ")
            found.append({"image": str(path), "error": said if str(path) in said else f"{path}: {said}"})
            broken += 1
        else:
            height, width = built.to_threat_grid(pixels).shape[-2:]
            masks_of = built.mask_set((height, width)) if isinstance(built, MaskDefense) else None
            found.append({"image": str(path), **_facts(verdict, masks_of, classifier.names)})
        if not as_json:
            print(_sentence(found[-1]))
    if as_json:
        print(json.dumps(found, indent=1))
    if broken:
        others = "; the others are answered above" if broken < len(found) else ""
        raise DataError(f"{broken} of {len(found)} pictures could not be answered{others}")


def _files(paths: list[Path], suffixes: set[str]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
        if not inside:
            raise DataError(f"no pictures in {path}")
        files += inside
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _facts(
    verdict: Verdict | DetectionVerdict | LocalVerdict, masks: MaskSet | None, names: tuple[str, ...] | None
) -> dict[str, Any]:
    from patchcleanser.core.results import DetectionVerdict, Verdict

    named = names[verdict.label] if names and verdict.label < len(names) else None
    facts: dict[str, Any] = {"label": verdict.label, "name": named}
    if isinstance(verdict, DetectionVerdict):
        facts |= {"alert": verdict.alert, "reporters": list(verdict.reporters)}
    elif isinstance(verdict, Verdict) and masks is not None:
        suspect = None if verdict.deciding_mask is None else masks.masks[verdict.deciding_mask]
        windows = suspect and [list(window.numbers) for window in suspect]
        facts |= {"case": verdict.case.value, "disagreers": list(verdict.disagreers), "suspected": windows}
    facts |= {} if masks is None else {"masks": len(masks)}
    return {**facts, "classifications": verdict.classifications}


def _sentence(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return str(facts["error"])
    label = f"{facts['name']} ({facts['label']})" if facts["name"] else f"class {facts['label']}"
    cost = f"{facts['classifications']} classifications"
    if "alert" in facts:
        word = "ALERT, a patch may be there; undefended label" if facts["alert"] else "no alert;"
        return f"{facts['image']}: {word} {label}, {cost}"
    if "case" not in facts:
        return f"{facts['image']}: {label}; {cost}"
    how = {
        "agreed": f"all {facts['masks']} masks agree",
        "disagreer": "one mask decided",
        "majority": f"{len(facts['disagreers'])} of {facts['masks']} masks disagree, none convincingly",
    }[facts["case"]]
    where = "".join(f"; a patch is suspected inside {Window(*numbers)}" for numbers in facts["suspected"] or [])
    return f"{facts['image']}: {label}; {how}{where}; {cost}"
