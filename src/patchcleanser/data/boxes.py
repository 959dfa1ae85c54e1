"""Bounding boxes of objects in images, from XML files in the layout of Pascal VOC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from patchcleanser.core.geometry import Size, Window
from patchcleanser.errors import DataError

CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class ImageBoxes:
    """The size of an image and its named boxes, clipped to the image."""

    size: Size
    names: tuple[str, ...]
    windows: tuple[Window, ...]

    @property
    def share(self) -> float:
        """The share of pixels inside some box; where boxes overlap, pixels count once."""
        covered = np.zeros(self.size, dtype=bool)
        for w in self.windows:
            covered[w.top : w.bottom, w.left : w.right] = True
        return float(covered.mean())


def clip_box(corners: Sequence[int], size: Size) -> Window:
    """The box from (left, top) up to, not including, (right, bottom), clipped to the image; at least one pixel.

    >>> clip_box((-2, 1, 4, 99), size=(5, 5))
    Window(top=1, left=0, height=4, width=4)
    """
    left, top, right, bottom = corners
    top, left = (min(max(0, start), side - 1) for start, side in zip((top, left), size, strict=True))
    bottom, right = min(max(bottom, top + 1), size[0]), min(max(right, left + 1), size[1])
    return Window(top, left, bottom - top, right - left)


def read_boxes(path: Path) -> ImageBoxes:
    """Read one XML file: the image's size, and for each object its name and corners."""
    try:
        root = ElementTree.parse(path).getroot()
        size = (_integer(root, "size/height"), _integer(root, "size/width"))
        objects = root.findall("object")
        names = tuple((entry.findtext("name") or "").strip() for entry in objects)
        corners = [[_integer(entry, f"bndbox/{corner}") for corner in CORNERS] for entry in objects]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path} is not a box file in the layout of Pascal VOC: {error}") from error
    if min(size) < 1:
        raise DataError(f"{path} says the picture has {size[0]}×{size[1]} px")
    return ImageBoxes(size, names, tuple(clip_box(box, size) for box in corners))


def _integer(element: ElementTree.Element, path: str) -> int:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"it has no {path}")
    return round(float(text))
