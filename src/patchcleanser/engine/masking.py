"""Copies of images with boxes of pixels hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.core.tables import Indices, LabelTable
from patchcleanser.core.windows import Size
from patchcleanser.errors import InputError


def boxes_of(wanted: Sequence[tuple[LabelTable, Indices]]) -> NDArray[np.int32]:
    """The boxes of all wanted unions in order, filled up to the same number of windows."""
    found = [table.mask_set.unions.boxes[unions] for table, unions in wanted]
    most = max(boxes.shape[1] for boxes in found)
    whole = [b if b.shape[1] == most else np.pad(b, ((0, 0), (0, most - b.shape[1]), (0, 0))) for b in found]
    return np.concatenate(whole)


def copies(pixels: Sequence[Tensor], which: NDArray[np.intp], *, rounded: torch.dtype | None = None) -> Tensor:
    """One copy of an image for each pair, [N, C, H, W]; on a GPU rounded ones have their channels last."""
    if pixels[0].device.type == "cpu":
        images = [one.to(rounded or one.dtype) for one in pixels]
        return torch.stack([images[k] for k in which])
    return _chosen(pixels, which, rounded)


def _chosen(pixels: Sequence[Tensor], which: NDArray[np.intp], rounded: torch.dtype | None) -> Tensor:
    """The same in one go, as a GPU likes it."""
    images = torch.stack(list(pixels))
    numbers = sent(which, images.device)
    if rounded is None:
        return images.index_select(0, numbers)
    rows = images.permute(0, 2, 3, 1).to(rounded, memory_format=torch.contiguous_format)
    return rows.index_select(0, numbers).permute(0, 3, 1, 2)


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device. A GPU gets it in its turn; from other memory it would have to come to rest first."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def covered(images: Tensor, boxes: NDArray[np.int32], fill: Sequence[float]) -> Tensor:
    """Images [N, C, H, W] with the boxes [N, windows, (top, bottom, left, right)] filled; the given ones may change.

    A CPU writes into what is hidden and nowhere else; a GPU would be kept waiting by so many small orders, and numpy
    knows no bfloat16.
    """
    colour = sent(np.asarray(fill, dtype=np.float32), images.device).to(images.dtype)[:, None, None]
    if images.device.type != "cpu" or images.dtype == torch.bfloat16:
        hidden = _hidden(sent(boxes, images.device), images.shape[-2:])
        return torch.where(hidden[:, None], colour, images)
    pixels, paint = images.numpy(), colour.numpy()
    for image, windows in zip(pixels, boxes.tolist(), strict=True):
        for top, bottom, left, right in windows:
            image[:, top:bottom, left:right] = paint
    return images


def require_kept(preprocessing: Preprocessing, size: Size) -> None:
    """Refuse images whose hidden pixels on the source grid are no pixels of the input."""
    if not preprocessing.keeps(size):
        raise InputError(
            f"a mask-aware classifier must know which of its input's pixels are hidden, and images of {size[0]}×"
            f"{size[1]} px are resized or cropped; use a threat on the input grid (--grid input)"
        )


def told(inputs: Tensor, hidden: Tensor | None) -> Tensor:
    """What a mask-aware network is given: one more channel, 1 where pixels [N, H, W] are hidden; None hides none."""
    channel = torch.zeros_like(inputs[:, :1]) if hidden is None else hidden[:, None].to(inputs.dtype)
    return torch.cat([inputs, channel], dim=1)


def _hidden(boxes: Tensor, size: Sequence[int]) -> Tensor:
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
