"""Encoded pictures to pixels, right or with an error that names the image; and pixels back to pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from patchcleanser.errors import DataError

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pictures we open. Pillow knows more, and runs other programs on some of them (EPS)."""

BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF tags, and what the second may say


def as_bytes(pixels: Tensor) -> NDArray[np.uint8]:
    """[C, H, W] in [0, 1] as uint8 [H, W, C]; 8-bit pictures come back as they were."""
    array: NDArray[np.uint8] = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return array


def as_picture(pixels: Tensor) -> Image.Image:
    """[C, H, W] in [0, 1] as a picture, in colour or grey."""
    array = as_bytes(pixels)
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


class Header(NamedTuple):
    """What a picture says of itself before it is decoded."""

    format: str
    height: int
    width: int


def header(content: bytes, formats: Sequence[str] = FORMATS) -> Header | None:
    """Format and size from the first bytes of a picture; None if it is none of these formats."""
    try:
        with Image.open(io.BytesIO(content), formats=_known(tuple(formats))) as picture:
            return Header(picture.format or "", picture.height, picture.width)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except Exception:  # Pillow's readers raise whatever the damage leads them to
        return None


def decode(content: bytes, name: str, *, formats: Sequence[str] = FORMATS) -> Tensor:
    """An encoded picture as float32 [3, H, W] in [0, 1].

    Turned upright as its EXIF says (damaged EXIF says nothing), in colour, over white where it is
    transparent, and the first frame where there are several. Colour profiles are ignored.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_known(tuple(formats))) as picture:
            pixels = _pixels(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"cannot decode image {name}: it has more than {Image.MAX_IMAGE_PIXELS:,} pixels, the limit against "
            "decompression bombs; make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except UnidentifiedImageError as error:
        what = f"damaged, or none of {' '.join(_known(tuple(formats)))}" if content else "empty"
        raise DataError(f"cannot decode image {name}: the file is {what}") from error
    except Exception as error:  # Pillow's readers raise whatever the damage leads them to
        raise DataError(f"cannot decode image {name}: {str(error) or type(error).__name__}") from error
    return torch.from_numpy(pixels)


@cache
def _known(formats: tuple[str, ...]) -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in formats if name in Image.OPEN)  # Pillow can be built without some


def _pixels(picture: Image.Image) -> NDArray[np.float32]:
    """Float32 [3, H, W] in [0, 1]."""
    if Image.MAX_IMAGE_PIXELS is not None and picture.width * picture.height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError  # where Pillow only warns
    picture.load()
    _turn_upright(picture)
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        return np.repeat(_deep_gray(picture)[None], 3, axis=0)
    if picture.has_transparency_data:
        shown = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    channels = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    # By numpy: torch would wake its threads for every image, which on a busy machine takes longer than decoding.
    return np.ascontiguousarray(channels).astype(np.float32) / np.float32(255)


def _turn_upright(picture: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(picture, in_place=True)
    except Exception:
        return  # damaged EXIF, but the pixels are whole: every viewer shows them as they are


def _deep_gray(picture: Image.Image) -> NDArray[np.float32]:
    """Gray of more than 8 bits, [H, W] in [0, 1]; Pillow's own conversion would clip it at 255."""
    if picture.mode == "I" and picture.format not in ("PNG", "PPM"):
        raise DataError("gray values of 32 bits, or below zero, have no agreed white; save it with 8 or 16 bits")
    tags = getattr(picture, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    white = 1 if picture.mode == "F" else 2**bits - 1
    values = np.asarray(picture)
    gray = (values / white).astype(np.float32)
    if not (gray.min() >= 0 and gray.max() <= 1):  # so that NaN is refused too
        raise DataError(f"its values go from {gray.min():g} to {gray.max():g}; they must lie in 0 to 1")
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        gray = 1 - gray
    return np.where(values == picture.info.get("transparency", -1), np.float32(1), gray)
