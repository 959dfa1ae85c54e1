"""Dataset: images with names, and labels where there are any."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from patchcleanser.data.pictures import as_bytes, decode
from patchcleanser.errors import DataError, InputError

if TYPE_CHECKING:
    from torch import Tensor


class Dataset(ABC):
    """A fixed sequence of images. `labels` are class indices, or None where nobody labelled them."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None
    remembers = False
    """Whether reading costs so much that digests found by somebody else are kept."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """One image as float32 [3, H, W] in [0, 1]; DataError, naming it, if it cannot be read."""

    @abstractmethod
    def id(self, index: int) -> str:
        """What this image is called, the same in every subset."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The bytes that decide the image."""

    def digest(self, index: int) -> bytes:
        """A hash of the content; of an image that cannot be read, which is named when it is its turn, a word."""
        try:
            return hashlib.sha256(self.content(index)).digest()
        except DataError:
            return UNREADABLE

    def remember(self, index: int, digest: bytes) -> None:  # noqa: B027  # what is in memory needs no reminder
        """What somebody else found as the digest, so that the content need not be read for it here."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, bytes and labels."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self.id(index).encode() + b"\0" + self.digest(index))
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()


UNREADABLE = b"unreadable"


class ArrayDataset(Dataset):
    """Images of one size in memory: uint8 [N, H, W, 3]."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: NDArray[np.int64], classes: Sequence[str]) -> None:
        _require_labels(name, len(images), labels, classes)
        self.name, self.images, self.classes = name, images, tuple(classes)
        self.labels: NDArray[np.int64] = labels

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        """One image as float32 [3, H, W] in [0, 1]."""
        import torch  # here and below, so that listing datasets does not wait for it

        return torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255

    def id(self, index: int) -> str:
        """The image's number."""
        return str(index)

    def content(self, index: int) -> bytes:
        """The pixels."""
        return repr(self.images[index].shape).encode() + np.ascontiguousarray(self.images[index]).tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of pixels and labels."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images).tobytes())
        digest.update(repr(self.images.shape).encode())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> ArrayDataset:
        """These images, in this order."""
        return ArrayDataset(self.name, self.images[indices], self.labels[indices], self.classes)


class EncodedDataset(Dataset):
    """Images as files in memory or on disk, decoded when asked for."""

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
            _require_labels(name, len(ids), labels, classes)
        self.name, self.ids, self.contents = name, tuple(ids), contents
        self.labels, self.classes = labels, tuple(classes)
        self._seen: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> Tensor:
        """One decoded image as float32 [3, H, W] in [0, 1]."""
        return decode(self.content(index), self.ids[index])

    def id(self, index: int) -> str:
        """The name of the file."""
        return self.ids[index]

    def content(self, index: int) -> bytes:
        """The encoded bytes; DataError if they are not those read before, which the fingerprint names."""
        try:
            content = self.contents[index]
        except DataError:
            self._require_same(index, UNREADABLE)
            raise
        self._require_same(index, hashlib.sha256(content).digest())
        return content

    def digest(self, index: int) -> bytes:
        """As `content` found it, hashed once."""
        if index not in self._seen:
            super().digest(index)
        return self._seen[index]

    def remember(self, index: int, digest: bytes) -> None:
        """From now on, content with another digest is refused."""
        self._require_same(index, digest)

    def _require_same(self, index: int, digest: bytes) -> None:
        if self._seen.setdefault(index, digest) != digest:
            raise DataError(f"{self.ids[index]} of {self.name} changed while it was in use; begin a new run")


def _require_labels(name: str, images: int, labels: NDArray[np.int64], classes: Sequence[str]) -> None:
    if images != len(labels):
        raise DataError(f"{name} has {images} images but {len(labels)} labels")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"{name} has labels outside 0 to {len(classes) - 1}")


NAMELESS = 100_000
"""More classes than this without names are taken for damage."""


def labelled(
    labels: Sequence[int | None], names: Sequence[str], where: Callable[[int], str]
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Labels as an array, and the names of the classes: numbers, if there are no names.

    None, or -1, for every image says that nobody labelled them; for some images it is an error.
    `where(row)` says in which row of which file a label stands.
    """
    if all(label is None or label == -1 for label in labels):
        return None, tuple(names)
    limit = len(names) or min(max(0, *(label for label in labels if label is not None)) + 1, NAMELESS)
    for row, label in enumerate(labels):
        if label is None:
            raise DataError(f"{where(row)} has no label, but others have; label all images or none")
        if not 0 <= label < limit:
            raise DataError(f"{where(row)} has label {label}; labels go from 0 to {limit - 1}")
    return np.array(labels, dtype=np.int64), tuple(names) or tuple(str(k) for k in range(limit))


class View(Dataset):
    """Images of other datasets. Subclasses say where each of them is."""

    @abstractmethod
    def _place(self, index: int) -> tuple[Dataset, int]:
        """The dataset that holds an image, and its index there."""

    def image(self, index: int) -> Tensor:
        """The image there."""
        part, at = self._place(index)
        return part.image(at)

    def id(self, index: int) -> str:
        """Its name there."""
        part, at = self._place(index)
        return part.id(at)

    def content(self, index: int) -> bytes:
        """Its bytes there."""
        part, at = self._place(index)
        return part.content(at)

    def digest(self, index: int) -> bytes:
        """Their hash there."""
        part, at = self._place(index)
        return part.digest(at)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """As those do."""
        return self._place(0)[0].remembers

    def remember(self, index: int, digest: bytes) -> None:
        """It is remembered there."""
        part, at = self._place(index)
        part.remember(at, digest)


class Subset(View):
    """Some images of a dataset, in the order given, under their own names."""

    def __init__(self, whole: Dataset, picks: NDArray[np.intp]) -> None:
        self.whole, self.picks = whole, picks
        self.name, self.classes = whole.name, whole.classes
        self.labels = None if whole.labels is None else whole.labels[picks]

    def __len__(self) -> int:
        return len(self.picks)

    def _place(self, index: int) -> tuple[Dataset, int]:
        return self.whole, int(self.picks[index])


class JoinedDataset(View):
    """Images of several datasets, without their labels."""

    def __init__(self, parts: Sequence[Dataset], picks: NDArray[np.intp]) -> None:
        self.name = "+".join(part.name for part in parts)
        self.parts, self.picks = parts, picks
        self.labels, self.classes = None, ()
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.picks)

    def id(self, index: int) -> str:
        """Its name in its part, and which part."""
        part, at = self._place(index)
        return f"{part.name}:{part.id(at)}"

    def _place(self, index: int) -> tuple[Dataset, int]:
        at = int(self.picks[index])
        part = int(np.searchsorted(self.ends, at, side="right"))
        return self.parts[part], at - int(self.ends[part]) + len(self.parts[part])


def together(parts: Sequence[Dataset], *, limit: int | None = None, seed: int = 0) -> Dataset:
    """All images of several datasets as unlabelled ones, or a seeded choice of `limit` of them."""
    total = sum(len(part) for part in parts)
    picks = np.arange(total)
    if limit is not None and limit < total:
        picks = np.random.default_rng(seed).permutation(total)[:limit]
    return JoinedDataset(parts, picks)


AUTHORS = 233333333
"""The seed with which the authors' code shuffles a test set before taking its first images."""


def chosen(dataset: Dataset, limit: int | None, *, seed: int = 0, subset: str = "random") -> Dataset:
    """`limit` images of a dataset: a seeded random choice, the authors' own, or the first ones.

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
    """A labelled dataset as arrays of one size; images of another size are resized to it."""
    if isinstance(dataset, ArrayDataset) and dataset.images.shape[1:3] == size:
        return dataset
    if dataset.labels is None:
        raise DataError(f"{dataset.name} has no labels; training needs them")
    from torch.nn import functional

    images = np.empty((len(dataset), *size, 3), dtype=np.uint8)
    for index in range(len(dataset)):
        image = dataset.image(index)
        if image.shape[1:] != size:
            image = functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
        images[index] = as_bytes(image)
    return ArrayDataset(dataset.name, images, dataset.labels, dataset.classes)
