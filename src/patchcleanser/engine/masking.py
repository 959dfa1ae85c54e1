"""Images under unions of masks: the pairs of both, and copies with the hidden pixels filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import Indices, LabelTable
from patchcleanser.errors import InputError


@dataclass(eq=False)
class ImageState:
    """One image [C, H, W] on the threat's pixel grid, on the device, with the labels computed so far."""

    pixels: Tensor
    table: LabelTable

    def with_table(self, table: LabelTable) -> ImageState:
        """The same pixels, with labels that go into another table."""
        return self if table is self.table else ImageState(self.pixels, table)


class LabelRequest(NamedTuple):
    """The unions whose labels are wanted for one image."""

    image: ImageState
    unions: Indices


class PairBatch(NamedTuple):
    """Pairs of an image and a union of masks: pair n is `images[which[n]]` under `unions[n]`."""

    images: list[ImageState]
    which: NDArray[np.intp]
    unions: Indices

    def __len__(self) -> int:
        return len(self.unions)

    def image(self, at: int = 0) -> ImageState:
        """The image of a pair."""
        return self.images[int(self.which[at])]

    def part(self, start: int, stop: int) -> PairBatch:
        return PairBatch(self.images, self.which[start:stop], self.unions[start:stop])

    def pick(self, rows: NDArray[np.intp]) -> PairBatch:
        """The pairs with these numbers."""
        return PairBatch(self.images, self.which[rows], self.unions[rows])

    @staticmethod
    def concat(batches: Sequence[PairBatch]) -> PairBatch:
        """Batches of the same images as one."""
        which, unions = (np.concatenate([getattr(b, name) for b in batches]) for name in ("which", "unions"))
        return PairBatch(batches[0].images, which, unions)

    @staticmethod
    def of(images: list[ImageState], unions: Sequence[Indices]) -> PairBatch:
        """Each image under its own unions."""
        counts = [len(indices) for indices in unions]
        which = np.repeat(np.arange(len(images)), counts)
        return PairBatch(images, which, np.concatenate([*unions, np.empty(0, np.intp)]))


def mask_boxes(pairs: PairBatch) -> NDArray[np.int32]:
    """The boxes [N, windows, (top, bottom, left, right)] of pairs, padded by empty ones to the most windows."""
    by_image = {i: pairs.images[i].table.mask_set.unions.boxes for i in np.unique(pairs.which)}
    boxes = np.zeros((len(pairs), max(part.shape[1] for part in by_image.values()), 4), np.int32)
    for i, part in by_image.items():
        rows = pairs.which == i
        boxes[rows, : part.shape[1]] = part[pairs.unions[rows]]
    return boxes


def gather_images(pixels: Sequence[Tensor], which: NDArray[np.intp], *, dtype: torch.dtype | None = None) -> Tensor:
    """One copy of an image for each pair, [N, C, H, W], in float32 or a `dtype` (then channels last on a GPU)."""
    if pixels[0].device.type == "cpu":
        images = [image.to(dtype or image.dtype) for image in pixels]
        return torch.stack([images[k] for k in which])
    stack, index = torch.stack(list(pixels)), to_device(which, pixels[0].device)
    if dtype is None:
        return stack.index_select(0, index)
    rows = stack.permute(0, 2, 3, 1).to(dtype, memory_format=torch.contiguous_format)
    return rows.index_select(0, index).permute(0, 3, 1, 2)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device. From pinned memory a GPU copies it in stream order, without a synchronisation."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def apply_masks(images: Tensor, boxes: NDArray[np.int32], fill: Sequence[float]) -> Tensor:
    """Fill the boxes [N, windows, (top, bottom, left, right)] of images [N, C, H, W], in place where that is faster.

    A CPU writes into the boxes only. On a GPU that would be many small kernels, and numpy has no bfloat16.
    """
    colour = to_device(np.asarray(fill, dtype=np.float32), images.device).to(images.dtype)[:, None, None]
    if images.device.type != "cpu" or images.dtype == torch.bfloat16:
        hidden = box_masks(to_device(boxes, images.device), images.shape[-2:])
        return torch.where(hidden[:, None], colour, images)
    pixels, paint = images.numpy(), colour.numpy()
    for image, windows in zip(pixels, boxes.tolist(), strict=True):
        for top, bottom, left, right in windows:
            image[:, top:bottom, left:right] = paint
    return images


def visible_sums(pairs: PairBatch) -> NDArray[np.int64]:
    """For each pair, the sum [N] of its visible pixels' bits, as integers: exact, and blind to what is hidden."""
    used, which = np.unique(pairs.which, return_inverse=True)
    pixels = torch.stack([pairs.images[i].pixels for i in used]) + 0.0  # -0.0 becomes 0.0: equal numbers, equal bits
    bits = (pixels.view(torch.int32).sum(1) & 0x7FFFFFFF).int()
    hidden = box_masks(to_device(mask_boxes(pairs), bits.device), bits.shape[1:])
    visible = bits[to_device(which, bits.device)].masked_fill_(hidden, 0)
    return visible.sum((1, 2)).cpu().numpy()


def require_unresized(preprocessing: Preprocessing, size: Size) -> None:
    """Refuse images whose hidden pixels on the source grid are no pixels of the input."""
    if not preprocessing.keeps(size):
        raise InputError(
            f"a mask-aware classifier must know which of its input's pixels are hidden, and images of {size[0]}×"
            f"{size[1]} px are resized or cropped; use a threat on the input grid (--grid input)"
        )


def with_mask_channel(inputs: Tensor, hidden: Tensor | None) -> Tensor:
    """Inputs of a mask-aware network: one more channel, 1 where pixels [N, H, W] are hidden; None hides none."""
    channel = torch.zeros_like(inputs[:, :1]) if hidden is None else hidden[:, None].to(inputs.dtype)
    return torch.cat([inputs, channel], dim=1)


def box_masks(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Boxes [N, windows, (top, bottom, left, right)] → bool [N, H, W], True where hidden."""
    rows = torch.arange(size[0], device=boxes.device)
    columns = torch.arange(size[1], device=boxes.device)
    top, bottom, left, right = (boxes[..., k, None] for k in range(4))
    down = (rows >= top) & (rows < bottom)
    across = (columns >= left) & (columns < right)
    hidden = down[:, 0, :, None] & across[:, 0, None, :]
    for k in range(1, boxes.shape[1]):
        hidden |= down[:, k, :, None] & across[:, k, None, :]
    return hidden
