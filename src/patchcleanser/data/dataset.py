"""Dataset: a sequence of images with ids, and labels where there are any."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import is_integer
from patchcleanser.data.codec import as_bytes, decode, map_images
from patchcleanser.errors import DataError, InputError, LabelError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

UNREADABLE = b"unreadable"
"""The digest of an image that cannot be read; the error comes when the image itself is asked for."""


class Dataset(ABC):
    """A fixed sequence of images. `labels` are class indices [N], or None where there are none."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None
    origin: Mapping[str, str] = MappingProxyType({})
    """What `load_dataset` made it, or the dataset it is a view of, from: `data`, and `split` if it has splits."""
    remembers = False
    """Whether reading is slow enough that digests computed by other processes are stored."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int | None]:
        """Image [3, H, W] and label, as torch's datasets give them; the label is None where there are none."""
        if not is_integer(index):
            raise InputError(f"an index is a whole number, got {index!r}; for several use patchcleanser.data.chosen")
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {counted(len(self), 'image')}, got index {index}")
        index %= len(self)
        return self.image(index), None if self.labels is None else int(self.labels[index])

    def __iter__(self) -> Iterator[tuple[Tensor, int | None]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class") if self.classes else "unnamed classes"
        labels = "no labels" if self.labels is None else classes
        return f"<{type(self).__name__} {self.name}: {counted(len(self), 'image')}, {labels}>"

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """One image as float32 [3, H, W] in [0, 1]; a DataError that names it if it cannot be read."""

    @abstractmethod
    def id(self, index: int) -> str:
        """The image's id, which is the same in every subset."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The bytes that decide the image."""

    def digest(self, index: int) -> bytes:
        """A hash of the content, or UNREADABLE."""
        try:
            return hashlib.sha256(self.content(index)).digest()
        except DataError:
            return UNREADABLE

    def remember(self, index: int, digest: bytes) -> None:  # noqa: B027  # nothing to do for images in memory
        """Store a digest that another process computed, so that this one need not read the content."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of ids, bytes and labels."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self.id(index).encode() + b"\0" + self.digest(index))
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()


class ArrayDataset(Dataset):
    """Images of one size in memory: uint8 [N, H, W, 3]. The id of an image is its number."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: NDArray[np.int64], classes: Sequence[str]) -> None:
        _check_labels(name, len(images), labels, classes)
        self.name, self.images, self.classes = name, images, tuple(classes)
        self.labels: NDArray[np.int64] = labels

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        import torch  # here and below, so that listing datasets does not wait for it

        return torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255

    def id(self, index: int) -> str:
        return str(index)

    def content(self, index: int) -> bytes:
        return repr(self.images[index].shape).encode() + np.ascontiguousarray(self.images[index]).tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of pixels and labels."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images).tobytes())
        digest.update(repr(self.images.shape).encode())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> ArrayDataset:
        """The images at these indices, in this order."""
        return ArrayDataset(self.name, self.images[indices], self.labels[indices], self.classes)


class EncodedDataset(Dataset):
    """Image files in memory or on disk, decoded when they are needed. The id of an image is its file's name.

    Content is hashed when it is first read. Content that has changed since then is a DataError.
    """

    remembers = True

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        contents: Sequence[bytes],
        labels: NDArray[np.int64] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        if not ids:
            raise DataError(f"{name} holds no images")
        if labels is not None:
            _check_labels(name, len(ids), labels, classes)
        self.name, self.ids, self.contents = name, tuple(ids), contents
        self.labels, self.classes = labels, tuple(classes)
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> Tensor:
        return decode(self.content(index), self.ids[index])

    def id(self, index: int) -> str:
        return self.ids[index]

    def content(self, index: int) -> bytes:
        try:
            content = self.contents[index]
        except DataError:
            self.remember(index, UNREADABLE)
            raise
        self.remember(index, hashlib.sha256(content).digest())
        return content

    def digest(self, index: int) -> bytes:
        if index not in self._digests:
            super().digest(index)
        return self._digests[index]

    def remember(self, index: int, digest: bytes) -> None:
        if self._digests.setdefault(index, digest) != digest:
            raise DataError(f"{self.ids[index]} of {self.name} changed while it was in use; begin a new run")


def _check_labels(name: str, images: int, labels: NDArray[np.int64], classes: Sequence[str]) -> None:
    if images != len(labels):
        raise DataError(f"{name} has {counted(images, 'image')} but {counted(len(labels), 'label')}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"{name} has labels outside 0 to {len(classes) - 1}")


class DatasetView(Dataset):
    """Images of other datasets. Subclasses say where each one comes from."""

    @abstractmethod
    def _source(self, index: int) -> tuple[Dataset, int]:
        """The dataset that holds an image, and its index there."""

    def image(self, index: int) -> Tensor:
        source, number = self._source(index)
        return source.image(number)

    def id(self, index: int) -> str:
        source, number = self._source(index)
        return source.id(number)

    def content(self, index: int) -> bytes:
        source, number = self._source(index)
        return source.content(number)

    def digest(self, index: int) -> bytes:
        source, number = self._source(index)
        return source.digest(number)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self._source(0)[0].remembers

    def remember(self, index: int, digest: bytes) -> None:
        source, number = self._source(index)
        source.remember(number, digest)


class Subset(DatasetView):
    """Some images of a dataset, in the order given, under their own ids."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.intp]) -> None:
        self.dataset, self.indices = dataset, indices
        self.name, self.classes, self.origin = dataset.name, dataset.classes, dataset.origin
        self.labels = None if dataset.labels is None else dataset.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def _source(self, index: int) -> tuple[Dataset, int]:
        return self.dataset, int(self.indices[index])


class AnnotatedDataset(DatasetView):
    """Images of a dataset, each with more than one label. Subclasses say with what."""

    images: Dataset
    labels = None

    def __len__(self) -> int:
        return len(self.images)

    def _source(self, index: int) -> tuple[Dataset, int]:
        return self.images, index

    @abstractmethod
    def pick(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Any:
        """The images of these numbers, in this order."""

    def chosen(self, limit: int | None, *, seed: int = 0, subset: str = "random") -> Self:
        """`limit` images, as `chosen` takes them of any dataset."""
        part = chosen(self.images, limit, seed=seed, subset=subset)
        some: Self = self.pick(part.indices) if isinstance(part, Subset) and part is not self.images else self
        return some


class JoinedDataset(DatasetView):
    """The images of several datasets, one dataset after the other, without labels."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.name = "+".join(part.name for part in parts)
        self.parts, self.ends = parts, np.cumsum([len(part) for part in parts])
        self.labels, self.classes = None, ()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def id(self, index: int) -> str:
        source, number = self._source(index)
        return f"{source.name}:{source.id(number)}"

    def _source(self, index: int) -> tuple[Dataset, int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part], index - int(self.ends[part]) + len(self.parts[part])


def together(parts: Sequence[Dataset], *, limit: int | None = None, seed: int = 0) -> Dataset:
    """All images of several datasets without their labels, or a seeded random choice of `limit` of them."""
    joined = JoinedDataset(parts)
    if limit is None or limit >= len(joined):
        return joined
    return Subset(joined, np.random.default_rng(seed).permutation(len(joined))[:limit])


AUTHORS = 233333333
"""The seed with which the authors' code shuffles a test set before taking its first images."""


def chosen(dataset: Dataset, limit: int | None, *, seed: int = 0, subset: str = "random") -> Dataset:
    """`limit` images of a dataset: a seeded random choice, the authors' own choice, or the first ones.

    A choice of fewer images is part of any choice of more with the same seed.
    """
    if limit is not None and limit < 1:
        raise InputError(f"at least 1 image is needed, got a limit of {limit}")
    if subset not in ("random", "authors", "first"):
        raise InputError(f"a subset is random, authors or first, got {subset!r}")
    if limit is None or limit >= len(dataset):
        return dataset
    order = np.arange(len(dataset))
    if subset == "authors":
        np.random.RandomState(AUTHORS).shuffle(order)  # the old generator: the same images as theirs
    elif subset == "random":
        order = np.random.default_rng(seed).permutation(order)
    return Subset(dataset, np.sort(order[:limit]))


def in_memory(dataset: Dataset, size: tuple[int, int]) -> ArrayDataset:
    """A labelled dataset as one array; images of another size are resized to `size`."""
    if isinstance(dataset, ArrayDataset) and dataset.images.shape[1:3] == size:
        return dataset
    if dataset.labels is None:
        raise DataError(f"{dataset.name} has no labels; training needs them")
    return ArrayDataset(dataset.name, read_pixels(dataset, size), dataset.labels, dataset.classes)


def read_pixels(dataset: Dataset, size: tuple[int, int]) -> NDArray[np.uint8]:
    """All images as one array [N, H, W, 3]; those of another size are resized to `size`."""
    from torch.nn import functional

    def read(index: int) -> NDArray[np.uint8]:
        image = dataset.image(index)
        if image.shape[1:] != size:
            image = functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
        return as_bytes(image)

    images = np.empty((len(dataset), *size, 3), dtype=np.uint8)
    for index, pixels in enumerate(map_images(read, len(dataset))):
        images[index] = pixels
    return images


def class_index(label: Any, what: str = "a label") -> int:
    """A label as an int: Python's, numpy's or a tensor of no axes; LabelError if it is no class index."""
    value = label.tolist() if hasattr(label, "tolist") else label
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        hint = ""
        if isinstance(value, list):
            hint = "; of one-hot labels pass the argmax" if len(value) > 1 else "; pass a flat list"
        raise LabelError(f"{what} is a class index (int), got {value!r:.40} of type {type(value).__name__}{hint}")
    return int(value)


MAX_UNNAMED_CLASSES = 100_000
"""A label above this, without class names, is taken for damage."""


def parse_labels(
    labels: Sequence[int | None], names: Sequence[str], where: Callable[[int], str]
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Labels as an array, and class names: numbers, if there are no names.

    If every label is None or -1, the images are unlabelled; if only some are, it is an error.
    `where(row)` names the file and row of a label for error messages.
    """
    if all(label is None or label == -1 for label in labels):
        return None, tuple(names)
    limit = len(names) or min(max(0, *(label for label in labels if label is not None)) + 1, MAX_UNNAMED_CLASSES)
    for row, label in enumerate(labels):
        if label is None:
            raise DataError(f"{where(row)} has no label, but others have; label all images or none")
        if not 0 <= label < limit:
            raise DataError(f"{where(row)} has label {label}; labels go from 0 to {limit - 1}")
    return np.array(labels, dtype=np.int64), tuple(names) or tuple(str(k) for k in range(limit))


def require_one_split(names: Iterable[str], address: str, example: str) -> None:
    """Refuse several splits (train, val) where one dataset, or class folders, are expected."""
    splits = sorted(set(names))
    if len(splits) > 1 and {"train", "test", "val", "valid", "validation"}.issuperset(splits):
        raise DataError(
            f"{address} holds the splits {', '.join(splits)}; name one: {address}{example.format(splits[0])}"
        )
