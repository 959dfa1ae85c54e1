"""Datasets known by name: which files they are read from, and how those get there."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from patchcleanser.data.base import Dataset
from patchcleanser.data.cache import arriving, cache_folder
from patchcleanser.data.cifar import fetch_cifar10, fetch_cifar100, read_cifar10, read_cifar100
from patchcleanser.data.imagenet import (
    fetch_imagenette,
    imagenet_classes,
    read_imagenet,
    read_imagenette,
    read_tiny_imagenet,
)
from patchcleanser.data.matlab import fetch_flowers102, fetch_svhn, read_flowers102, read_svhn
from patchcleanser.data.parquet import load_parquet
from patchcleanser.data.splits import split_of
from patchcleanser.errors import DataError


@dataclass(frozen=True)
class Named:
    """A dataset with a name.

    `places` says for each split what must lie in the root folder; of several, the first that is
    there is taken. One with a star is a pattern of Parquet files. `read` gets any other path, and the
    split. `fetch` downloads a split into a folder.
    """

    title: str
    words: str
    places: dict[str, tuple[str, ...]]
    advice: str
    read: Callable[[Path, str], Dataset]
    fetch: Callable[[Path, str], None] | None = None

    def place(self, root: Path, split: str) -> Path | None:
        """What `split` is read from, if it is in `root`, or if `root` is the innermost folder itself."""
        for wanted in self.places[split]:
            first, _, rest = wanted.partition("/")
            if "*" in wanted and next(root.glob(wanted), None) is not None:
                return root / wanted
            if (root / wanted).exists():
                return root / wanted
            if root.name == first and (root / rest).exists():
                return root / rest
        return None


NAMED: dict[str, Named] = {
    "cifar10": Named(
        "CIFAR-10",
        "60,000 images of 32x32 in 10 classes",
        {
            "train": ("cifar-10-batches-py/data_batch_1", "train.npz", "cifar10-train*.parquet"),
            "test": ("cifar-10-batches-py/test_batch", "test.npz", "cifar10-test*.parquet"),
        },
        "unpack cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html in {folder}",
        read_cifar10,
        fetch_cifar10,
    ),
    "cifar100": Named(
        "CIFAR-100",
        "60,000 images of 32x32 in 100 classes (the fine labels)",
        {split: (f"cifar-100-python/{split}", f"cifar100-{split}*.parquet") for split in ("train", "test")},
        "unpack cifar-100-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html in {folder}",
        read_cifar100,
        fetch_cifar100,
    ),
    "svhn": Named(
        "SVHN",
        "Street View house numbers: 99,289 digits of 32x32 (and 531,131 in the split extra)",
        {s: (f"{s}_32x32.mat", f"images/{s}", f"svhn-{s}*.parquet") for s in ("train", "test", "extra")},
        "put {split}_32x32.mat from http://ufldl.stanford.edu/housenumbers into {folder}, or full house numbers with "
        "their boxes (1.png, 1.xml and so on) into {folder}/images/{split}",
        read_svhn,
        fetch_svhn,
    ),
    "flowers102": Named(
        "Flowers-102",
        "8,189 photos of 102 kinds of flowers, of many sizes",
        {
            split: ("flowers-102/setid.mat", "setid.mat", f"flowers102-{split}*.parquet")
            for split in ("train", "val", "test")
        },
        "put setid.mat, imagelabels.mat and the folder jpg (unpacked from 102flowers.tgz) from "
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102 into {folder}/flowers-102",
        read_flowers102,
        fetch_flowers102,
    ),
    "imagenet": Named(
        "ImageNet",
        "ILSVRC 2012: 1,281,167 train and 50,000 val photos in 1,000 classes",
        {split: (split, f"imagenet-{split}*.parquet") for split in ("train", "val")},
        "with an account there, get ILSVRC2012_img_{split}.tar and ILSVRC2012_devkit_t12.tar.gz from "
        "https://image-net.org/download-images, put both into {folder}, and run: "
        "python -c \"from torchvision.datasets import ImageNet; ImageNet('{folder}', '{split}')\" "
        "which makes {folder}/{split}/n01440764/*.JPEG and the other 999 class folders",
        read_imagenet,
    ),
    "imagenette": Named(
        "Imagenette",
        "9,469 train and 3,925 val photos in 10 easy classes of ImageNet",
        {split: tuple(f"imagenette2{size}/{split}" for size in ("", "-320", "-160")) for split in ("train", "val")},
        "unpack https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz in {folder}",
        read_imagenette,
        fetch_imagenette,
    ),
    "tiny-imagenet": Named(
        "Tiny-ImageNet",
        "100,000 train and 10,000 val photos of 64x64 in 200 classes of ImageNet, with boxes",
        {split: (f"tiny-imagenet-200/{split}",) for split in ("train", "val")},
        "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip in {folder}",
        read_tiny_imagenet,
    ),
}


def load_named(name: str, split: str, root: str | Path | None = None) -> Dataset:
    """One split of a known dataset: from `root`; without it from the cache, downloaded if need be."""
    known = NAMED[name]
    split = split_of(known.title, known.places, split)
    folder = cache_folder() / name if root is None else Path(root).expanduser().absolute()
    place = known.place(folder, split)
    if place is None and root is None and known.fetch is not None:
        _fetch(known, known.fetch, folder, split)
        place = known.place(folder, split)
    if place is None:
        raise DataError(_missing(known, folder, split, f"is not in {folder}"))
    return _parquet(name, place) if "*" in place.name else known.read(place, split)


def _parquet(name: str, place: Path) -> Dataset:
    """A known dataset from Parquet files; ImageNet's classes keep the names that its classifiers know."""
    dataset = load_parquet(place)
    names = imagenet_classes()[1] if name == "imagenet" else dataset.classes
    if len(names) == len(dataset.classes):
        dataset.classes = names
    return dataset


def here(name: str) -> list[str]:
    """The splits of a known dataset that are in the cache."""
    return [split for split in NAMED[name].places if NAMED[name].place(cache_folder() / name, split)]


def _fetch(known: Named, fetch: Callable[[Path, str], None], folder: Path, split: str) -> None:
    print(f"downloading {known.title} ({split}) into {folder}", file=sys.stderr)
    try:
        # Standard output belongs to results.
        with arriving(folder) as part, redirect_stdout(sys.stderr):
            fetch(part, split)
    except (DataError, OSError, RuntimeError, EOFError, HTTPException, tarfile.TarError) as error:
        raise DataError(_missing(known, folder, split, f"could not be downloaded ({error})")) from error


def _missing(known: Named, folder: Path, split: str, what: str) -> str:
    wanted = " or ".join(
        str(folder / place) for place in known.places[split] if not place.endswith((".npz", ".parquet"))
    )
    advice = known.advice.format(folder=folder, split=split)
    return f"{known.title} ({split}) {what}: there is no {wanted}. To have it, {advice}; or name another folder as root"
