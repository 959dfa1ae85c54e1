"""Boxes around objects: how much of a picture its objects take, for ImageNet and Tiny-ImageNet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from patchcleanser.core.geometry import Size, Window
from patchcleanser.data.cache import cache_folder
from patchcleanser.errors import DataError

IMAGENET = ("bbox/val", "Annotations/CLS-LOC/val", "ILSVRC2012_bbox_val_v3/val")
"""Where ImageNet's box files lie: unpacked by hand, or as the 2012 challenge and its later copies pack them."""
TINY = "val_annotations.txt"


@dataclass(frozen=True)
class Boxed:
    """A picture's size and its named boxes, clipped to the picture."""

    size: Size
    names: tuple[str, ...]
    windows: tuple[Window, ...]

    @property
    def share(self) -> float:
        """The share of the picture's pixels inside some box; boxes that overlap count once."""
        covered = np.zeros(self.size, dtype=bool)
        for w in self.windows:
            covered[w.top : w.bottom, w.left : w.right] = True
        return float(covered.mean())


def box(left: int, top: int, right: int, bottom: int, size: Size) -> Window:
    """A box between corners, `right` and `bottom` not inside, clipped to the picture; at least one pixel.

    >>> box(-2, 1, 4, 99, size=(5, 5))
    Window(top=1, left=0, height=4, width=4)
    """
    top, left = (min(max(0, at), side - 1) for at, side in zip((top, left), size, strict=True))
    bottom, right = min(max(bottom, top + 1), size[0]), min(max(right, left + 1), size[1])
    return Window(top, left, bottom - top, right - left)


def read_boxes(path: Path) -> Boxed:
    """An XML file as ImageNet has them (Pascal VOC's layout): size, and object by object a name and four corners."""
    try:
        root = ElementTree.parse(path).getroot()
        size = (_whole(root, "size/height"), _whole(root, "size/width"))
        objects = root.findall("object")
        names = tuple((found.findtext("name") or "").strip() for found in objects)
        corners = [[_whole(found, f"bndbox/{at}") for at in ("xmin", "ymin", "xmax", "ymax")] for found in objects]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path} is no box file in the layout of Pascal VOC: {error}") from error
    if min(size) < 1:
        raise DataError(f"{path} says the picture has {size[0]}×{size[1]} px")
    return Boxed(size, names, tuple(box(left, top, right, bottom, size) for left, top, right, bottom in corners))


def _whole(root: ElementTree.Element, where: str) -> int:
    text = root.findtext(where)
    if text is None:
        raise ValueError(f"it has no {where}")
    return round(float(text))


def object_shares(name: str, ids: Sequence[str], root: str | Path | None = None) -> dict[str, float]:
    """For each image that has boxes, by its id, the share of its pixels inside them. `name` is the dataset's."""
    return {ids[index]: found.share for index, found in boxed_images(name, ids, root).items()}


def boxed_images(name: str, ids: Sequence[str], root: str | Path | None = None) -> dict[int, Boxed]:
    """The boxes of each image that has any, by its place in the list of ids."""
    folder = cache_folder() / name if root is None else Path(root).expanduser()
    if name == "tiny-imagenet":
        return _tiny(folder, ids)
    if name == "imagenet":
        return _imagenet(folder, ids)
    raise DataError(f"{name} has no boxes; imagenet and tiny-imagenet have")


def _imagenet(folder: Path, ids: Sequence[str]) -> dict[int, Boxed]:
    place = next((folder / place for place in IMAGENET if (folder / place).is_dir()), None)
    if place is None:
        raise DataError(
            f"ImageNet's boxes are not in {folder}: there is no {' or '.join(IMAGENET)}. With an account there, get "
            f"ILSVRC2012_bbox_val_v3.tgz from https://image-net.org/download-images and unpack it in {folder / 'bbox'}"
        )
    files = [place / f"{Path(_file(name)).stem}.xml" for name in ids]
    return {index: read_boxes(path) for index, path in enumerate(files) if path.is_file()}


def _tiny(folder: Path, ids: Sequence[str]) -> dict[int, Boxed]:
    places = (folder / "tiny-imagenet-200" / "val", folder / "val", folder)
    place = next((place for place in places if (place / TINY).is_file()), None)
    if place is None:
        raise DataError(f"Tiny-ImageNet's boxes are not in {folder}: there is no tiny-imagenet-200/val/{TINY}")
    found = {file: Boxed((64, 64), (number,), (window,)) for file, number, window in tiny_lines(place / TINY)}
    return {index: found[_file(name)] for index, name in enumerate(ids) if _file(name) in found}


def tiny_lines(path: Path) -> list[tuple[str, str, Window]]:
    """Tiny-ImageNet's list: file, WordNet number, and the box of the object on 64×64 pixels."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if len(words) != 6 or not all(word.isdigit() for word in words[2:]):
            raise DataError(f"line {number} of {path} is {line!r}; it must be: file, class, and four numbers")
        left, top, right, bottom = map(int, words[2:])
        # The last corner is the last pixel inside: a box of the whole picture ends at 63.
        found.append((words[0], words[1], box(left, top, right + 1, bottom + 1, (64, 64))))
    return found


def _file(name: str) -> str:
    """The file's own name in an id such as n01440764/a.JPEG, or of a Parquet row.

    >>> _file("val-0.parquet:7:ILSVRC2012_val_00000293.JPEG")
    'ILSVRC2012_val_00000293.JPEG'
    """
    return re.split(r"[/:]", name)[-1]
