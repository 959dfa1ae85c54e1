"""What happens to an image before the classifier sees it: resize, crop, normalise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.geometry import Size
from patchcleanser.errors import InputError

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Rounding = Literal["even", "down"]


@dataclass(frozen=True)
class Preprocessing:
    """From images [N, C, H, W] in [0, 1] to the classifier's input, on whatever device they are.

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
            if values is not None and not (len(values) and all(map(math.isfinite, values))):
                raise InputError(f"{name} is one finite number per channel, got {values}")
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

    @property
    def uncropped(self) -> Preprocessing:
        """The same size of input, of the whole image."""
        return replace(self, resize=self.crop or self.resize, crop=None)

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
        """Resize, crop and normalise."""
        return self.normalise(self.geometry(images))

    def geometry(self, images: Tensor) -> Tensor:
        """Resize and crop, still in [0, 1]."""
        height, width = images.shape[-2:]
        size = self._resized(height, width)
        if size != (height, width):
            smooth = self.interpolation != "nearest"
            images = functional.interpolate(
                images,
                size=size,
                mode=self.interpolation,
                align_corners=False if smooth else None,
                antialias=smooth,
            )
            if self.interpolation == "bicubic":
                images = images.clamp(0, 1)  # bicubic overshoots; 8-bit pipelines clip there too
        if self.crop is not None and self.crop != size:
            if size[0] < self.crop[0] or size[1] < self.crop[1]:
                raise InputError(f"a crop of {self.crop} px does not fit an image of {size} px; set resize=")
            rounded = round if self.crop_rounding == "even" else math.floor
            top, left = (rounded((have - want) / 2) for have, want in zip(size, self.crop, strict=True))
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


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_side, value))
