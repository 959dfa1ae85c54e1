"""What people have as labelled images, as a Dataset: a name, a torch dataset or loader, a list of pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from patchcleanser.core.pixels import pixels_of, range_error
from patchcleanser.data.catalog import load_dataset
from patchcleanser.data.dataset import Dataset, class_index
from patchcleanser.errors import DataError, ImageError, InputError, LabelError


class Pairs(Protocol):
    """A list of (image, label), or a map-style dataset of torch or others that gives such pairs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


AnyDataset: TypeAlias = Dataset | DataLoader[Any] | Pairs | str
"""A Dataset, a torch dataset or a DataLoader over one, a list of (image, label), or a name as "sample"."""

PAIRED = "list(zip(images, labels))"
ACCEPTED = (
    "a dataset is a name ('sample', 'folder:photos', …), a Dataset of patchcleanser or torch, a DataLoader over one, "
    f"or a list of (image, label), as {PAIRED}"
)


def as_dataset(data: AnyDataset) -> Dataset:
    """A Dataset from a Dataset, a name, a map-style torch dataset, a DataLoader over one, or a list of pairs.

    A pair is an image (PIL image, uint8 array [H, W, C] or float tensor [C, H, W] in [0, 1]) and its class index.
    A DataLoader is read through its dataset, in the order of indices: `collate_fn` and `drop_last` count for nothing.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str):
        return load_dataset(data)
    if isinstance(data, DataLoader):
        return as_dataset(_dataset_of(data))
    if isinstance(data, IterableDataset):
        raise InputError(
            f"{type(data).__name__} is an iterable-style dataset, which has no length and no fixed order; "
            "pass a map-style one (__len__ and __getitem__), or list(dataset) if it fits into memory"
        )
    if isinstance(data, type | bytes | Mapping) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise InputError(f"{ACCEPTED}; got {_described(data)}")
    return PairDataset(data)


class PairDataset(Dataset):
    """The pairs (image, label) of a torch dataset or a list. The id of an image is its number.

    All pairs are read once at the beginning, for their labels and a hash of their pixels. A later read of other pixels
    is an InputError.
    """

    def __init__(self, pairs: Any) -> None:
        innermost = pairs
        while isinstance(innermost, Subset):
            innermost = innermost.dataset
        self.pairs, self.name = pairs, type(innermost).__name__
        self._digests: list[bytes] = []
        labels: list[int] = []
        for index in range(len(pairs)):
            pixels, label = self._pair(index)
            self._digests.append(_digest(pixels))
            labels.append(label)
        if not labels:
            raise DataError(f"{self.name} holds no images")
        self.labels = np.array(labels, dtype=np.int64)
        self.classes = _class_names(innermost, labels)

    def __len__(self) -> int:
        return len(self._digests)

    def image(self, index: int) -> Tensor:
        pixels, _ = self._pair(index)
        if _digest(pixels) != self._digests[index]:
            raise InputError(
                f"image {index} of {self.name} is another one each time it is read; leave random transforms out"
            )
        return pixels

    def id(self, index: int) -> str:
        return str(index)

    def content(self, index: int) -> bytes:
        return self.image(index).numpy().tobytes()

    def digest(self, index: int) -> bytes:
        return self._digests[index]

    def _pair(self, index: int) -> tuple[Tensor, int]:
        where = f"image {index} of {self.name}"
        try:
            item = self.pairs[index]
        except Exception as error:  # it is the user's own code
            raise DataError(
                f"{where} cannot be read: {type(error).__name__}: {error}; wanted is (image, label) for each index"
            ) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            fix = "[(row['image'], row['label']) for row in data]" if isinstance(item, Mapping) else PAIRED
            raise InputError(
                f"items must be (image, label), got {_described(item)} as item {index} of {self.name}; pass {fix}"
            )
        label = class_index(item[1], f"the label of {where}")
        if label < 0:
            raise LabelError(f"the label of {where} is {label}; class indices start at 0")
        return _pixels(item[0], where), label


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """The dataset of a loader; InputError if its sampler gives only some of its items, or some twice."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    batches: Any = loader.batch_sampler
    sampler: Any = batches.sampler if type(batches) is BatchSampler else loader.sampler
    plain = {type(sampler), type(batches)} <= {SequentialSampler, RandomSampler, BatchSampler, type(None)}
    if plain and not getattr(sampler, "replacement", False) and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return loader.dataset
    name = type(batches if type(sampler) is SequentialSampler else sampler).__name__
    raise InputError(
        f"the DataLoader chooses items by its {name}, and is read through its dataset; "
        "pass torch.utils.data.Subset(dataset, indices) instead"
    )


def _class_names(dataset: Any, labels: list[int]) -> tuple[str, ...]:
    """The names in `dataset.classes`, if they are those of the labels."""
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    renumbered = getattr(dataset, "target_transform", None) is not None or max(labels) >= len(names)
    return () if renumbered else tuple(names)


def _pixels(image: Any, where: str) -> Tensor:
    """One image as float32 [C, H, W] in [0, 1]."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        image = _picture(image, where)
    if isinstance(image, Image.Image):
        try:
            return torch.from_numpy(pixels_of(image))
        except Exception as error:  # a picture opened but not yet read fails in whatever way its damage leads to
            raise DataError(f"{where} cannot be decoded: {str(error) or type(error).__name__}") from error
    if not isinstance(image, Tensor | np.ndarray) or image.dtype in (object, bool, torch.bool):
        raise ImageError(f"{where} is {_described(image)}; pass a PIL image, a uint8 array or a float tensor")
    tensor = torch.as_tensor(np.array(image) if isinstance(image, np.ndarray) else image.detach())
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise ImageError(f"{where} has type {tensor.dtype}; pass uint8, or floats in [0, 1]")
    shape = tuple(tensor.shape)
    if len(shape) != 3 or min(shape) < 1 or (shape[2] in (1, 3, 4) and shape[0] not in (1, 3, 4)):
        raise ImageError(f"{where} has shape {shape}; a tensor is [channels, height, width]")
    tensor = tensor.to("cpu", torch.float32) / (255 if tensor.dtype == torch.uint8 else 1)
    low, high = (float(value) for value in tensor.aminmax())
    problem = range_error(low, high)
    if problem is not None:
        fix = (
            "; leave Normalize out of the dataset's transform, and give mean and std to the classifier, as "
            "TorchClassifier(module, Preprocessing(mean=…, std=…))"
        )
        raise ImageError(f"{where} has {problem}{fix if low < 0 else ''}")
    return tensor


def _picture(array: Any, where: str) -> Image.Image:
    """A uint8 array [H, W] or [H, W, C] as a PIL image."""
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if not array.size or flat.ndim not in (2, 3) or (flat.ndim == 3 and flat.shape[2] not in (3, 4)):
        raise ImageError(f"{where} has shape {array.shape}; a uint8 array is [height, width, channels]")
    return Image.fromarray(np.ascontiguousarray(flat))


def _digest(pixels: Tensor) -> bytes:
    content = np.ascontiguousarray(pixels.numpy())
    return hashlib.sha256(repr(content.shape).encode() + content.tobytes()).digest()


def _described(item: Any) -> str:
    """What a value is, in a few words."""
    if isinstance(item, type):
        return f"the class {item.__name__}; make an instance"
    if isinstance(item, Path):
        return f"the path {item}; write 'folder:{item}'"
    name = type(item).__name__
    more = f" with {', '.join(map(repr, list(item)[:4]))}" if isinstance(item, Mapping) else ""
    more = f" of {len(item)}" if isinstance(item, tuple | list) else more
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{more}"
