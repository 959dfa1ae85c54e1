"""From images to a classifier's input: check users' images; resize, crop and normalise."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from patchcleanser.core.geometry import Size, is_number
from patchcleanser.core.pixels import pixels_of, range_error
from patchcleanser.errors import ImageError, InputError, did_you_mean

AnyImage: TypeAlias = Tensor | NDArray[Any] | Image.Image
"""One image: a tensor or an array [C, H, W] in [0, 1], or a PIL image."""

AnyImages: TypeAlias = Tensor | NDArray[Any] | Iterable[AnyImage]
"""A batch [N, C, H, W] in [0, 1], or a list or another iterable of images, which may differ in size."""

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Rounding = Literal["even", "down"]

SPEC_OPTIONS = {
    "mean": "0.49,0.48,0.45",
    "std": "0.25,0.24,0.26",
    "resize": "256 (the short side) or 256x320",
    "crop": "224 or 224x320",
    "interpolation": "bilinear",
}
"""Options that the spec of any classifier takes, each with an example."""


def unknown_option(error: Exception, own: Iterable[str]) -> str | None:
    """What to say of an option that a classifier does not have, if that is what went wrong: its own, and the nearest.

    >>> unknown_option(TypeError("f() got an unexpected keyword argument 'maen'"), ["classes"])
    "takes no option 'maen'; it has classes, mean, std, resize, crop, interpolation; did you mean mean?"
    """
    wrong = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    names = list(dict.fromkeys([*own, *SPEC_OPTIONS]))
    if wrong is None:
        return None
    return f"takes no option {wrong[1]!r}; it has {', '.join(names)}{did_you_mean(wrong[1], names)}"


@dataclass(frozen=True)
class Preprocessing:
    """Turns images [N, C, H, W] in [0, 1] into the classifier's input, on the device where they are.

    `resize` is a short side (aspect ratio kept) or an exact size; `crop` is cut from the
    centre; `mean` and `std` are per channel. `fill` is the colour of a mask, per channel in
    [0, 1]: the mean unless said otherwise, which is zero after normalising. Without a mean it
    is mid-grey. Where the centre falls between two pixels, `crop_rounding` decides:
    torchvision and timm round to "even", transformers "down".
    """

    resize: int | Size | None = None
    crop: Size | None = None
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    fill: tuple[float, ...] | None = None
    crop_rounding: Rounding = "even"

    def __post_init__(self) -> None:
        self._check_geometry()
        self._check_colours()

    def _check_geometry(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            raise InputError(f"interpolation is nearest, bilinear or bicubic, got {self.interpolation!r}")
        if self.crop_rounding not in get_args(Rounding):
            raise InputError(f"crop_rounding is even or down, got {self.crop_rounding!r}")
        if not (self.resize is None or _is_side(self.resize) or _is_size(self.resize)):
            raise InputError(f"resize is a short side or (height, width), at least 1 px, got {self.resize!r}")
        if self.crop is None:
            return
        if not _is_size(self.crop):
            raise InputError(f"crop is (height, width), at least 1 px, got {self.crop!r}")
        if isinstance(self.resize, int) and self.resize < max(self.crop):
            raise InputError(f"a crop of {self.crop} does not fit images resized to a short side of {self.resize} px")
        if isinstance(self.resize, tuple) and (self.resize[0] < self.crop[0] or self.resize[1] < self.crop[1]):
            raise InputError(f"a crop of {self.crop} does not fit images resized to {self.resize} px")

    def _check_colours(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std), ("fill", self.fill)):
            if values is not None and not (isinstance(values, tuple | list) and values and all(map(is_number, values))):
                raise InputError(f"{name} is one finite number per channel, got {values!r}; write (0.5, 0.5, 0.5)")
        if (self.mean is None) != (self.std is None):
            raise InputError(f"mean and std come together, got mean={self.mean} and std={self.std}")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise InputError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if self.std is not None and min(self.std) <= 0:
            raise InputError(f"std must be above 0, got {self.std}")
        if self.fill is not None and (min(self.fill) < 0 or max(self.fill) > 1):
            raise InputError(f"fill lies in [0, 1], as pixels do before normalising, got {self.fill}")
        if self.mean is not None and self.fill is not None and len(self.fill) not in (1, len(self.mean)):
            raise InputError(f"fill has {len(self.fill)} channels, the classifier has {len(self.mean)}")
        if self.mean and self.std and max(*self.mean, *self.std) > 2:
            text = "mean=%s and std=%s look like those of pixels from 0 to 255, but pixels lie in [0, 1]: divide by 255"
            logging.getLogger("patchcleanser").warning(text, self.mean, self.std)

    def with_options(self, options: Mapping[str, Any]) -> Preprocessing:
        """This preprocessing with options of a spec in place of its own.

        >>> Preprocessing().with_options({"mean": "0.5,0.4,0.3", "std": (1, 1, 1), "crop": 32}).crop
        (32, 32)
        """
        return replace(self, **{name: _read_option(name, value) for name, value in options.items()})

    @property
    def uncropped(self) -> Preprocessing:
        """The same input size, but of the full image instead of a crop."""
        return replace(self, resize=self.crop or self.resize, crop=None)

    @property
    def free_size(self) -> bool:
        """Whether images keep their size."""
        return self.resize is None and self.crop is None

    @property
    def channels(self) -> int | None:
        """Number of colour channels, if known."""
        return None if self.mean is None else len(self.mean)

    def source_fill(self, channels: int) -> tuple[float, ...]:
        """The mask colour in the image as it came, in [0, 1]."""
        fill = self.fill or self.mean or (0.5,)
        if len(fill) not in (1, channels):
            raise InputError(f"the mask colour {fill} has {len(fill)} channels, the images have {channels}; set fill=")
        return fill * channels if len(fill) == 1 else fill

    def input_fill(self, channels: int) -> tuple[float, ...]:
        """The mask colour after normalising."""
        fill = self.source_fill(channels)
        if self.mean is None or self.std is None:
            return fill
        return tuple((f - m) / s for f, m, s in zip(fill, self.mean, self.std, strict=True))

    def __call__(self, images: Tensor) -> Tensor:
        return self.normalise(self.geometry(images))

    def geometry(self, images: Tensor) -> Tensor:
        """Resize and crop, still in [0, 1]."""
        height, width = images.shape[-2:]
        size = self._resized(height, width)
        if size != (height, width):
            smooth = {} if self.interpolation == "nearest" else {"align_corners": False, "antialias": True}
            images = functional.interpolate(images, size=size, mode=self.interpolation, **smooth)
            if self.interpolation == "bicubic":
                images = images.clamp(0, 1)  # bicubic overshoots; 8-bit pipelines clip there too
        if self.crop is not None and self.crop != size:
            if size[0] < self.crop[0] or size[1] < self.crop[1]:
                raise InputError(f"a crop of {self.crop} px does not fit an image of {size} px; set resize=")
            to_integer = round if self.crop_rounding == "even" else math.floor
            top, left = (to_integer((have - want) / 2) for have, want in zip(size, self.crop, strict=True))
            images = images[..., top : top + self.crop[0], left : left + self.crop[1]]
        return images

    def keeps(self, size: Size) -> bool:
        """Whether images of this size go to the model pixel by pixel, neither resized nor cropped."""
        return self._resized(*size) == size and self.crop in (None, size)

    def normalise(self, images: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation, per channel."""
        if self.mean is None or self.std is None:
            return images
        mean, std = (torch.tensor(v, dtype=images.dtype, device=images.device) for v in (self.mean, self.std))
        return (images - mean[:, None, None]) / std[:, None, None]

    def _resized(self, height: int, width: int) -> Size:
        if self.resize is None:
            return height, width
        if not isinstance(self.resize, int):
            return self.resize
        short = min(height, width)
        return tuple(  # type: ignore[return-value]
            self.resize if side == short else math.floor(self.resize * side / short) for side in (height, width)
        )


def _read_option(name: str, value: Any) -> Any:
    """The value of a spec's option: text, a number or several."""
    try:
        if name in ("mean", "std"):
            parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Iterable) else (value,)
            return tuple(map(float, parts))
        if name in ("resize", "crop") and isinstance(value, str):
            return tuple(map(int, value.split("x")))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is written as {SPEC_OPTIONS[name]}, got {value!r}") from error
    return (value, value) if name == "crop" and isinstance(value, int) else value


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_side, value))


def checked_images(images: Any, channels: int | None) -> Iterator[Tensor]:
    """Each image as a float32 tensor [C, H, W]; sizes may differ.

    Takes a batch [N, C, H, W] or any iterable of images [C, H, W]: tensors, arrays or PIL
    images. Iterables are read as they are needed, so a stream of any length is fine.
    """
    if isinstance(images, (Tensor, np.ndarray)):
        if images.ndim != 4:
            hint = "; put the one image into a list" if images.ndim == 3 else ""
            raise ImageError(f"a batch of images has shape [N, C, H, W], got {tuple(images.shape)}{hint}")
        if len(images) == 0:
            raise ImageError(f"a batch needs at least 1 image, got shape {tuple(images.shape)}")
    elif isinstance(images, DataLoader) and images.batch_sampler is not None:
        raise ImageError(
            "a DataLoader gives batches; pass one batch of images at a time, or the loader to "
            "CertifiedAccuracy(…).score(loader) or to Job(classifier, loader, …)"
        )
    elif isinstance(images, (str, bytes, Image.Image)) or not isinstance(images, Iterable):
        hint = "; put the one image into a list" if isinstance(images, Image.Image) else ""
        raise ImageError(f"images come as a batch [N, C, H, W] or a list of images, got {type(images).__name__}{hint}")
    count = -1
    for count, image in enumerate(images):
        yield checked_image(image, channels, count)
    if count < 0:
        raise ImageError("a batch needs at least 1 image, got none")


def checked_image(image: Any, channels: int | None, number: int = 0) -> Tensor:
    """One image as float32 [C, H, W]; errors name it by its number."""
    where = f"image {number}"
    if isinstance(image, Image.Image):
        return _from_picture(image, channels, where)
    if not isinstance(image, (Tensor, np.ndarray)):
        raise ImageError(f"{where} is a {type(image).__name__}; pass a tensor, an array or a PIL image")
    tensor = image if isinstance(image, Tensor) else _from_array(image, where)
    if not tensor.is_floating_point():
        shape = tuple(tensor.shape)
        if tensor.dtype != torch.uint8:
            fix = "floats in [0, 1]"
        else:
            fix = "Image.fromarray(image)" if _has_channels_last(shape, channels) else "images / 255"
        raise ImageError(f"{where} has type {tensor.dtype} and shape {shape}; pass {fix}")
    if tensor.ndim != 3:
        raise ImageError(f"{where} has shape {tuple(tensor.shape)}; one image is [channels, height, width]")
    if _has_channels_last(tuple(tensor.shape), channels):
        raise ImageError(f"{where} has shape {tuple(tensor.shape)}, which looks like [H, W, C]; channels come first")
    if channels is not None and tensor.shape[0] != channels:
        raise ImageError(f"{where} has {tensor.shape[0]} channels, the classifier's mean and std have {channels}")
    if min(tensor.shape) < 1:
        raise ImageError(f"{where} has no pixels: shape {tuple(tensor.shape)}")
    tensor = tensor.detach().to(torch.float32, copy=True)  # a stream may use its buffer again
    problem = range_error(*(float(v) for v in tensor.aminmax()))
    if problem is not None:
        raise ImageError(f"{where} has {problem}")
    return tensor


def _has_channels_last(shape: tuple[int, ...], channels: int | None) -> bool:
    """Whether an image looks like [H, W, C]."""
    return len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4) and channels != shape[0]


def _from_picture(picture: Image.Image, channels: int | None, where: str) -> Tensor:
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
