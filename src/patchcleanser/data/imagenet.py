"""ImageNet, Imagenette and Tiny-ImageNet: class folders named by WordNet ids, and boxes of objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Window
from patchcleanser.data.boxes import ImageBoxes, clip_box, read_boxes
from patchcleanser.data.dataset import Dataset, EncodedDataset
from patchcleanser.data.folders import FileContents, load_folder
from patchcleanser.data.torchvision_sets import read_mat
from patchcleanser.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
IMAGENETTE = (
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)
BOX_FOLDERS = ("bbox/val", "Annotations/CLS-LOC/val", "ILSVRC2012_bbox_val_v3/val")
"""Where ImageNet's box files lie: unpacked by hand, or as the 2012 challenge and its later copies pack them."""
TINY_LIST = "val_annotations.txt"


def read_imagenet(path: Path, split: str) -> Dataset:
    """Read class folders n01440764 and so on, any number of them; val also flat, beside the devkit.

    A class keeps its ImageNet number even if folders are missing, so that a part of ImageNet
    (Imagenette, say) can be given to an ImageNet classifier.
    """
    images, wnids = load_folder(path), imagenet_classes()[0]
    if images.labels is None:
        labels = _read_devkit(path, images.ids, wnids)
        return EncodedDataset("imagenet-val", images.ids, images.contents, labels, imagenet_classes()[1])
    return _read_class_folders(images, f"imagenet-{split}", wnids)


def read_imagenette(path: Path, split: str) -> Dataset:
    """Read the ten class folders."""
    return _read_class_folders(load_folder(path), f"imagenette-{split}", IMAGENETTE)


def read_tiny_imagenet(path: Path, split: str) -> Dataset:
    """200 classes of ImageNet at 64×64: train in class folders, val in one folder beside its list.

    Classes are numbered in the order of their WordNet ids and named as ImageNet's, so that a
    classifier of 1,000 named classes can be matched with them.
    """
    known_ids = set(imagenet_classes()[0])
    if split == "train":
        images = load_folder(path)
        wnids = sorted(known_ids.intersection(images.classes) or known_ids)
        return _read_class_folders(images, "tiny-imagenet-train", wnids)
    rows = _read_tiny_list(path / TINY_LIST)
    wnids = sorted({wnid for _, wnid, _ in rows})
    unknown = [wnid for wnid in wnids if wnid not in known_ids]
    if unknown:
        raise DataError(f"{path / TINY_LIST} names the class {unknown[0]}, which is none of ImageNet's")
    labels = np.array([wnids.index(wnid) for _, wnid, _ in rows], dtype=np.int64)
    files = [file for file, _, _ in rows]
    contents = FileContents([path / "images" / file for file in files])
    return EncodedDataset(f"tiny-imagenet-{split}", files, contents, labels, _class_names(wnids))


def imagenet_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """WordNet ids and names of the 1,000 classes, in ImageNet's order."""
    from timm.data import ImageNetInfo
    from torchvision.models import ResNet50_Weights

    return tuple(ImageNetInfo().label_names()), tuple(ResNet50_Weights.DEFAULT.meta["categories"])


def _class_names(wnids: Sequence[str]) -> list[str]:
    names = dict(zip(*imagenet_classes(), strict=True))
    return [names[wnid] for wnid in wnids]


def _read_class_folders(images: EncodedDataset, name: str, wnids: Sequence[str]) -> Dataset:
    """Images in folders named by WordNet ids; classes are numbered in the order of `wnids`."""
    unknown = sorted(set(images.classes) - set(wnids))
    if unknown or images.labels is None:
        got = ", ".join(unknown[:3]) or "pictures without folders"
        raise DataError(f"{name} lies in class folders {wnids[0]} to {wnids[-1]}, got {got}")
    numbers = np.array([wnids.index(folder) for folder in images.classes], dtype=np.int64)
    return EncodedDataset(name, images.ids, images.contents, numbers[images.labels], _class_names(wnids))


def _read_devkit(path: Path, ids: Sequence[str], wnids: Sequence[str]) -> NDArray[np.int64]:
    """The labels of ILSVRC2012_val_00000001.JPEG and so on, from the devkit beside their folder."""
    data = path.parent / DEVKIT / "data"
    if not (data / TRUTH).is_file():
        raise DataError(
            f"{path} has no class folders, and without {data / TRUTH} nothing says which class a picture has; "
            f"unpack {DEVKIT}.tar.gz in {path.parent}"
        )
    (synsets,) = read_mat(data / "meta.mat", "synsets")
    try:
        # The devkit numbers classes in an order of its own.
        numbered = zip(synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist(), strict=True)
        label_of = {int(number): wnids.index(wnid) for number, wnid in numbered if wnid in wnids}
        truth = np.array([label_of[int(line)] for line in (data / TRUTH).read_text().split()], dtype=np.int64)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{data} is not the ILSVRC 2012 devkit's: {error!r}") from error
    return truth[[_val_number(name, len(truth)) - 1 for name in ids]]


def _val_number(name: str, count: int) -> int:
    match = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
    if match is None or not 1 <= int(match[1]) <= count:
        raise DataError(f"{name!r} is not one of ILSVRC2012_val_00000001.JPEG to {count:08d}")
    return int(match[1])


def imagenet_boxes(root: Path, ids: Sequence[str]) -> dict[int, ImageBoxes]:
    """The boxes of each image that has an XML file, by its position in `ids`."""
    folder = next((root / folder for folder in BOX_FOLDERS if (root / folder).is_dir()), None)
    if folder is None:
        raise DataError(
            f"ImageNet's boxes are not in {root}: there is no {' or '.join(BOX_FOLDERS)}. With an account there, get "
            f"ILSVRC2012_bbox_val_v3.tgz from https://image-net.org/download-images and unpack it in {root / 'bbox'}"
        )
    paths = [folder / f"{Path(_file_name(id_)).stem}.xml" for id_ in ids]
    return {index: read_boxes(path) for index, path in enumerate(paths) if path.is_file()}


def tiny_imagenet_boxes(root: Path, ids: Sequence[str]) -> dict[int, ImageBoxes]:
    """The box of each val image, by its position in `ids`."""
    folders = (root / "tiny-imagenet-200" / "val", root / "val", root)
    path = next((folder / TINY_LIST for folder in folders if (folder / TINY_LIST).is_file()), None)
    if path is None:
        raise DataError(f"Tiny-ImageNet's boxes are not in {root}: there is no tiny-imagenet-200/val/{TINY_LIST}")
    boxes = {file: ImageBoxes((64, 64), (wnid,), (window,)) for file, wnid, window in _read_tiny_list(path)}
    files = [_file_name(id_) for id_ in ids]
    return {index: boxes[file] for index, file in enumerate(files) if file in boxes}


def _read_tiny_list(path: Path) -> list[tuple[str, str, Window]]:
    """Tiny-ImageNet's list: file, WordNet id, and the box of the object on 64×64 pixels."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        cells = line.split()
        if len(cells) != 6 or not all(cell.isdigit() for cell in cells[2:]):
            raise DataError(f"line {number} of {path} is {line!r}; it must be: file, class, and four numbers")
        left, top, right, bottom = map(int, cells[2:])
        # The last corner is the last pixel inside: a box of the full image ends at 63.
        rows.append((cells[0], cells[1], clip_box((left, top, right + 1, bottom + 1), (64, 64))))
    return rows


def _file_name(id_: str) -> str:
    """The file's own name in an id such as n01440764/a.JPEG, or of a Parquet row.

    >>> _file_name("val-0.parquet:7:ILSVRC2012_val_00000293.JPEG")
    'ILSVRC2012_val_00000293.JPEG'
    """
    return re.split(r"[/:]", id_)[-1]
