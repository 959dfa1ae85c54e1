"""Runs in plain words: the threat, the defense, the attack, and what sets several runs apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from patchcleanser.attacks import ATTACKS
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size
from patchcleanser.core.threats import AnyRectangle, Rectangle, SquareShare, Threat
from patchcleanser.defenses import DEFENSES
from patchcleanser.reports.run_results import RunResult

PATHS = re.compile(r"(?<![\w.~<>/])~?/(?:[^\s\"',:;/<>]+/)+([^\s\"',:;/<>]+)/?")


def patch(threat: Threat) -> str:
    """The patch in a few characters, for a table.

    >>> [patch(Threat.parse(t)) for t in ("5", "2%", "any:1%")]
    ['5×5 px', '2%', 'any rectangle of up to 1% of the image']
    """
    if isinstance(threat.shape, AnyRectangle):
        limit = _area_limit(threat.shape)
        many = f"any {threat.count} rectangles of up to {limit} each"
        text = f"any rectangle of up to {limit}" if threat.count == 1 else many
    else:
        text = _shape(threat) if threat.count == 1 else f"{threat.count} × {_shape(threat)}"
    text += "" if threat.region is None else f" inside {threat.region}"
    return text + (" on the input" if threat.grid == "input" else "")


def _area_limit(shape: AnyRectangle) -> str:
    return f"{shape.area} px" if shape.area is not None else f"{str(shape)[4:]} of the image"


def _shape(threat: Threat) -> str:
    """The shape of one patch, as px or as a share of the image."""
    shape = threat.shape
    return px((shape.height, shape.width)) if isinstance(shape, Rectangle) else str(shape)


def any_patch(result: RunResult) -> str:
    """The threat in a few words, for a headline: "any 5×5 px patch"."""
    threat = result.run.threat
    if isinstance(threat.shape, AnyRectangle):
        return patch(replace(threat, region=None, grid="source"))
    return f"any {_shape(threat)} patch" if threat.count == 1 else f"any {threat.count} patches of {_shape(threat)}"


def threat(result: RunResult) -> str:
    """The threat as a phrase: "a patch of 5×5 px, anywhere in the image"."""
    threat = result.run.threat
    shape = f"a patch of {_shape(threat)}"
    if isinstance(threat.shape, AnyRectangle):
        shape = f"any rectangle of up to {_area_limit(threat.shape)}"
    elif isinstance(threat.shape, SquareShare):
        side = threat.shapes(result.size)[0][0]
        common = "" if len(result.sizes) == 1 else ", the most common size"
        shape = f"a square patch of {threat.shape} of the image ({px((side, side))} at {px(result.size)}{common})"
    many = "" if threat.count == 1 else f"{threat.count} patches at once, each "
    where = "anywhere in the image" if threat.region is None else f"inside the window {threat.region}"
    return f"{many}{shape}, {where}"


def grid(result: RunResult) -> str:
    """The pixels that the threat refers to."""
    if result.run.threat.grid == "input":
        return "on the classifier's input, after resizing and cropping"
    return "on the original image, before any resizing"


def masks(result: RunResult) -> str:
    """The mask setting: masks per axis, or a stride."""
    stride, counts = result.run.job.get("stride"), result.run.job.get("masks")
    if stride:
        return f"stride {stride[0]}" if stride[0] == stride[1] else f"stride {stride[0]}×{stride[1]}"
    return "none" if counts is None else f"{counts[0]}×{counts[1]}"


def mask_sizes(result: RunResult) -> str:
    """The masks themselves: "9 masks of 15×15 px"; where images differ in size, those of the most common."""
    if not result.has_masks:
        return "no masks"
    sizes = {(w.height, w.width) for mask in result.masks.masks for w in mask}
    of = f" of {px(next(iter(sizes)))}" if len(sizes) == 1 and result.run.threat.count == 1 else ""
    many = len(result.sizes)
    at = "" if many == 1 else f" for images of {px(result.size)}, the most common of {many:,} sizes"
    return f"{counted(len(result.masks), 'mask')}{of}{at}"


def most_classifications(result: RunResult) -> str | None:
    """The most that a certificate takes, and of what: "46: 9 masks, 36 pairs, 1 unmasked"; None without masks."""
    if not result.has_masks or result.run.job.get("receptive_field"):
        return None
    parts = {"mask": len(result.masks)}
    if not result.detects:
        parts["pair"] = len(result.masks.unions) - len(result.masks)
    if coarse := result.run.coarse_mask_set(result.size):
        parts["coarse mask"] = len(coarse)
    at = "" if len(result.sizes) == 1 else f" (images of {px(result.size)})"
    counts = ", ".join(counted(number, noun) for noun, number in parts.items() if number)
    return f"{sum(parts.values()) + 1:,}: {counts}, 1 unmasked{at}"


def classifications_note(results: Sequence[RunResult]) -> str:
    """What the numbers of classifications count."""
    return " ".join(dict.fromkeys(_classification(result) for result in results))


def _classification(result: RunResult) -> str:
    if not result.has_masks:
        return "A classification is one input of the network, complete or ablated."
    if result.run.job.get("receptive_field"):
        if result.per_image[0] == 1:
            return "A classification is one input of the network; the labels under all masks come from a single one."
        return "A classification is one input of the network's head; its trunk looks at each image once."
    return (
        "At most one classification is needed under each mask, one under each pair of masks (detection needs none), "
        "and one of the unmasked image, the undefended answer. An image that cannot be certified may take fewer."
    )


def margin(result: RunResult) -> str:
    """What the margin of a certified image is."""
    if result.has_masks:
        return "the smallest difference between the two highest logits, among the labels that its certificate rests on"
    return "how far its true label stays ahead under the worst patch, in the scores of the defense"


def defense(result: RunResult) -> str:
    """The defense with its options."""
    options = [f"{key} {value}" for key, value in sorted(result.run.job.get("options", {}).items())]
    return defense_title(str(result.run.job["defense"])) + (f" ({', '.join(options)})" if options else "")


def defense_title(name: str) -> str:
    """The title of a defense; a run may name one that this version does not have."""
    return DEFENSES[name].title if name in DEFENSES else name


def defense_summary(result: RunResult) -> str:
    """How the defense works, in one sentence."""
    name = result.run.job["defense"]
    return DEFENSES[name].summary if name in DEFENSES else ""


def attack_name(result: RunResult) -> str:
    """The title of the attack."""
    name = str(result.run.job["attack"])
    return ATTACKS[name].title if name in ATTACKS else name


def attack_with_budget(result: RunResult) -> str:
    """The attack with its budget, defaults omitted: "Auto-PGD (100 iterations, 1 location)"."""
    settings = result.run.job["settings"]
    parts = [counted(settings["iterations"], "iteration"), counted(settings["locations"], "location")]
    parts += [f"{settings['restarts']} restarts"] if settings["restarts"] > 1 else []
    parts += ["searched"] if settings["places"] == "searched" else []
    parts += [f"{settings['loss']} loss"] if settings["loss"] != "margin" else []
    parts += [f"target {result.answer_name(settings['target'])}"] if settings["target"] is not None else []
    parts += [f"seed {settings['seed']}"] if settings["seed"] else []
    return f"{attack_name(result)} ({', '.join(parts)})"


WAYS = {"random": ", drawn at random from the data", "first": ", the first of the data"}
WAYS |= {"authors": ", chosen as the paper's code does"}
"""How --subset chooses images."""


def chosen_images(result: RunResult) -> str:
    """How the images of an attack were chosen, and which of them have pictures."""
    options = result.options("attack")
    way = WAYS.get(str(options.get("subset")), "") if options.get("limit") else ", all of the data" if options else ""
    images = counted(result.run.images, "image")
    return f"Attacked: {images}{way}, certified or not. Pictures are of the first ones, and of all that were fooled."


def classes_so_far(result: RunResult) -> str:
    """How many classes the images of an unfinished run have: "3 of 10 classes so far"."""
    names, classes = result.metadata("classes"), len(result.classes)
    if isinstance(names, list) and len(names) >= classes:
        return f"{classes:,} of {counted(len(names), 'class')} so far"
    return f"{counted(classes, 'class')} so far"


def model(result: RunResult) -> str:
    """The name of the model, or the start of its hash."""
    return shorten_paths(str(result.metadata("model") or f"classifier {str(result.run.job.get('classifier'))[:10]}"))


PACKAGED = {
    "zoo:tiny": "a small packaged classifier",
    "sample": "300 CIFAR-10 test images that come with the package",
}
"""Models and data that a reader cannot look up elsewhere."""


def explained(name: str) -> str:
    """The name of a model or of data, with what it is if only this package has it."""
    return f"{name} ({PACKAGED[name]})" if name in PACKAGED else name


def data(result: RunResult) -> str:
    """The name of the dataset, or the start of its hash."""
    name = shorten_paths(str(result.metadata("data") or f"data {str(result.run.job.get('data'))[:10]}"))
    return f"{name} ({result.metadata('split')})" if result.metadata("split") else name


def shorten_paths(text: str) -> str:
    """Reduce absolute paths in a text to their last name: reports are shared, and paths may be private.

    >>> texts = ("folder:/home/me/photos/", "hf-hub:timm/vit", "certify --data /a/b --out runs/c")
    >>> [shorten_paths(text) for text in texts]
    ['folder:photos', 'hf-hub:timm/vit', 'certify --data b --out runs/c']
    """
    return PATHS.sub(r"\1", text)


MAX_ID_LENGTH = 44
"""Characters of an id on the page."""
PARQUET_ROW = re.compile(r"^[^/:]*:\d+:(?=.)")
"""What precedes the name of an image in the id of a row of a Parquet file."""


def short_id(name: str) -> str:
    """What a reader needs of an id: no file and row before the image's own name, and only the end of a long path.

    >>> short_id("sample.parquet:5:test/05765.png"), short_id("train.parquet:5:"), short_id("folder/" * 9 + "a.png")
    ('test/05765.png', 'train.parquet:5:', '…/folder/folder/folder/folder/folder/a.png')
    """
    name = PARQUET_ROW.sub("", name)
    if len(name) <= MAX_ID_LENGTH:
        return name
    end = name[2 - MAX_ID_LENGTH :]
    return f"…/{end.partition('/')[2] or end}" if "/" in end else f"…{end}"


def facets(result: RunResult) -> dict[str, str]:
    """What may differ between the runs of a sweep."""
    return {
        "Model": model(result),
        "Data": data(result),
        "Patch": patch(result.run.threat),
        "Masks": masks(result),
        "Defense": defense(result),
        "Labels": str(result.run.job.get("precision", "exact")),
        **({"Attack": attack_with_budget(result)} if result.attacked else {}),
    }


def varying(results: Sequence[RunResult]) -> list[str]:
    """The facets in which these runs differ."""
    each = [facets(result) for result in results]
    return [name for name in each[0] if len({facet[name] for facet in each}) > 1]


def deciding(results: Sequence[RunResult], values: Sequence[str]) -> list[str]:
    """The facets that change a value: some two runs differ only in this facet, and in the value."""
    pairs = combinations(zip((facets(result) for result in results), values, strict=True), 2)
    differing = [[n for n in a if a[n] != b[n]] for (a, a_value), (b, b_value) in pairs if a_value != b_value]
    alone = {names[0] for names in differing if len(names) == 1}
    return [name for name in varying(results) if name in alone]


def overview(results: Sequence[RunResult]) -> str:
    """Several runs in a few sentences: what they share, and the values in which they differ."""
    each = [facets(result) for result in results]
    values = {name: list(dict.fromkeys(facet[name] for facet in each)) for name in each[0]}
    model, data = (
        explained(values[name][0]) if len(values[name]) == 1 else f"{len(values[name])} {noun}"
        for name, noun in (("Model", "models"), ("Data", "datasets"))
    )
    detecting = sum(result.detects for result in results)
    detection_only = f" ({detecting} detection-only)" if 0 < detecting < len(results) else ""
    images = sorted({result.summary.images for result in results})
    many = f"{counted(images[0], 'image')} each" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,} images each"
    plurals = {"Patch": "Patches", "Masks": "Masks", "Defense": "Defenses", "Attack": "Attacks"}
    lists = [
        f"{plural if len(values[name]) > 1 else name}: {', '.join(values[name])}."
        for name, plural in plurals.items()
        if name in values
    ]
    sentences = [f"{len(results)} runs{detection_only} of {model} on {data}, {many}.", *lists, cost_in_words(results)]
    return " ".join(filter(None, sentences))


def cost_in_words(results: Sequence[RunResult]) -> str:
    """What certifying costs where it differs: "Certified at 105 instead of 443 classifications an image."."""
    costs = [f"{result.per_image[0]:,.0f}" for result in results if not result.attacked]
    if len({*costs}) < 2 or len({result.detects for result in results}) > 1:
        return ""
    ends = sorted(costs, key=lambda cost: int(cost.replace(",", "")))
    many = f"{costs[0]} instead of {costs[1]}" if len(costs) == 2 else f"{ends[0]} to {ends[-1]}"
    return f"Certified at {many} classifications an image."


def run_names(results: Sequence[RunResult]) -> list[str]:
    """A short name for each run: the facets that differ, and the folder where these are equal."""
    if len(results) == 1:
        (result,) = results
        masked = f", {with_noun('Masks', masks(result))}" if result.has_masks else ""
        return [attack_with_budget(result) if result.attacked else f"{defense(result)}{masked}"]
    differs = varying(results)
    names = [" · ".join(with_noun(name, facets(result)[name]) for name in differs) for result in results]
    return [
        name if names.count(name) == 1 else f"{name} · {folder}".removeprefix(" · ")
        for name, folder in zip(names, folders(results), strict=True)
    ]


def with_noun(name: str, value: str) -> str:
    """The value of a facet, understandable alone: "3×3 masks"."""
    noun = {"Patch": "patch", "Masks": "masks", "Labels": "labels"}.get(name)
    return value if noun is None or "rectangle" in value else f"{value} {noun}"


def folders(results: Sequence[RunResult]) -> list[str]:
    """The folders of runs, without the parents that all of them share."""
    paths = [result.run.folder.resolve() for result in results]
    shared = min(len(path.parts) for path in paths) - 1
    while shared and len({path.parts[:shared] for path in paths}) > 1:
        shared -= 1
    return [str(Path(*path.parts[shared:])) for path in paths]


def px(size: Size) -> str:
    """A size in pixels: 32×32 px."""
    return f"{size[0]}×{size[1]} px"
