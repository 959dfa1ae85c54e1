"""Images from users, checked: float in [0, 1], channels first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from patchcleanser.core.pixels import pixels_of
from patchcleanser.errors import ImageError


def checked_images(images: Any, channels: int | None) -> Iterator[Tensor]:
    """Each image as a float32 tensor [C, H, W]; sizes may differ.

    Takes a batch [N, C, H, W] or any iterable of images [C, H, W]: tensors, arrays or PIL
    images. Iterables are read as they are needed, so a stream of any length is fine.
    """
    if isinstance(images, (Tensor, np.ndarray)):
        if images.ndim != 4:
            raise ImageError(f"a batch of images has shape [N, C, H, W], got {tuple(images.shape)}")
        if len(images) == 0:
            raise ImageError(f"a batch needs at least 1 image, got shape {tuple(images.shape)}")
    elif isinstance(images, (str, bytes, Image.Image)) or not isinstance(images, Iterable):
        raise ImageError(f"images come as a batch [N, C, H, W] or a list of images, got {type(images).__name__}")
    count = -1
    for count, image in enumerate(images):
        yield checked_image(image, channels, count)
    if count < 0:
        raise ImageError("a batch needs at least 1 image, got none")


def checked_image(image: Any, channels: int | None, number: int = 0) -> Tensor:
    """One image as float32 [C, H, W]; what is wrong with it is said with its number."""
    where = f"image {number}"
    if isinstance(image, Image.Image):
        return _from_picture(image, channels, where)
    if not isinstance(image, (Tensor, np.ndarray)):
        raise ImageError(f"{where} is a {type(image).__name__}; pass a tensor, an array or a PIL image")
    tensor = image if isinstance(image, Tensor) else _from_array(image, where)
    if not tensor.is_floating_point():
        raise ImageError(f"{where} has type {tensor.dtype}; pass floats in [0, 1] (divide 8-bit pixels by 255)")
    if tensor.ndim != 3:
        raise ImageError(f"{where} has shape {tuple(tensor.shape)}; one image is [channels, height, width]")
    if tensor.shape[-1] in (1, 3, 4) and tensor.shape[0] not in (1, 3, 4) and channels != tensor.shape[0]:
        raise ImageError(f"{where} has shape {tuple(tensor.shape)}, which looks like [H, W, C]; channels come first")
    if channels is not None and tensor.shape[0] != channels:
        raise ImageError(f"{where} has {tensor.shape[0]} channels, the classifier takes {channels}")
    if min(tensor.shape) < 1:
        raise ImageError(f"{where} has no pixels: shape {tuple(tensor.shape)}")
    tensor = tensor.detach().to(torch.float32, copy=True)  # a stream may use its buffer again
    low, high = (float(v) for v in tensor.aminmax())
    if not (low >= 0 and high <= 1):  # NaN fails this too
        got = "NaN" if low != low or high != high else f"values from {low:g} to {high:g}"
        raise ImageError(f"{where} has {got}; pixels lie in [0, 1]")
    return tensor


def _from_picture(picture: Image.Image, channels: int | None, where: str) -> Tensor:
    """A PIL image by the rules for files: upright, over white, and deep gray as deep as it is."""
    try:
        return torch.from_numpy(pixels_of(picture, 1 if channels == 1 else 3))
    except Exception as error:  # a picture opened but not yet read fails in whatever way its damage leads to
        raise ImageError(f"{where} cannot be read: {str(error) or type(error).__name__}") from error


def _from_array(array: NDArray[Any], where: str) -> Tensor:
    try:
        # A copy, since torch takes no negative strides or foreign byte order, and warns of read-only memory.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise ImageError(f"{where} has type {array.dtype}; pass floats in [0, 1]") from error
