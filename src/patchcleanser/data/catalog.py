"""Names and addresses to datasets, and all facts about those that have a name."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from patchcleanser.data import imagenet, torchvision_sets
from patchcleanser.data.boxes import ImageBoxes
from patchcleanser.data.dataset import Dataset
from patchcleanser.data.folders import load_folder
from patchcleanser.data.object_sets import LAYOUTS
from patchcleanser.data.parquet import is_local, load_parquet
from patchcleanser.errors import DataError, TrustError
from patchcleanser.records.cache import cache_folder, staging

SAMPLE = Path(__file__).parent / "sample.parquet"
"""300 CIFAR-10 test images, 30 per class; where they come from stands in the file's metadata."""


@dataclass(frozen=True)
class NamedDataset:
    """All facts about a dataset that has a name. To add a dataset, add one to NAMED."""

    title: str
    summary: str
    files: dict[str, tuple[str, ...]]
    """For each split, what must lie in the root folder: the first that exists is read. With a star: Parquet files."""
    advice: str
    """How to get the files by hand, with {folder} and {split}."""
    read: Callable[[Path, str], Dataset]
    """Reads a split from one of its files, unless that is Parquet."""
    fetch: Callable[[Path, str], None] | None = None
    """Downloads a split into a folder."""
    boxes: Callable[[Path, Sequence[str]], dict[int, ImageBoxes]] | None = None
    """Reads the boxes of objects from the root folder, by position in a list of image ids."""
    class_names: Callable[[], tuple[str, ...]] | None = None
    """The names of its classes, where those in Parquet files may differ from the ones that classifiers use."""

    def find(self, root: Path, split: str) -> Path | None:
        """What `split` is read from, if it is in `root`, or if `root` is the innermost folder itself."""
        for wanted in self.files[split]:
            first, _, rest = wanted.partition("/")
            if "*" in wanted and next(root.glob(wanted), None) is not None:
                return root / wanted
            if (root / wanted).exists():
                return root / wanted
            if root.name == first and (root / rest).exists():
                return root / rest
        return None


NAMED: dict[str, NamedDataset] = {
    "cifar10": NamedDataset(
        title="CIFAR-10",
        summary="60,000 images of 32x32 in 10 classes",
        files={
            "train": ("cifar-10-batches-py/data_batch_1", "train.npz", "cifar10-train*.parquet"),
            "test": ("cifar-10-batches-py/test_batch", "test.npz", "cifar10-test*.parquet"),
        },
        advice="unpack cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html in {folder}",
        read=torchvision_sets.read_cifar10,
        fetch=torchvision_sets.fetch_cifar10,
    ),
    "cifar100": NamedDataset(
        title="CIFAR-100",
        summary="60,000 images of 32x32 in 100 classes (the fine labels)",
        files={split: (f"cifar-100-python/{split}", f"cifar100-{split}*.parquet") for split in ("train", "test")},
        advice="unpack cifar-100-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html in {folder}",
        read=torchvision_sets.read_cifar100,
        fetch=partial(torchvision_sets.download, "CIFAR100"),
    ),
    "svhn": NamedDataset(
        title="SVHN",
        summary="Street View house numbers: 99,289 digits of 32x32 (and 531,131 in the split extra)",
        files={s: (f"{s}_32x32.mat", f"images/{s}", f"svhn-{s}*.parquet") for s in ("train", "test", "extra")},
        advice="put {split}_32x32.mat from http://ufldl.stanford.edu/housenumbers into {folder}, or full house numbers "
        "with their boxes (1.png, 1.xml and so on) into {folder}/images/{split}",
        read=torchvision_sets.read_svhn,
        fetch=partial(torchvision_sets.download, "SVHN"),
    ),
    "flowers102": NamedDataset(
        title="Flowers-102",
        summary="8,189 photos of 102 kinds of flowers, of many sizes",
        files={
            split: ("flowers-102/setid.mat", "setid.mat", f"flowers102-{split}*.parquet")
            for split in ("train", "val", "test")
        },
        advice="put setid.mat, imagelabels.mat and the folder jpg (unpacked from 102flowers.tgz) from "
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102 into {folder}/flowers-102",
        read=torchvision_sets.read_flowers102,
        fetch=partial(torchvision_sets.download, "Flowers102"),
    ),
    "imagenet": NamedDataset(
        title="ImageNet",
        summary="ILSVRC 2012: 1,281,167 train and 50,000 val photos in 1,000 classes",
        files={split: (split, f"imagenet-{split}*.parquet") for split in ("train", "val")},
        advice="with an account there, get ILSVRC2012_img_{split}.tar and ILSVRC2012_devkit_t12.tar.gz from "
        "https://image-net.org/download-images, put both into {folder}, and run: "
        "python -c \"from torchvision.datasets import ImageNet; ImageNet('{folder}', '{split}')\" "
        "which makes {folder}/{split}/n01440764/*.JPEG and the other 999 class folders",
        read=imagenet.read_imagenet,
        boxes=imagenet.imagenet_boxes,
        class_names=lambda: imagenet.imagenet_classes()[1],
    ),
    "imagenette": NamedDataset(
        title="Imagenette",
        summary="9,469 train and 3,925 val photos in 10 easy classes of ImageNet",
        files={
            split: (
                *(f"imagenette2{size}/{split}" for size in ("", "-320", "-160")),
                f"imagenette-{split}*.parquet",
            )
            for split in ("train", "val")
        },
        advice="unpack https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz in {folder}",
        read=imagenet.read_imagenette,
        fetch=partial(torchvision_sets.download, "Imagenette", size="320px"),
    ),
    "tiny-imagenet": NamedDataset(
        title="Tiny-ImageNet",
        summary="100,000 train and 10,000 val photos of 64x64 in 200 classes of ImageNet, with boxes",
        files={s: (f"tiny-imagenet-200/{s}", f"tiny-imagenet-{s}*.parquet") for s in ("train", "val")},
        advice="unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip in {folder}",
        read=imagenet.read_tiny_imagenet,
        boxes=imagenet.tiny_imagenet_boxes,
    ),
}

DATASETS: dict[str, str] = {
    "sample": "300 CIFAR-10 test images that come with the package",
    **{name: entry.summary for name, entry in NAMED.items()},
    "folder:PATH": "pictures in class folders, or beside labels.csv, or without labels",
    "parquet:PATH": "a file, folder or pattern in the Hugging Face image layout, here or at s3://, https://, …",
}
"""What `load_dataset` takes, each with one line about it."""

ANNOTATED: dict[str, str] = {
    "coco:FILE.json": "photos with boxes in COCO's layout, for --task detect and multilabel",
    "voc:FOLDER": "photos with boxes in Pascal VOC's layout, for the same",
    "yolo:FOLDER": "photos with boxes in YOLO's layout, for the same",
}
"""What only tasks of several objects or labels take."""


def load_dataset(
    name: str,
    *,
    split: str = "test",
    root: str | Path | None = None,
    trust_code: bool = False,
    named_by: str | Path | None = None,
) -> Dataset:
    """A dataset by name (one of DATASETS), or by the path of a folder of images.

    `split` is train, val or test; val and test are the same where a dataset has only one of them,
    and sample, folder:PATH and parquet:PATH are taken whole. `root` is where the files of a named
    dataset lie; without it they are in the cache, or are downloaded into it.

    If the name was read from a file, `named_by` is that file. Then an address elsewhere (``parquet:https://…``) is a
    TrustError unless `trust_code` says that the file is trusted.
    """
    name = full_name(name)
    dataset = _load(name, split, root, trusted=named_by is None or trust_code, named_by=named_by)
    dataset.origin = {"data": name} | ({"split": split} if name in NAMED else {})
    return dataset


def _load(name: str, split: str, root: str | Path | None, *, trusted: bool, named_by: str | Path | None) -> Dataset:
    if name in NAMED:
        return _load_named(name, split, root)
    kind, _, address = name.partition(":")
    if root is not None and (name == "sample" or kind in ("folder", "parquet")):
        raise DataError(f"{name} includes its location and takes no root, got {root}")
    if name == "sample":
        return load_parquet(SAMPLE)
    if kind in LAYOUTS:
        raise DataError(
            f"{name} holds boxes of objects, not one label for each image; certify them by --task detect or multilabel"
        )
    if kind == "folder":
        return load_folder(address)
    if named_by is not None and not trusted and not is_local(address):
        raise TrustError.of(named_by, name, "is an address elsewhere")
    return load_parquet(address)


def full_name(name: str) -> str:
    """The name of a dataset with its kind: a folder or Parquet file that is here may be given by its path alone."""
    kind, _, address = name.partition(":")
    if name == "sample" or name in NAMED or (kind in ("folder", "parquet", *LAYOUTS) and address):
        return name
    path = Path(name).expanduser()
    if name and path.is_dir():
        return f"folder:{name}"
    if path.suffix == ".parquet":
        return f"parquet:{name}"
    raise DataError.unknown("folder here and no dataset", name, DATASETS)


def _load_named(name: str, split: str, root: str | Path | None) -> Dataset:
    """One split from `root`; without it from the cache, downloaded if need be."""
    entry = NAMED[name]
    if split not in entry.files:
        split = {"test": "val", "val": "test"}.get(split, split)
    if split not in entry.files:
        raise DataError(f"{entry.title} has the splits {', '.join(entry.files)}; got {split!r}")
    folder = _root_folder(name, root)
    if folder.is_file():
        raise DataError(f"{folder} is a file, not a folder; the root is the folder that holds the files of {name}")
    path = entry.find(folder, split)
    if path is None and root is None and entry.fetch is not None:
        _fetch(entry, entry.fetch, folder, split)
        path = entry.find(folder, split)
    if path is None:
        raise DataError(_missing(entry, folder, split, f"is not in {folder}"))
    if "*" not in path.name:
        return entry.read(path, split)
    dataset = load_parquet(path)
    class_names = entry.class_names() if entry.class_names else ()
    if len(class_names) == len(dataset.classes):
        dataset.classes = class_names
    return dataset


def _root_folder(name: str, root: str | Path | None) -> Path:
    return cache_folder() / name if root is None else Path(root).expanduser().absolute()


def cached_splits(name: str) -> list[str]:
    """The splits of a named dataset that are in the cache."""
    return [split for split in NAMED[name].files if NAMED[name].find(cache_folder() / name, split)]


def _fetch(entry: NamedDataset, fetch: Callable[[Path, str], None], folder: Path, split: str) -> None:
    print(f"downloading {entry.title} ({split}) into {folder}", file=sys.stderr)
    try:
        with staging(folder) as part, redirect_stdout(sys.stderr):  # standard output is for results
            fetch(part, split)
    except (DataError, OSError, RuntimeError, EOFError, HTTPException, tarfile.TarError) as error:
        raise DataError(_missing(entry, folder, split, f"could not be downloaded ({error})")) from error


def _missing(entry: NamedDataset, folder: Path, split: str, problem: str) -> str:
    files = [str(folder / file) for file in entry.files[split] if not file.endswith((".npz", ".parquet"))]
    advice = entry.advice.format(folder=folder, split=split)
    return (
        f"{entry.title} ({split}) {problem}: there is no {' or '.join(files)}. To have it, {advice}; "
        "or name another folder as root"
    )


def boxed_images(name: str, ids: Sequence[str], root: str | Path | None = None) -> dict[int, ImageBoxes]:
    """The boxes of a named dataset's images, of those that have any, by their position in `ids`."""
    boxes = NAMED[name].boxes if name in NAMED else None
    if boxes is None:
        names = " and ".join(other for other, entry in NAMED.items() if entry.boxes)
        raise DataError(f"{name} has no boxes; {names} have")
    return boxes(_root_folder(name, root), ids)


def object_shares(name: str, ids: Sequence[str], root: str | Path | None = None) -> dict[str, float]:
    """For each image that has boxes, by its id, the share of its pixels inside them."""
    return {ids[index]: boxes.share for index, boxes in boxed_images(name, ids, root).items()}
