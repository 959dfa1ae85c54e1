"""SVHN's digits cut from the full house numbers: PNG pictures beside XML files with a box for each digit.

The official 32×32 crops come in a Matlab file; these are made the same way (the box is widened to a
square and resized) but not byte for byte, so numbers measured on them say svhn-digits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.geometry import Size, Window
from patchcleanser.data.base import ArrayDataset
from patchcleanser.data.boxes import read_boxes
from patchcleanser.errors import DataError
from patchcleanser.records.atomic import whole_file

SIDE = 32
DIGITS = tuple(str(digit) for digit in range(10))


def read_digits(place: Path, split: str) -> ArrayDataset:
    """Every digit of a folder of house numbers (1.png and 1.xml, …), in the order of the files' numbers.

    The crops are kept in {split}_digits.npz beside the folder's parent, since cutting 33,402 pictures
    takes a minute.
    """
    kept = place.parent / f"{split}_digits.npz"
    if not kept.is_file():
        images, labels = _cut(place)
        try:
            with whole_file(kept) as part, part.open("wb") as file:
                np.savez(file, images=images, labels=labels)
        except DataError:
            return _dataset(images, labels, split)  # a folder that cannot be written to is cut each time
    with np.load(kept) as found:
        return _dataset(found["images"], found["labels"], split)


def _dataset(images: NDArray[np.uint8], labels: NDArray[np.int64], split: str) -> ArrayDataset:
    return ArrayDataset(f"svhn-digits-{split}", images, labels, DIGITS)


def _cut(place: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    files = sorted((p for p in place.glob("*.xml") if p.stem.isdigit()), key=lambda p: int(p.stem))
    if not files:
        raise DataError(f"no house numbers in {place}: there is no 1.xml, 2.xml and so on")
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for path in files:
        found = read_boxes(path)
        picture = _picture(path.with_suffix(".png"))
        for name, window in zip(found.names, found.windows, strict=True):
            if name not in (*DIGITS, "10"):
                raise DataError(f"{path} names a digit {name!r}; digits are 1 to 9, and 10 for 0")
            images.append(np.asarray(crop_square(picture, window)))
            labels.append(int(name) % 10)
    return np.stack(images), np.array(labels, dtype=np.int64)


def _picture(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def crop_square(picture: Image.Image, window: Window) -> Image.Image:
    """The square around a box, 32×32 pixels: neighbours come into sight, but no digit is distorted."""
    square = square_around(window, (picture.height, picture.width))
    corners = (square.left, square.top, square.right, square.bottom)
    return picture.crop(corners).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def square_around(window: Window, size: Size) -> Window:
    """The box widened to a square about its centre, moved inside the picture; narrower where the picture is.

    >>> square_around(Window(2, 1, 6, 2), size=(10, 20))
    Window(top=2, left=0, height=6, width=6)
    >>> square_around(Window(0, 0, 4, 9), size=(5, 20))
    Window(top=0, left=0, height=5, width=9)
    """
    side = max(window.height, window.width)
    height, width = min(side, size[0]), min(side, size[1])
    top = min(max(0, window.top + (window.height - height) // 2), size[0] - height)
    left = min(max(0, window.left + (window.width - width) // 2), size[1] - width)
    return Window(top, left, height, width)
