"""ImageNet, Imagenette and Tiny-ImageNet: folders named by WordNet numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchcleanser.data.base import Dataset, EncodedDataset
from patchcleanser.data.boxes import TINY, tiny_lines
from patchcleanser.data.files import Files, load_folder
from patchcleanser.data.matlab import read_mat
from patchcleanser.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def read_imagenet(place: Path, split: str) -> Dataset:
    """From class folders n01440764 and so on, any number of them; val also flat, beside the devkit.

    A class has its ImageNet number even if folders are missing, so that a part of ImageNet
    (Imagenette, say) can be given to an ImageNet classifier.
    """
    pictures = load_folder(place)
    numbers, names = imagenet_classes()
    if pictures.labels is None:
        return _flat_val(pictures, place, numbers, names)
    return _renamed(pictures, f"imagenet-{split}", numbers, names)


def read_imagenette(place: Path, split: str) -> Dataset:
    """From its ten class folders."""
    return _renamed(load_folder(place), f"imagenette-{split}", tuple(IMAGENETTE), tuple(IMAGENETTE.values()))


def read_tiny_imagenet(place: Path, split: str) -> Dataset:
    """200 classes of ImageNet at 64×64: train in class folders, val in one folder beside its list.

    Classes are numbered in the order of their WordNet numbers and named as ImageNet's, so that a
    classifier of 1,000 classes that knows its names finds them.
    """
    name = f"tiny-imagenet-{split}"
    numbers, names = imagenet_classes()
    if split == "train":
        pictures = load_folder(place)
        mine = sorted(set(pictures.classes) & set(numbers))
        return _renamed(pictures, name, mine, [names[numbers.index(n)] for n in mine])
    lines = tiny_lines(place / TINY)
    mine = sorted({number for _, number, _ in lines})
    unknown = [number for number in mine if number not in numbers]
    if unknown:
        raise DataError(f"{place / TINY} names the class {unknown[0]}, which ImageNet has not")
    labels = np.array([mine.index(number) for _, number, _ in lines], dtype=np.int64)
    files = Files([place / "images" / file for file, _, _ in lines])
    return EncodedDataset(name, [file for file, _, _ in lines], files, labels, [names[numbers.index(n)] for n in mine])


def fetch_imagenette(folder: Path, split: str) -> None:
    """Into `folder`, by torchvision: both splits, the shorter side 320 pixels."""
    from torchvision.datasets import Imagenette

    Imagenette(folder, split=split, size="320px", download=True)


def imagenet_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """WordNet numbers and names of the 1,000 classes, in ImageNet's order."""
    from timm.data import ImageNetInfo
    from torchvision.models import ResNet50_Weights

    return tuple(ImageNetInfo().label_names()), tuple(ResNet50_Weights.DEFAULT.meta["categories"])


def _renamed(pictures: EncodedDataset, name: str, numbers: Sequence[str], names: Sequence[str]) -> Dataset:
    """Class folders named by WordNet numbers, as classes with names, in the order of `numbers`."""
    unknown = sorted(set(pictures.classes) - set(numbers))
    if unknown or pictures.labels is None:
        got = ", ".join(unknown[:3]) or "pictures without folders"
        raise DataError(f"{name} lies in class folders {numbers[0]} to {numbers[-1]}, got {got}")
    new = np.array([numbers.index(folder) for folder in pictures.classes], dtype=np.int64)
    return EncodedDataset(name, pictures.ids, pictures.contents, new[pictures.labels], names)


def _flat_val(pictures: EncodedDataset, place: Path, numbers: Sequence[str], names: Sequence[str]) -> Dataset:
    """ILSVRC2012_val_00000001.JPEG and so on; the devkit's lists say which class each one has."""
    data = place.parent / DEVKIT / "data"
    if not (data / TRUTH).is_file():
        raise DataError(
            f"{place} has no class folders, and without {data / TRUTH} nothing says which class a picture has; "
            f"unpack {DEVKIT}.tar.gz in {place.parent}"
        )
    (synsets,) = read_mat(data / "meta.mat", "synsets")
    try:
        # The devkit counts classes in an order of its own.
        label_of = {int(i): numbers.index(n) for i, n in zip(*_columns(synsets), strict=True) if n in numbers}
        truth = np.array([label_of[int(line)] for line in (data / TRUTH).read_text().split()], dtype=np.int64)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{data} is not the ILSVRC 2012 devkit's: {error!r}") from error
    positions = [_position(name, len(truth)) for name in pictures.ids]
    return EncodedDataset("imagenet-val", pictures.ids, pictures.contents, truth[positions], names)


def _columns(synsets: Any) -> tuple[list[int], list[str]]:
    return synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist()


def _position(name: str, count: int) -> int:
    match = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
    if match is None or not 1 <= int(match[1]) <= count:
        raise DataError(f"{name!r} is not one of ILSVRC2012_val_00000001.JPEG to {count:08d}")
    return int(match[1]) - 1
