"""patchcleanser predict: the defended label of images, and how it was reached."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, DefenseOptions, Option
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Window
from patchcleanser.errors import DataError, ImageError, InputError, OutOfMemoryError, OutputError, ThreatError

if TYPE_CHECKING:
    from patchcleanser.core.results import DetectionVerdict, LocalVerdict, Verdict


def predict(
    options: DefenseOptions,
    images: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.")],
    option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Print defended labels. Nothing is certified here: a picture you were handed may already carry a patch."""
    from patchcleanser.data.codec import decode
    from patchcleanser.data.folders import SUFFIXES
    from patchcleanser.defenses import DEFENSES
    from patchcleanser.defenses.mask_defense import MaskDefense

    if options.defense not in DEFENSES:
        raise InputError.unknown("defense", options.defense, DEFENSES)
    kind = DEFENSES[options.defense].load()
    arguments: dict[str, Any] = options.of_defenses(option)[options.defense]
    if issubclass(kind, MaskDefense):
        arguments |= {**options.mask_set_options, "precision": options.precision}
    elif options.masks or options.stride or options.precision != "exact":
        raise InputError(f"{options.defense} has no masks; leave out --masks, --stride and --precision")
    files = _files(images, SUFFIXES)
    classifier = options.loader(device=options.device)
    defense = kind(classifier, options.threat, **arguments)
    results: list[dict[str, Any]] = []
    for path in files:
        try:
            pixels = decode(_read(path), str(path))
            (verdict,) = defense.predict([pixels])
        except (DataError, ImageError, OutOfMemoryError, OutputError, ThreatError) as error:
            # One bad picture, or one that is too small for the patch, must not cost the answers to the others.
            message = f"{path}: {str(error).removeprefix('image 0: ').replace(f' {path}', '')}"
            if len(files) == 1 and not as_json:
                raise DataError(message) from error
            results.append({"image": str(path), "error": message})
        else:
            results.append({"image": str(path), **_result(verdict, classifier.names)})
        if not as_json:
            print(_sentence(results[-1]), file=sys.stderr if "error" in results[-1] else sys.stdout)
    if as_json:
        print(json.dumps(results, indent=1))
    failed = sum("error" in result for result in results)
    if failed:
        rest = "; the others are answered above" if failed < len(results) else ""
        raise DataError(f"{failed} of {counted(len(results), 'picture')} could not be answered{rest}")


def _files(paths: list[Path], suffixes: set[str]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            address = re.match(r"\w\w+:/", str(path))
            fix = "predict reads files, so download it first" if address else "name pictures, or folders of them"
            raise DataError(f"no picture at {str(path).replace(':/', '://', 1)}; {fix}")
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


def _result(verdict: Verdict | DetectionVerdict | LocalVerdict, names: tuple[str, ...] | None) -> dict[str, Any]:
    from patchcleanser.core.results import DetectionVerdict, Verdict

    name = names[verdict.label] if names and verdict.label < len(names) else None
    result: dict[str, Any] = {"label": verdict.label, "name": name}
    if isinstance(verdict, DetectionVerdict):
        result |= {"alert": verdict.alert, "reporters": list(verdict.reporters)}
    elif isinstance(verdict, Verdict):
        windows = [list(window.numbers) for window in verdict.suspected] or None
        result |= {"case": verdict.case.value, "disagreers": list(verdict.disagreers), "suspected": windows}
    result |= {"masks": len(verdict.one_mask_labels)} if isinstance(verdict, (Verdict, DetectionVerdict)) else {}
    return {**result, "classifications": verdict.classifications}


def _sentence(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    label = f"{result['name']} ({result['label']})" if result["name"] else f"class {result['label']}"
    cost = counted(result["classifications"], "classification")
    if "alert" in result:
        alert = "ALERT, a patch may be there; undefended label" if result["alert"] else "no alert;"
        return f"{result['image']}: {alert} {label}, {cost}"
    if "case" not in result:
        return f"{result['image']}: {label}; {cost}"
    masks, disagreers = counted(result["masks"], "mask"), len(result["disagreers"])
    disagree = "disagree" if disagreers > 1 else "disagrees"
    how = {
        "coarse": f"all {masks} of the coarse round agree",
        "agreed": f"all {masks} agree" if result["masks"] > 1 else "its only mask decided",
        "disagreer": "one mask decided",
        "majority": f"{disagreers} of {masks} {disagree}, but not convincingly: the majority decides",
    }[result["case"]]
    where = "".join(f"; a patch is suspected inside {Window(*numbers)}" for numbers in result["suspected"] or [])
    return f"{result['image']}: {label}; {how}{where}; {cost}"
