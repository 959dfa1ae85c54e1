"""Images with the boxes and classes of their objects: COCO's annotations, Pascal VOC's XML, YOLO's label files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from patchcleanser.core.detections import Detections, areas
from patchcleanser.data.boxes import read_boxes
from patchcleanser.data.coco_names import ALIASES, COCO_CLASSES, COCO_NUMBERS
from patchcleanser.data.dataset import AnnotatedDataset, Dataset, EncodedDataset, Subset
from patchcleanser.data.folders import SUFFIXES, FileContents
from patchcleanser.errors import DataError, InputError, did_you_mean

LYING = 5
"""From this EXIF orientation on, rows of a picture are its columns."""

NamedBox = tuple[str, tuple[float, float, float, float]]
"""A class name, and left, top, right and bottom in pixels."""


class ObjectDataset(AnnotatedDataset):
    """Images of a dataset, and their objects: true boxes and class numbers, with a score of 1."""

    crowds: Sequence[Sequence[int]] = ()
    """For each image, the classes of its crowds, which have no box for each object; () if there are none at all."""

    def __init__(self, images: Dataset, objects: Sequence[Detections], classes: Sequence[str]) -> None:
        if len(images) != len(objects):
            raise DataError(f"{images.name} has {len(images)} images, but objects of {len(objects)}")
        for index, each in enumerate(objects):
            if not (areas(each.boxes) > 0).all():
                raise DataError(
                    f"image {images.id(index)} of {images.name} has a box that is empty or inverted; a box is "
                    "left, top, right, bottom, with left < right and top < bottom"
                )
        self.images, self.objects = images, tuple(objects)
        self.name, self.classes, self.origin = images.name, tuple(classes), images.origin

    @property
    def fingerprint(self) -> str:
        """A hash of images, boxes and classes."""
        digest = hashlib.sha256(f"{self.images.fingerprint}\n{self.classes}".encode())
        for each in self.objects:
            digest.update(each.boxes.tobytes() + b"\n" + each.classes.tobytes())
        return digest.hexdigest()

    def pick(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> ObjectDataset:
        """The images of these numbers, in this order, with their objects."""
        numbers = np.asarray(indices, dtype=np.intp)
        return ObjectDataset(Subset(self.images, numbers), [self.objects[i] for i in numbers], self.classes)

    def renumbered(self, classes: Sequence[str]) -> tuple[ObjectDataset, list[str]]:
        """The objects under a detector's class numbers, by name, and the names of the classes that it does not have."""
        numbers = {plain_name(name): number for number, name in enumerate(classes)}
        table = np.array([numbers.get(plain_name(name), -1) for name in self.classes], dtype=np.int64)
        objects = []
        for each in self.objects:
            shared = table[each.classes] >= 0
            objects.append(Detections(each.boxes, table[each.classes], each.scores).pick(shared))
        missing = [name for name, number in zip(self.classes, table, strict=True) if number < 0]
        if len(missing) == len(self.classes):
            raise DataError(
                f"none of the classes of {self.name} ({', '.join(missing[:3])}, …) is one of the detector's"
            )
        return ObjectDataset(self.images, objects, classes), missing


def plain_name(name: str) -> str:
    """A class name in lower case with spaces, and as COCO spells it.

    >>> plain_name("Potted-Plant"), plain_name("tvmonitor")
    ('potted plant', 'tv')
    """
    text = re.sub(r"[\s_-]+", " ", name.strip().lower())
    return ALIASES.get(text, text)


def load_objects(address: str, *, root: Path | None = None) -> ObjectDataset:
    """Images with objects from an address `kind:path`.

    - ``coco:annotations/instances_val2017.json``: COCO's layout; the images lie in `root`, or where COCO puts them
    - ``voc:VOCdevkit/VOC2007``: Pascal VOC's layout, Annotations/*.xml and JPEGImages; ``voc:VOCdevkit/VOC2007?test``
      takes the images that ImageSets/Main/test.txt lists
    - ``yolo:images/train``: a folder of pictures, with a text file for each in labels/train: lines of
      `class cx cy w h` with COCO's 80 classes from 0, or of `image_id class cx cy w h` with COCO's numbers from 1 to 90
    - ``yolo:FOLDER`` takes images/ in it, if pictures lie there or in one folder below
    """
    kind, _, path = address.partition(":")
    if kind not in LAYOUTS or not path:
        kinds = ", ".join(f"{name}:PATH" for name in LAYOUTS)
        raise InputError(f"cannot read {address!r}; images with objects are {kinds}{did_you_mean(kind, LAYOUTS)}")
    return LAYOUTS[kind](Path(path).expanduser(), root)


def _dataset(name: str, paths: Sequence[Path], root: Path, boxes: Sequence[Sequence[NamedBox]]) -> ObjectDataset:
    """Images that lie under a root, and named boxes; classes are those that occur, in the order of names."""
    classes = sorted({label for each in boxes for label, _ in each})
    if not classes:
        raise DataError(f"{name} names no objects")
    ids = [path.relative_to(root).as_posix() for path in paths]
    objects = [
        Detections([box for _, box in each], [classes.index(label) for label, _ in each], np.ones(len(each)))
        for each in boxes
    ]
    objects = [each.pick(areas(each.boxes) > 0) for each in objects]
    return ObjectDataset(EncodedDataset(name, ids, FileContents(paths)), objects, classes)


def _load_coco(path: Path, root: Path | None) -> ObjectDataset:
    content = _read_json(path)
    try:
        names = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        entries = sorted(content["images"], key=lambda entry: str(entry["file_name"]))
        boxes: dict[int, list[NamedBox]] = {int(entry["id"]): [] for entry in entries}
        crowds: dict[int, set[str]] = {number: set() for number in boxes}
        for entry in content["annotations"]:
            left, top, width, height = map(float, entry["bbox"])
            number, name = int(entry["image_id"]), names[int(entry["category_id"])]
            if entry.get("iscrowd"):
                crowds[number].add(name)
            elif width > 0 and height > 0:
                boxes[number].append((name, (left, top, left + width, top + height)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not in the layout of COCO's annotations: {error!r}") from error
    files = [str(entry["file_name"]) for entry in entries]
    folder = root or _image_folder(path, files)
    for file in files:
        if not (folder / file).resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{path} names the picture {file!r}, which lies outside {folder}")
    numbers = [int(entry["id"]) for entry in entries]
    dataset = _dataset(path.stem, [folder / file for file in files], folder, [boxes[number] for number in numbers])
    classes = {name: number for number, name in enumerate(dataset.classes)}
    dataset.crowds = [[classes[name] for name in sorted(crowds[number]) if name in classes] for number in numbers]
    return dataset


def _image_folder(annotations: Path, files: Sequence[str]) -> Path:
    """The folder of pictures: that of the annotations, or SPLIT or images/SPLIT beside its folder."""
    split, above = annotations.stem.removeprefix("instances_"), annotations.parent.parent
    folders = [annotations.parent, above / split, above / "images" / split]
    for folder in folders:
        if files and (folder / files[0]).is_file():
            return folder
    raise DataError(f"no pictures of {annotations} in {', '.join(map(str, folders))}; give their folder by --root")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not in the layout of COCO's annotations: it holds no object")
    return content


def _load_voc(path: Path, root: Path | None) -> ObjectDataset:
    base, _, split = str(path).partition("?")
    folder = Path(base)
    annotations = sorted((folder / "Annotations").glob("*.xml"))
    if split:
        listed = folder / "ImageSets" / "Main" / f"{split}.txt"
        try:
            names = set(listed.read_text(encoding="utf-8").split())
        except OSError as error:
            raise DataError(f"cannot read {listed}: {error.strerror}") from error
        annotations = [file for file in annotations if file.stem in names]
    if not annotations:
        raise DataError(f"no annotations in {folder / 'Annotations'}; wanted is the folder of one year, as VOC2007")
    pictures = root or folder / "JPEGImages"
    boxes = []
    for file in annotations:
        content = read_boxes(file)
        pairs = zip(content.names, content.windows, strict=True)
        boxes.append([(label, (w.left, w.top, w.right, w.bottom)) for label, w in pairs])
    return _dataset(folder.name, [pictures / f"{file.stem}.jpg" for file in annotations], pictures, boxes)


def _load_yolo(path: Path, root: Path | None) -> ObjectDataset:
    path = _picture_folder(path)
    pictures = _pictures_in(path)
    parts = list(path.parts)
    if "images" in parts:  # the last one: a folder above may have that name, too
        parts[-1 - parts[::-1].index("images")] = "labels"
    labels = root or Path(*parts)
    boxes = [_read_lines(labels / f"{picture.stem}.txt", picture) for picture in pictures]
    return _dataset(path.name, pictures, path, boxes)


def _picture_folder(path: Path) -> Path:
    """The folder itself if pictures lie in it; else the one folder of pictures that is images/ in it, or below that."""
    if path.is_file():
        raise DataError(f"{path} is a file, not a folder; name the folder of the pictures")
    images = path if path.name == "images" else path / "images"
    below = sorted(folder for folder in images.glob("*") if folder.is_dir())
    folders = [path] if _pictures_in(path) else [folder for folder in (images, *below) if _pictures_in(folder)]
    if not folders:
        raise DataError(f"no pictures in {path}, in its folder images or below that; name the folder of the pictures")
    if len(folders) > 1:
        names = " and ".join(map(str, folders[:3])) + (", …" if folders[3:] else "")
        raise DataError(f"{path} has pictures in {names}; name one of these folders")
    return folders[0]


def _pictures_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix.lower() in SUFFIXES)


def _read_lines(path: Path, picture: Path) -> list[NamedBox]:
    """The objects of a picture; none if it has no label file, as in YOLO's layout."""
    if not path.is_file():
        return []
    try:
        with Image.open(picture) as opened:
            width, height = opened.size
            if opened.getexif().get(ExifTags.Base.Orientation, 1) >= LYING:  # it is turned upright when it is read
                width, height = height, width
        return [_parsed(line.split(), width, height) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError, LookupError) as error:
        raise DataError(f"{path} is not in YOLO's layout (class cx cy w h): {error}") from error


def _parsed(cells: Sequence[str], width: int, height: int) -> NamedBox:
    if len(cells) not in (5, 6):
        raise ValueError(f"a line has {len(cells)} columns")
    number = int(cells[len(cells) - 5])
    if number < 0:
        raise ValueError(f"class {number} is below 0")
    name = COCO_CLASSES[number] if len(cells) == 5 else COCO_NUMBERS[number]
    x, y, w, h = map(float, cells[-4:])
    corners = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
    return name, corners


LAYOUTS: dict[str, Callable[[Path, Path | None], ObjectDataset]] = {
    "coco": _load_coco,
    "voc": _load_voc,
    "yolo": _load_yolo,
}
