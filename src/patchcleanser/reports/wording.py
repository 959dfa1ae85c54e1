"""Runs in plain words: what was attacked, what defends, what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patchcleanser.core.threats import AnyRectangle, SquareShare, Threat
from patchcleanser.core.windows import Size
from patchcleanser.reports.studies import Study

DEFENSES = {
    "double-masking": "double-masking",
    "challenger-masking": "challenger masking",
    "minority-reports": "Minority Reports",
}
HOW = {
    "double-masking": "Every image is classified under each mask; where the labels disagree, the masks that "
    "disagree are tried again together with every second mask.",
    "challenger-masking": "Every image is classified under each mask; where the labels disagree, masks play "
    "against each other, two at a time, until one label is left.",
    "minority-reports": "Every image is classified under each mask; if a confident label contradicts the "
    "undefended one, the answer is an alert instead of a label.",
}


def patch(threat: Threat) -> str:
    """The patch in a few signs, for a table.

    >>> [patch(Threat.parse(t)) for t in ("5", "2%", "any:1%")]
    ['5×5 px', '2%', 'any rectangle, 1%']
    """
    shape = threat.shape
    if isinstance(shape, AnyRectangle):
        said = f"any rectangle, {f'{shape.area} px' if shape.area is not None else str(shape)[4:]}"
    else:
        said = str(shape) if isinstance(shape, SquareShare) else px((shape.height, shape.width))
    said = said if threat.count == 1 else f"{threat.count} × {said}"
    said += "" if threat.region is None else f" inside {threat.region}"
    return said + (" on the input" if threat.grid == "input" else "")


def attack(study: Study) -> str:
    """The threat in a few words, for a headline: "any 5×5 px patch"."""
    it = study.run.threat
    if isinstance(it.shape, AnyRectangle):
        return patch(replace(it, region=None, grid="source"))
    one = str(it.shape) if isinstance(it.shape, SquareShare) else px((it.shape.height, it.shape.width))
    return f"any {one} patch" if it.count == 1 else f"any {it.count} patches of {one}"


def threat(study: Study) -> str:
    """The threat as a phrase: "a patch of 5×5 px, anywhere in the image"."""
    it = study.run.threat
    many = "" if it.count == 1 else f"{it.count} patches at once, each "
    where = "anywhere in the image" if it.region is None else f"inside the window {it.region}"
    return f"{many}{_shape(study)}, {where}"


def _shape(study: Study) -> str:
    shape = study.run.threat.shape
    if isinstance(shape, AnyRectangle):
        limit = f"{shape.area} px" if shape.area is not None else f"{str(shape)[4:]} of the image"
        return f"any rectangle of at most {limit}"
    if isinstance(shape, SquareShare):
        side = study.run.threat.shapes(study.size)[0][0]
        return f"a square patch of {shape} of the image ({px((side, side))} at {px(study.size)})"
    return f"a patch of {shape.height}×{shape.width} px"


def grid(study: Study) -> str:
    """Which pixels the threat means."""
    if study.run.threat.grid == "input":
        return "on the classifier's input, after resizing and cropping"
    return "on the image as it came, before any resizing"


def masks(study: Study) -> str:
    """How the masks were asked for: so many per axis, or a stride."""
    stride, counts = study.run.job.get("stride"), study.run.job.get("masks")
    if stride:
        return f"stride {stride[0]}" if stride[0] == stride[1] else f"stride {stride[0]}×{stride[1]}"
    down, across = counts or (6, 6)
    return f"{down}×{across}"


def mask_sizes(study: Study) -> str:
    """The masks themselves: "9 masks of 15×15 px"."""
    sizes = {(w.height, w.width) for mask in study.masks.masks for w in mask}
    of = f" of {px(next(iter(sizes)))}" if len(sizes) == 1 and study.run.threat.count == 1 else ""
    at = "" if len(study.sizes) == 1 else f" at {px(study.size)}"
    return f"{len(study.masks):,} masks{of}{at}"


def defense(study: Study) -> str:
    """The defense with its options."""
    name = str(study.run.job["defense"])
    options = [f"{key} {value}" for key, value in sorted(study.run.job.get("options", {}).items())]
    return DEFENSES.get(name, name) + (f" ({', '.join(options)})" if options else "")


def model(study: Study) -> str:
    """What the model is called, or the start of its hash."""
    return str(study.about("model") or f"classifier {str(study.run.job.get('classifier'))[:10]}")


def data(study: Study) -> str:
    """What the images are called, or the start of their hash."""
    name = str(study.about("data") or f"data {str(study.run.job.get('data'))[:10]}")
    return f"{name} ({study.about('split')})" if study.about("split") else name


def facets(study: Study) -> dict[str, str]:
    """What may differ between the runs of a sweep."""
    return {
        "Model": model(study),
        "Data": data(study),
        "Patch": patch(study.run.threat),
        "Masks": masks(study),
        "Defense": defense(study),
        "Labels": str(study.run.job.get("precision", "exact")),
    }


def varying(studies: Sequence[Study]) -> list[str]:
    """The facets in which these runs differ."""
    found = [facets(study) for study in studies]
    return [name for name in found[0] if len({facet[name] for facet in found}) > 1]


def overview(studies: Sequence[Study]) -> str:
    """Several runs in a few sentences: what they share, and the values of what they do not."""
    values: dict[str, list[str]] = {}
    for study in studies:
        for name, value in facets(study).items():
            values.setdefault(name, []).append(value)
    differs = varying(studies)
    model, data = (f"{len(set(values[n]))} {w}" if n in differs else values[n][0] for n, w in COUNTED.items())
    images = sorted({study.summary.images for study in studies})
    many = f"{images[0]:,} images each" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,} images each"
    listed = [f"{PLURAL[n] if n in differs else n}: {', '.join(dict.fromkeys(values[n]))}." for n in PLURAL]
    return " ".join([f"{len(studies)} runs of {model} on {data}, {many}.", *listed])


COUNTED = {"Model": "models", "Data": "datasets"}
PLURAL = {"Patch": "Patches", "Masks": "Masks", "Defense": "Defenses"}


def names(studies: Sequence[Study]) -> list[str]:
    """A short name for each run: what sets it apart from the others, and its folder where that is not enough."""
    if len(studies) == 1:
        return [studies[0].run.folder.resolve().name]
    differs = varying(studies)
    said = [" · ".join(_told(name, facets(study)[name]) for name in differs) for study in studies]
    if len(set(said)) < len(said) or not differs:
        folders = _folders(studies)
        said = [f"{name} · {folder}".removeprefix(" · ") for name, folder in zip(said, folders, strict=True)]
    return said


def _told(name: str, value: str) -> str:
    return f"{value} patch" if name == "Patch" else f"{value} masks" if name == "Masks" else value


def _folders(studies: Sequence[Study]) -> list[str]:
    paths = [study.run.folder.resolve() for study in studies]
    shared = min(len(path.parts) for path in paths) - 1
    while shared and len({path.parts[:shared] for path in paths}) > 1:
        shared -= 1
    return [str(Path(*path.parts[shared:])) for path in paths]


def px(size: Size) -> str:
    """A size in pixels: 32×32 px."""
    return f"{size[0]}×{size[1]} px"
