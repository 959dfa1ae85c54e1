"""patchcleanser data and models: the datasets and classifiers at hand, or one of them in detail."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, Limit, Root, Seed, Split, TrustCode, named_images
from patchcleanser.core.counts import counted
from patchcleanser.errors import ClassifierError, DataError, PatchCleanserError

if TYPE_CHECKING:
    from patchcleanser.classifiers import Classifier
    from patchcleanser.core.geometry import Size
    from patchcleanser.data import Dataset

SAMPLE = 16
"""Images that are read without --check."""

USUAL_SIZES = ((224, 224), (32, 32))
"""Pictures that are classified to see what a classifier gives."""

NAMES_SHOWN = 5
"""Names of classes that are printed of more than MAX_LINES."""

MAX_LINES = 20
"""Classes and unreadable images that are printed; JSON has all of them."""

SPECS = {
    "zoo:NAME": "trained here to survive masks; the list is below",
    "trained:FOLDER": "what `train` and `harden` write",
    "timm:NAME?weights=…": "any timm model; weights=hub (default), none or a file",
    "torchvision:NAME?weights=…": "any torchvision classification model",
    "transformers:FOLDER": "an image classifier in Hugging Face's layout, or a hub name",
    "onnx:FILE?mean=…&std=…": "run by ONNX Runtime; every kind takes mean, std, resize, crop and interpolation",
    "python:module:function": "whatever the function returns: a torch module or any function",
    "inpaint:SPEC": "the network of another spec, masked pixels inpainted from visible ones; its own certificates",
    "mirror:SPEC": "the mean of another spec's logits for an image and its mirror image, at twice the cost",
    "mean:SPEC,SPEC": "the mean of several networks' logits, at the sum of their costs",
    "tokens:SPEC": "the ViT of another spec without the tokens that masks hide; its own certificates",
    "visible:SPEC": "the local logits of another spec, or its features, that see no hidden pixel; for one-pass",
    "net:NAME": "untrained networks, most for 32×32 images; the list is below",
    "yolox:FILE": "a detector in an ONNX file, for --task detect; so is torchvision:NAME of a detector",
}


def data(
    name: Annotated[str | None, typer.Argument(help="One dataset: sample, cifar10, folder:PATH, …")] = None,
    split: Split = None,
    root: Root = None,
    check: Annotated[bool, typer.Option("--check", help="Read every image, and name the unreadable ones.")] = False,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """How datasets are named and which are here, or the details of one dataset."""
    from patchcleanser.data import chosen

    if name is None:
        _list_datasets(as_json)
        return
    dataset = chosen(named_images(name, split, root), limit, seed=seed)
    details = _dataset_details(dataset, len(dataset) if check else min(SAMPLE, len(dataset)))
    if as_json:
        print(json.dumps(details, indent=1))
    else:
        _print_dataset(details)
    if details["unreadable"]:
        count = len(details["unreadable"])
        raise DataError(f"{count} of {counted(details['read'], 'image')} read cannot be decoded; named above")


def _list_datasets(as_json: bool) -> None:
    from patchcleanser.data import DATASETS
    from patchcleanser.data.catalog import ANNOTATED, NAMED, cached_splits
    from patchcleanser.records.cache import cache_folder

    entries: list[dict[str, Any]] = []
    for name, text in {**DATASETS, **ANNOTATED}.items():
        splits, folder = (cached_splits(name), str(cache_folder() / name)) if name in NAMED else (None, None)
        entries.append({"name": name, "words": text, "here": splits, "folder": folder})
    if as_json:
        print(json.dumps(entries, indent=1))
        return
    print("a dataset is named as")
    for entry in entries:
        splits = entry["here"]
        where = "" if splits is None else f"; here: {', '.join(splits)}" if splits else "; not here"
        print(f"  {entry['name']:14} {entry['words']}{where}")
    print(f"\nnamed datasets are looked for in {cache_folder()}/NAME, or in --root")


def _dataset_details(dataset: Dataset, read: int) -> dict[str, Any]:
    """What is in a dataset; sizes (height x width) and unreadable images of its first `read` ones."""
    from patchcleanser.cli.progress import progress

    sizes: Counter[str] = Counter()
    unreadable = []
    with progress(f"reading {dataset.name}") if read > SAMPLE else nullcontext() as show:
        for index in range(read):
            try:
                _, height, width = dataset.image(index).shape
                sizes[f"{height}x{width}"] += 1
            except DataError as error:
                unreadable.append({"id": dataset.id(index), "error": str(error)})
            if show and index % 1000 == 999:
                show(index + 1, read, f"{len(unreadable)} unreadable")
    counts = Counter([] if dataset.labels is None else dataset.labels.tolist())
    return {
        "name": dataset.name,
        "images": len(dataset),
        "named_images": dataset.labels is not None,
        "classes": [{"name": name, "images": counts[label]} for label, name in enumerate(dataset.classes)],
        "read": read,
        "sizes": dict(sizes.most_common()),
        "unreadable": unreadable,
        "first_ids": [dataset.id(index) for index in range(min(3, len(dataset)))],
        "fingerprint": dataset.fingerprint,
    }


def _print_dataset(details: dict[str, Any]) -> None:
    classes, unreadable = details["classes"] if details["named_images"] else [], details["unreadable"]
    labels = counted(len(classes), "class") if details["named_images"] else "no labels"
    print(f"{details['name']}: {counted(details['images'], 'image')}, {labels}")
    for label, entry in enumerate(classes[:MAX_LINES]):
        print(f"  {label:4} {entry['name']:24} {entry['images']}")
    if len(classes) > MAX_LINES:
        print(f"  … and {len(classes) - MAX_LINES} more classes; --json has all")
    sizes = [f"{size} ({count})" for size, count in details["sizes"].items()]
    scope = "all" if details["read"] == details["images"] else f"the first {details['read']}; --check reads all"
    print(f"height x width   {', '.join(sizes[:5]) or 'none'}{', …' if len(sizes) > 5 else ''}, of {scope}")
    print(f"unreadable       {len(unreadable)}, of {scope}")
    for entry in unreadable[:MAX_LINES]:
        print(f"  {entry['error']}")
    print(f"first ids        {', '.join(details['first_ids'])}\nfingerprint      {details['fingerprint']}")


def models(
    name: Annotated[str | None, typer.Argument(help="One classifier, as for --model.")] = None,
    device: Device = "cpu",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """How classifiers are named, the zoo at hand, or the details of one classifier."""
    details = _zoo() if name is None else _classifier_details(name, device, trust_code)
    if as_json:
        print(json.dumps(details, indent=1))
    elif name is not None:
        for key, value in details.items():
            if key != "problem":  # it becomes the error
                print(f"{key:14} {_in_words(key, value) or 'not known'}")
    else:
        print("a classifier is named as")
        for spec, text in SPECS.items():
            print(f"  {spec:28} {text}")
        print(f"\nuntrained networks\n  net: {' '.join(details['networks'])}")
        print("\nthe zoo")
        for entry in details["zoo"]:
            size = f"{entry['megabytes']} MB" if entry["megabytes"] else "weights downloaded when first used"
            print(f"  zoo:{entry['name']:24} {entry['network']}, {size}, trained on {entry['data']}")
    if details.get("problem"):
        raise ClassifierError(f"{name} cannot classify a picture: {details['problem']}")


def _in_words(key: str, value: Any) -> str:
    """A detail of a classifier for people; JSON has all of it."""
    if key == "preprocessing":
        return _preprocessing_in_words(value)
    if isinstance(value, list):
        shown = value if len(value) <= MAX_LINES else value[:NAMES_SHOWN]
        return ", ".join(shown) + (f", … ({len(value):,} in all)" if len(value) > len(shown) else "")
    return "" if value is None else str(value)


def _preprocessing_in_words(values: dict[str, Any]) -> str:
    """As in a spec: sizes as 256x320, constants with commas between."""
    resize, crop, parts = values["resize"], values["crop"], []
    if resize:
        size = f"{resize} px for the short side" if isinstance(resize, int) else f"{resize[0]}x{resize[1]}"
        parts.append(f"resize {size}, {values['interpolation']}")
    parts += [f"crop {crop[0]}x{crop[1]}"] if crop else []
    constants = {name: values[name] for name in ("mean", "std", "fill") if values[name]}
    parts += [f"{name} {','.join(f'{part:g}' for part in constant)}" for name, constant in constants.items()]
    return "; ".join(parts) or "none: pixels from 0 to 1, as they are"


def _zoo() -> dict[str, Any]:
    from patchcleanser.classifiers.trained import read_card, zoo_folders
    from patchcleanser.networks.builders import NETWORKS

    zoo = []
    for name, folder in sorted(zoo_folders().items()):
        card = read_card(folder)
        weights = folder / "model.safetensors"
        size = round(weights.stat().st_size / 1e6, 1) if weights.is_file() else None
        entry = {"name": name, "network": card["model"], "megabytes": size}
        zoo.append({**entry, "data": card.get("data", {}).get("name"), "weights_sha256": card.get("weights_sha256")})
    return {"kinds": SPECS, "networks": list(NETWORKS), "zoo": zoo}


def _classifier_details(spec: str, device: str, trust_code: bool) -> dict[str, Any]:
    from patchcleanser.classifiers import load_classifier
    from patchcleanser.classifiers.torch import TorchClassifier

    classifier = load_classifier(spec, device=device, trust_code=trust_code)
    probe = _probe(classifier)
    details: dict[str, Any] = {"model": spec, "kind": type(classifier).__name__, "classes": classifier.classes}
    if isinstance(classifier, TorchClassifier):
        details["parameters"] = sum(p.numel() for p in classifier.module.parameters())
    details |= {"names": list(classifier.names or ()), "preprocessing": asdict(classifier.preprocessing)}
    return {**details, **probe, "fingerprint": classifier.fingerprint}


def _probe(classifier: Classifier) -> dict[str, str]:
    """What comes of classifying one grey picture, of a size that the classifier says it takes, or of a usual one."""
    from patchcleanser.classifiers.onnx import OnnxClassifier

    only = classifier.size if isinstance(classifier, OnnxClassifier) and classifier.preprocessing.free_size else None
    problems = []
    for size in [only] if only else USUAL_SIZES:
        try:
            classes = _classes_of_picture(classifier, size)
        except PatchCleanserError as error:
            problems.append(str(error))
            continue
        takes = {"takes": f"{size[0]}×{size[1]} px only; for others add ?resize={size[0]}x{size[1]}"} if only else {}
        return {"one picture": f"of {size[0]}×{size[1]} px gives {classes:,} scores", **takes}
    return {"problem": problems[0]}


def _classes_of_picture(classifier: Classifier, size: Size) -> int:
    """How many scores a classifier gives for one grey picture."""
    import torch

    from patchcleanser.core.label_table import LabelTable
    from patchcleanser.core.masks import MaskSet
    from patchcleanser.core.threats import Threat
    from patchcleanser.engine.exact import ExactEngine
    from patchcleanser.engine.masking import ImageState

    picture = torch.full((1, classifier.preprocessing.channels or 3, *size), 0.5, device=classifier.device)
    pixels = classifier.prepare(picture)[0]
    masks = MaskSet.build(Threat.square(1), image=(pixels.shape[1], pixels.shape[2]), masks=1)
    ExactEngine(classifier, grid="input", chunk=1).count_classes(ImageState(pixels, LabelTable(masks)))
    return int(classifier.classes or 0)
