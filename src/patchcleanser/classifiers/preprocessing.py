"""What happens to an image before the classifier sees it: resize, crop, normalise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.windows import Size
from patchcleanser.errors import InputError

Interpolation = Literal["nearest", "bilinear", "bicubic"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """From images [N, C, H, W] in [0, 1] to the classifier's input, on whatever device they are.

    `resize` is a short side (aspect ratio kept) or an exact size; `crop` is cut from the
    centre; `mean` and `std` are per channel. `fill` is the colour of a mask, per channel in
    [0, 1]: the mean unless said otherwise, which is zero after normalising. Without a mean it
    is mid-grey.
    """

    resize: int | Size | None = None
    crop: Size | None = None
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    fill: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise InputError(f"mean and std come together, got mean={self.mean} and std={self.std}")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise InputError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if self.std is not None and min(self.std) <= 0:
            raise InputError(f"std must be above 0, got {self.std}")
        if self.mean is not None and self.fill is not None and len(self.fill) not in (1, len(self.mean)):
            raise InputError(f"fill has {len(self.fill)} channels, the classifier has {len(self.mean)}")
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise InputError(f"interpolation is nearest, bilinear or bicubic, got {self.interpolation!r}")
        if self.crop is not None and isinstance(self.resize, int) and self.resize < max(self.crop):
            raise InputError(f"a crop of {self.crop} does not fit images resized to a short side of {self.resize} px")

    @property
    def channels(self) -> int | None:
        """Number of colour channels, if known."""
        return None if self.mean is None else len(self.mean)

    def source_fill(self, channels: int) -> tuple[float, ...]:
        """The mask colour in the image as it came, in [0, 1]."""
        fill = self.fill or self.mean or (0.5,)
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
            top, left = ((have - want) // 2 for have, want in zip(size, self.crop, strict=True))
            if top < 0 or left < 0:
                raise InputError(f"a crop of {self.crop} px does not fit an image of {size} px; set resize=")
            images = images[..., top : top + self.crop[0], left : left + self.crop[1]]
        return images

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
