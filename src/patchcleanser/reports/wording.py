"""Runs in plain words: what was attacked, what defends, what was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from patchcleanser.attacks import ATTACKS
from patchcleanser.core.geometry import Size
from patchcleanser.core.threats import AnyRectangle, SquareShare, Threat
from patchcleanser.defenses import DEFENSES
from patchcleanser.reports.studies import Study

PATHS = re.compile(r"(?<![\w.~<>/])~?/(?:[^\s\"',:;/<>]+/)+([^\s\"',:;/<>]+)/?")


def patch(threat: Threat) -> str:
    """The patch in a few signs, for a table.

    >>> [patch(Threat.parse(t)) for t in ("5", "2%", "any:1%")]
    ['5×5 px', '2%', 'any rectangle of up to 1% of the image']
    """
    shape = threat.shape
    if isinstance(shape, AnyRectangle):
        one = f"rectangle of up to {limit(shape)}"
        said = f"any {one}" if threat.count == 1 else f"any {threat.count} rectangles of up to {limit(shape)} each"
    else:
        said = str(shape) if isinstance(shape, SquareShare) else px((shape.height, shape.width))
        said = said if threat.count == 1 else f"{threat.count} × {said}"
    said += "" if threat.region is None else f" inside {threat.region}"
    return said + (" on the input" if threat.grid == "input" else "")


def limit(shape: AnyRectangle) -> str:
    """How large a rectangle of any shape may be."""
    return f"{shape.area} px" if shape.area is not None else f"{str(shape)[4:]} of the image"


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
        return f"any rectangle of up to {limit(shape)}"
    if isinstance(shape, SquareShare):
        side = study.run.threat.shapes(study.size)[0][0]
        common = "" if len(study.sizes) == 1 else ", the commonest size"
        return f"a square patch of {shape} of the image ({px((side, side))} at {px(study.size)}{common})"
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
    if counts is None:
        return "none"
    down, across = counts
    return f"{down}×{across}"


def mask_sizes(study: Study) -> str:
    """The masks themselves: "9 masks of 15×15 px"; of many sizes of images, those of the commonest."""
    if not study.has_masks:
        return "no masks"
    sizes = {(w.height, w.width) for mask in study.masks.masks for w in mask}
    of = f" of {px(next(iter(sizes)))}" if len(sizes) == 1 and study.run.threat.count == 1 else ""
    many = len(study.sizes)
    at = "" if many == 1 else f" for images of {px(study.size)}, the commonest of {many:,} sizes"
    return f"{len(study.masks):,} masks{of}{at}"


def counted(study: Study) -> str:
    """What the number of classifications counts: the documents speak of the masks alone."""
    if not study.has_masks:
        return "A classification is one input of the network, whole or ablated."
    pairs = len(study.masks) if study.detects else len(study.masks.unions)
    if study.per_image[0] != pairs + 1:
        return "Of the classifications of an image one is the undefended answer."
    under = "the masks" if study.detects else "the masks and their pairs"
    masks = f"{len(study.masks):,} masks"
    return f"Of the {pairs + 1:,} classifications with {masks}, {pairs:,} are under {under} and one is undefended."


def defense(study: Study) -> str:
    """The defense with its options."""
    name = str(study.run.job["defense"])
    options = [f"{key} {value}" for key, value in sorted(study.run.job.get("options", {}).items())]
    return defense_title(name) + (f" ({', '.join(options)})" if options else "")


def defense_title(name: str) -> str:
    """What a defense is called; a run may name one that this version does not have."""
    return DEFENSES[name].title if name in DEFENSES else name


def how(study: Study) -> str:
    """How the defense works, in one sentence."""
    name = study.run.job["defense"]
    return DEFENSES[name].summary if name in DEFENSES else ""


def attack_name(study: Study) -> str:
    """What the attack is called."""
    name = str(study.run.job["attack"])
    return ATTACKS[name].title if name in ATTACKS else name


def attacker(study: Study) -> str:
    """The attack with its budget: "Auto-PGD (100 iterations, 1 location)"; what is as usual goes without saying."""
    it = study.run.job["settings"]
    said = [f"{it['iterations']:,} iterations", f"{it['locations']:,} locations"]
    said += [f"{it['restarts']} restarts"] if it["restarts"] > 1 else []
    said += ["searched"] if it["places"] == "searched" else []
    said += [f"{it['loss']} loss"] if it["loss"] != "margin" else []
    said += [f"target {study.answer_name(it['target'])}"] if it["target"] is not None else []
    said += [f"seed {it['seed']}"] if it["seed"] else []
    budget = re.sub(r"\b1 (iteration|location)s", r"1 \1", ", ".join(said))
    return f"{attack_name(study)} ({budget})"


def model(study: Study) -> str:
    """What the model is called, or the start of its hash."""
    return brief(str(study.metadata("model") or f"classifier {str(study.run.job.get('classifier'))[:10]}"))


def data(study: Study) -> str:
    """What the images are called, or the start of their hash."""
    name = brief(str(study.metadata("data") or f"data {str(study.run.job.get('data'))[:10]}"))
    return f"{name} ({study.metadata('split')})" if study.metadata("split") else name


def brief(text: str) -> str:
    """Text in which a path from the root keeps its last name only: pages are mailed, and say nothing of the house.

    >>> [brief(text) for text in ("folder:/home/me/photos/", "hf-hub:timm/vit", "certify --data /a/b --out runs/c")]
    ['folder:photos', 'hf-hub:timm/vit', 'certify --data b --out runs/c']
    """
    return PATHS.sub(r"\1", text)


def facets(study: Study) -> dict[str, str]:
    """What may differ between the runs of a sweep."""
    return {
        "Model": model(study),
        "Data": data(study),
        "Patch": patch(study.run.threat),
        "Masks": masks(study),
        "Defense": defense(study),
        "Labels": str(study.run.job.get("precision", "exact")),
        **({"Attack": attacker(study)} if study.attacked else {}),
    }


def varying(studies: Sequence[Study]) -> list[str]:
    """The facets in which these runs differ."""
    found = [facets(study) for study in studies]
    return [name for name in found[0] if len({facet[name] for facet in found}) > 1]


def deciding(studies: Sequence[Study], values: Sequence[str]) -> list[str]:
    """The facets that a value varies with: some two runs differ in nothing else, and in the value."""
    pairs = combinations(zip((facets(study) for study in studies), values, strict=True), 2)
    apart = [[n for n in one if one[n] != other[n]] for (one, value), (other, its) in pairs if value != its]
    alone = {names[0] for names in apart if len(names) == 1}
    return [name for name in varying(studies) if name in alone]


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
    listed = [
        f"{PLURAL[n] if n in differs else n}: {', '.join(dict.fromkeys(values[n]))}." for n in PLURAL if n in values
    ]
    return " ".join([f"{how_many(studies)} of {model} on {data}, {many}.", *listed])


def how_many(studies: Sequence[Study]) -> str:
    """How many runs, and how many of them promise less."""
    detect = sum(study.detects for study in studies)
    return f"{len(studies)} runs" + (f" ({detect} detection-only)" if 0 < detect < len(studies) else "")


COUNTED = {"Model": "models", "Data": "datasets"}
PLURAL = {"Patch": "Patches", "Masks": "Masks", "Defense": "Defenses", "Attack": "Attacks"}


def names(studies: Sequence[Study]) -> list[str]:
    """A short name for each run: what sets it apart from the others, and its folder where that is not enough."""
    if len(studies) == 1:
        return [studies[0].run.folder.resolve().name]
    differs = varying(studies)
    said = [" · ".join(told(name, facets(study)[name]) for name in differs) for study in studies]
    return [
        name if said.count(name) == 1 else f"{name} · {folder}".removeprefix(" · ")
        for name, folder in zip(said, folders(studies), strict=True)
    ]


def told(name: str, value: str) -> str:
    """A facet that can stand alone."""
    noun = {"Patch": "patch", "Masks": "masks", "Labels": "labels"}.get(name)
    return value if noun is None or "rectangle" in value else f"{value} {noun}"


def folders(studies: Sequence[Study]) -> list[str]:
    """The folders of runs, without what all of them lie in."""
    paths = [study.run.folder.resolve() for study in studies]
    shared = min(len(path.parts) for path in paths) - 1
    while shared and len({path.parts[:shared] for path in paths}) > 1:
        shared -= 1
    return [str(Path(*path.parts[shared:])) for path in paths]


def px(size: Size) -> str:
    """A size in pixels: 32×32 px."""
    return f"{size[0]}×{size[1]} px"
