"""patchcleanser data: the datasets at hand, or one of them in detail."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Limit, Root, Seed, Split, named_images
from patchcleanser.errors import DataError

if TYPE_CHECKING:
    from patchcleanser.data import Dataset

LOOK = 16
"""So many images are read if not all of them are to be."""

SHOWN = 20
"""So many classes and unreadable images are printed; JSON has all of them."""


def data(
    name: Annotated[
        str | None, typer.Argument(help="One dataset: sample, cifar10, imagenet, folder:PATH, parquet:PATH, …")
    ] = None,
    split: Split = None,
    root: Root = None,
    check: Annotated[bool, typer.Option("--check", help="Read every image, and name those that cannot be.")] = False,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """How datasets are named and which are here, or one dataset's facts."""
    from patchcleanser.data import chosen

    if name is None:
        _tell_all(as_json)
        return
    dataset = chosen(named_images(name, split, root), limit, seed=seed)
    facts = _facts(dataset, len(dataset) if check else min(LOOK, len(dataset)), as_json)
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _tell(facts)
    if facts["unreadable"]:
        raise DataError(f"{len(facts['unreadable'])} of {facts['read']} images read cannot be decoded; named above")


def _tell_all(as_json: bool) -> None:
    from patchcleanser.data import DATASETS
    from patchcleanser.data.cache import cache_folder

    known = [_entry(name, words) for name, words in DATASETS.items()]
    if as_json:
        print(json.dumps(known, indent=1))
        return
    print("a dataset is named as")
    for entry in known:
        print(f"  {entry['name']:14} {entry['words']}{_whereabouts(entry)}")
    print(f"\nnamed datasets are looked for in {cache_folder()}/NAME, or in --root")


def _entry(name: str, words: str) -> dict[str, Any]:
    """`here` are the splits in the folder; None for what is not kept in one."""
    from patchcleanser.data.cache import cache_folder
    from patchcleanser.data.catalog import NAMED, cached_splits

    if name not in NAMED:
        return {"name": name, "words": words, "here": None, "folder": None}
    return {"name": name, "words": words, "here": cached_splits(name), "folder": str(cache_folder() / name)}


def _whereabouts(entry: dict[str, Any]) -> str:
    if entry["here"] is None:
        return ""
    return f"; here: {', '.join(entry['here'])}" if entry["here"] else "; not here"


def _facts(dataset: Dataset, look: int, quiet: bool) -> dict[str, Any]:
    sizes, unreadable = _looked(dataset, look, quiet)
    counts = Counter([] if dataset.labels is None else dataset.labels.tolist())
    classes = [{"name": name, "images": counts[label]} for label, name in enumerate(dataset.classes)]
    return {
        "name": dataset.name,
        "images": len(dataset),
        "named_images": dataset.labels is not None,
        "classes": classes,
        "read": look,
        "sizes": sizes,
        "unreadable": unreadable,
        "first_ids": [dataset.id(index) for index in range(min(3, len(dataset)))],
        "fingerprint": dataset.fingerprint,
    }


def _looked(dataset: Dataset, look: int, quiet: bool) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Sizes (height x width) of the first `look` images, and which of them cannot be read."""
    from patchcleanser.cli.progress import progress

    sizes: Counter[str] = Counter()
    unreadable = []
    with progress(f"reading {dataset.name}", quiet=quiet or look <= LOOK) as report:
        for index in range(look):
            try:
                _, height, width = dataset.image(index).shape
                sizes[f"{height}x{width}"] += 1
            except DataError as error:
                unreadable.append({"id": dataset.id(index), "error": str(error)})
            if index % 1000 == 999:
                report(index + 1, look, f"{len(unreadable)} unreadable")
    return dict(sizes.most_common()), unreadable


def _tell(facts: dict[str, Any]) -> None:
    classes, unreadable = facts["classes"], facts["unreadable"]
    named_images = f"{len(classes)} classes" if facts["named_images"] else "no labels"
    print(f"{facts['name']}: {facts['images']} images, {named_images}")
    for label, entry in enumerate(classes[:SHOWN] if facts["named_images"] else []):
        print(f"  {label:4} {entry['name']:24} {entry['images']}")
    if facts["named_images"] and len(classes) > SHOWN:
        print(f"  … and {len(classes) - SHOWN} more classes; --json has all")
    sizes = list(facts["sizes"].items())
    said = ", ".join(f"{size} ({count})" for size, count in sizes[:5]) + (", …" if len(sizes) > 5 else "")
    scope = "all" if facts["read"] == facts["images"] else f"the first {facts['read']}; --check reads all"
    print(f"height x width   {said or 'none'}, of {scope}")
    print(f"unreadable       {len(unreadable)}, of {scope}")
    for entry in unreadable[:SHOWN]:
        print(f"  {entry['error']}")
    print(f"first ids        {', '.join(facts['first_ids'])}\nfingerprint      {facts['fingerprint']}")
