"""Images with several labels each: from the boxes of their objects, or from lists of class numbers in Parquet files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import is_integer
from patchcleanser.data.dataset import AnnotatedDataset, ArrayDataset, Dataset, Subset, read_pixels
from patchcleanser.data.object_sets import LAYOUTS, load_objects, plain_name
from patchcleanser.data.parquet import is_local, load_parquet_lists
from patchcleanser.errors import DataError, InputError, TrustError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Targets = NDArray[np.bool_]
"""[N, C]: whether an image shows a class."""

KINDS = (*LAYOUTS, "parquet")
"""Kinds of addresses that `load_multilabel` reads."""


class MultiLabelDataset(AnnotatedDataset):
    """Images of a dataset, and which of its classes each one shows.

    A class that is not among `classes` is unknown, not absent: nothing is said about it in any image.
    """

    def __init__(self, images: Dataset, targets: Targets, classes: Sequence[str]) -> None:
        if targets.dtype != np.bool_ or targets.shape != (len(images), len(classes)):
            raise DataError(
                f"{images.name} has {counted(len(images), 'image')} and {counted(len(classes), 'class')}, but targets "
                f"{targets.dtype} {list(targets.shape)}; wanted is bool [images, classes]"
            )
        self.images, self.targets, self.classes = images, targets, tuple(classes)
        self.name, self.origin = images.name, images.origin

    def __getitem__(self, index: int) -> tuple[Tensor, Targets]:  # type: ignore[override]
        """Image [3, H, W], and its row of the targets, bool [C]."""
        if not is_integer(index):
            raise InputError(f"an index is a whole number, got {index!r}; for several use pick")
        image, _ = super().__getitem__(index)
        return image, self.targets[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Targets]]:  # type: ignore[override]
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        sizes = f"{counted(len(self), 'image')}, {counted(len(self.classes), 'class')}"
        return f"<MultiLabelDataset {self.name}: {sizes}, {self.targets.sum(1).mean():.2f} labels an image>"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of images, classes and targets."""
        digest = hashlib.sha256(f"{self.images.fingerprint}\n{self.classes}\n".encode())
        digest.update(np.ascontiguousarray(self.targets).tobytes())
        return digest.hexdigest()

    def pick(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> MultiLabelDataset:
        """The images of these numbers, in this order, with all classes."""
        numbers = np.asarray(indices, dtype=np.intp)
        return MultiLabelDataset(Subset(self.images, numbers), self.targets[numbers], self.classes)

    def without(self, names: Sequence[str]) -> MultiLabelDataset:
        """The same images, with nothing said about these classes."""
        for name in names:
            if name not in self.classes:
                raise DataError.unknown("class", name, self.classes)
        return self._columns([c for c, name in enumerate(self.classes) if name not in names], self.classes)

    def shared_with(self, classes: Sequence[str]) -> tuple[MultiLabelDataset, NDArray[np.intp]]:
        """The classes that a network of these `classes` has too, in its order and under its names.

        Also returns their numbers among the network's outputs. Names are compared as `plain_name` writes them, so
        Pascal VOC's aeroplane is COCO's airplane.
        """
        numbers = {plain_name(name): number for number, name in enumerate(self.classes)}
        outputs = [output for output, name in enumerate(classes) if plain_name(name) in numbers]
        if not outputs:
            raise DataError(
                f"none of the classes of {self.name} ({', '.join(self.classes[:3])}, …) is one of the network's "
                f"({', '.join(classes[:3])}, …)"
            )
        columns = [numbers[plain_name(classes[output])] for output in outputs]
        names = {column: classes[output] for column, output in zip(columns, outputs, strict=True)}
        part = self._columns(columns, [names.get(c, name) for c, name in enumerate(self.classes)])
        return part, np.array(outputs, dtype=np.intp)

    def _columns(self, columns: Sequence[int], names: Sequence[str]) -> MultiLabelDataset:
        """The same images with some of the classes, by number, under new names."""
        if not columns:
            raise DataError(f"no class of {self.name} is left; leave out fewer")
        return MultiLabelDataset(self.images, self.targets[:, columns], [names[column] for column in columns])


class TargetArrays(ArrayDataset):
    """Images of one size in memory, with several labels each: `labels` are the targets as 0 and 1, int64 [N, C]."""

    def __init__(self, dataset: MultiLabelDataset, size: tuple[int, int]) -> None:
        self.name, self.images, self.classes = dataset.name, read_pixels(dataset, size), dataset.classes
        self.labels = dataset.targets.astype(np.int64)


def load_multilabel(
    address: str, *, root: Path | None = None, trust_code: bool = False, named_by: str | Path | None = None
) -> MultiLabelDataset:
    """Images with several labels each, from an address `kind:path`.

    - ``coco:…``, ``voc:…`` and ``yolo:…`` as `load_objects` takes them; an image shows the classes of its boxes
    - ``parquet:PATTERN``: the Hugging Face image layout, with a list of class numbers for each image in `labels`

    Classes are those that occur, or those that Parquet files name. ``?without=person,sheep`` at the end leaves classes
    out, for example where their boxes are incomplete. `root` is the folder of pictures, as for `load_objects`.

    If the address was read from a file, `named_by` is that file. Then an address elsewhere (``parquet:https://…``) is
    a TrustError unless `trust_code` says that the file is trusted.
    """
    source, left_out = _parsed(address)
    kind, _, path = source.partition(":")
    if kind not in KINDS or not path:
        kinds = ", ".join(f"{name}:PATH" for name in KINDS)
        raise InputError(f"cannot read {address!r}; images with several labels are {kinds}{did_you_mean(kind, KINDS)}")
    if kind != "parquet":
        dataset = _from_boxes(source, root)
    elif root is not None:
        raise DataError(f"{source} includes its location and takes no root, got {root}")
    elif named_by is not None and not trust_code and not is_local(path):
        raise TrustError.of(named_by, source, "is an address elsewhere")
    else:
        images, lists, classes = load_parquet_lists(path)
        dataset = MultiLabelDataset(images, _targets(lists, len(classes)), classes)
    dataset = dataset.without(left_out) if left_out else dataset
    dataset.origin = {"data": address}
    return dataset


def _parsed(address: str) -> tuple[str, list[str]]:
    """An address without its classes to leave out, and these.

    >>> _parsed("voc:VOC2007?test&without=person,dog")
    ('voc:VOC2007?test', ['person', 'dog'])
    """
    source, *names = re.split(r"[?&]without=", address, maxsplit=1)
    return source, [name.strip() for name in "".join(names).split(",") if name.strip()]


def _from_boxes(address: str, root: Path | None) -> MultiLabelDataset:
    """Classes of boxes, and of crowds: a detector is not scored on crowds, but the image shows them."""
    dataset = load_objects(address, root=root)
    crowds = dataset.crowds or [()] * len(dataset)
    lists = [[*each.classes, *crowd] for each, crowd in zip(dataset.objects, crowds, strict=True)]
    return MultiLabelDataset(dataset.images, _targets(lists, len(dataset.classes)), dataset.classes)


def _targets(lists: Sequence[Sequence[int]], classes: int) -> Targets:
    targets = np.zeros((len(lists), classes), dtype=np.bool_)
    for row, numbers in enumerate(lists):
        targets[row, list(numbers)] = True
    return targets
