"""SVHN and Flowers-102, whose files are MATLAB's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.data.base import ArrayDataset, Dataset, EncodedDataset
from patchcleanser.data.digits import DIGITS, read_digits
from patchcleanser.data.files import Files
from patchcleanser.errors import DataError, MissingDependencyError

SETS = {"train": "trnid", "val": "valid", "test": "tstid"}
FLOWERS = 102


def require_scipy() -> Any:
    """The reader of .mat files, asked for before anything is downloaded in vain."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError.of("scipy", "data") from error
    return loadmat


def read_mat(path: Path, *names: str) -> list[NDArray[Any]]:
    """Variables of a .mat file, without axes of length 1."""
    load = require_scipy()
    if not path.is_file():
        raise DataError(f"no {path.name} in {path.parent}; put it there")
    try:
        content = load(path, squeeze_me=True)
        return [np.asarray(content[name]) for name in names]
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a whole file with {', '.join(names)}: {error}") from error


def read_svhn(place: Path, split: str) -> Dataset:
    """From {split}_32x32.mat: X is [32, 32, 3, N], and y says 10 for the digit 0; or cut from full house numbers."""
    if place.is_dir():
        return read_digits(place, split)
    pixels, digits = read_mat(place, "X", "y")
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
        raise DataError(f"{place} holds {pixels.dtype} {pixels.shape} in X; SVHN is uint8 (32, 32, 3, images)")
    images = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))
    labels = digits.astype(np.int64)
    if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) <= 10:
        raise DataError(f"{place} holds labels from {labels.min()} to {labels.max()}; SVHN has 1 to 10")
    return ArrayDataset(f"svhn-{split}", images, labels % 10, DIGITS)


def read_flowers102(place: Path, split: str) -> Dataset:
    """From setid.mat (`place`), imagelabels.mat and jpg/image_00001.jpg …, all counted from 1."""
    (numbers,) = read_mat(place, SETS[split])
    (labels,) = read_mat(place.parent / "imagelabels.mat", "labels")
    if not (place.parent / "jpg").is_dir():
        raise DataError(f"no folder jpg in {place.parent}; unpack 102flowers.tgz there")
    numbers = np.atleast_1d(numbers).astype(np.int64)
    if not (len(numbers) and 1 <= numbers.min() <= numbers.max() <= len(labels)):
        raise DataError(f"{place} names images outside 1 to {len(labels)}, the number in imagelabels.mat")
    files = [place.parent / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    chosen = np.asarray(labels, dtype=np.int64)[numbers - 1] - 1
    return EncodedDataset(f"flowers102-{split}", [f.name for f in files], Files(files), chosen, _flowers())


def _flowers() -> tuple[str, ...]:
    from torchvision.datasets import Flowers102

    return tuple(getattr(Flowers102, "classes", map(str, range(1, FLOWERS + 1))))  # older versions have no names


def fetch_svhn(folder: Path, split: str) -> None:
    """Into `folder`, by torchvision."""
    from torchvision.datasets import SVHN

    require_scipy()
    SVHN(folder, split=split, download=True)


def fetch_flowers102(folder: Path, split: str) -> None:
    """Into `folder`, by torchvision; all splits come together."""
    from torchvision.datasets import Flowers102

    require_scipy()
    Flowers102(folder, split=split, download=True)
