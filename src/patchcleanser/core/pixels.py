"""A picture to pixels, by the same rules whether it was a file or came from a user's own code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from patchcleanser.errors import DataError

BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # two TIFF tags, and a value of the second


def pixels_of(picture: Image.Image, channels: int = 3) -> NDArray[np.float32]:
    """Float32 [channels, H, W] in [0, 1], in colour or, of one channel, gray; the picture stays as it is.

    Turned upright by its EXIF orientation (damaged EXIF is ignored), over white where it is transparent.
    Colour profiles are ignored.

    >>> pixels_of(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).ravel().tolist()
    [1.0, 1.0, 1.0]
    """
    picture.load()
    upright = _upright(picture)
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        return np.repeat(_deep_gray(picture, upright)[None], channels, axis=0)
    if upright.has_transparency_data:
        shown = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    values = np.atleast_3d(np.asarray(upright.convert("L" if channels == 1 else "RGB"))).transpose(2, 0, 1)
    # By numpy: torch would wake its threads for every image, which on a busy machine takes longer than decoding.
    return np.ascontiguousarray(values).astype(np.float32) / np.float32(255)


def range_error(low: float, high: float) -> str | None:
    """What is wrong with pixels from `low` to `high`, NaN included, and the fix; None if they lie in [0, 1].

    >>> range_error(0, 255), range_error(0, 1)
    ('values from 0 to 255; pixels lie in [0, 1]: divide them by 255', None)
    """
    if low >= 0 and high <= 1:  # NaN fails this
        return None
    got = "NaN" if low != low or high != high else f"values from {low:g} to {high:g}"
    fix = ": divide them by 255" if low >= 0 and 2 < high <= 255 else ", and are normalised by the classifier"
    return f"{got}; pixels lie in [0, 1]{fix}"


def _upright(picture: Image.Image) -> Image.Image:
    try:
        if picture.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return picture
        return ImageOps.exif_transpose(picture)
    except Exception:
        return picture  # damaged EXIF, but the pixels are whole: every viewer shows them as they are


def _deep_gray(picture: Image.Image, upright: Image.Image) -> NDArray[np.float32]:
    """Gray of more than 8 bits, [H, W] in [0, 1]; Pillow's own conversion would clip it at 255."""
    if picture.mode == "I" and picture.format not in ("PNG", "PPM"):
        raise DataError("gray values of 32 bits, or below zero, have no agreed white; save it with 8 or 16 bits")
    tags = getattr(picture, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    white = 1 if picture.mode == "F" else 2**bits - 1
    values = np.asarray(upright)
    gray = (values / white).astype(np.float32)
    if not (gray.min() >= 0 and gray.max() <= 1):  # so that NaN is refused too
        raise DataError(f"its values go from {gray.min():g} to {gray.max():g}; they must lie in 0 to 1")
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        gray = 1 - gray
    return np.where(values == picture.info.get("transparency", -1), np.float32(1), gray)
