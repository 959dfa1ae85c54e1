"""Decode image files to pixels, or fail with an error that names the image; and pixels to PIL images."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from patchcleanser.core.pixels import pixels_of
from patchcleanser.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are opened. Pillow reads more, and runs other programs for some of them (EPS)."""

MAX_SCANS = 200
"""How many passes over its pixels a JPEG may have; cameras and compressors write one to a few dozen. A pass takes a
handful of bytes, so that a file of 10 MB could keep a decoder busy for a quarter of an hour."""
MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
"""The start of a JPEG segment; 00 and D0 to D7 occur inside coded pixels."""
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9

BLOCK, TIMED = 1000, 20
SLOW_SECONDS = 0.001
"""The first images of a block are timed: if one takes longer than this, threads read the rest. For small images, whose
decoding hardly leaves Python, threads are slower (at 64 px 0.8 ms an image with four threads, 0.4 ms without)."""

Item = TypeVar("Item")


def as_bytes(pixels: Tensor) -> NDArray[np.uint8]:
    """[C, H, W] in [0, 1] as uint8 [H, W, C]; pixels of 8-bit images are restored exactly."""
    array: NDArray[np.uint8] = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return array


def as_picture(pixels: Tensor) -> Image.Image:
    """[C, H, W] in [0, 1] as a PIL image, in colour or grey."""
    array = as_bytes(pixels)
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def decode(content: bytes, name: str, *, formats: Sequence[str] = FORMATS) -> Tensor:
    """An image file as float32 [3, H, W] in [0, 1], by the rules of core/pixels.py; the first frame of several."""
    try:
        with Image.open(io.BytesIO(content), formats=_supported(tuple(formats))) as picture:
            if Image.MAX_IMAGE_PIXELS is not None and picture.width * picture.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError  # where Pillow only warns
            if picture.format in ("JPEG", "MPO"):
                _check_scans(content)
            pixels = pixels_of(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"cannot decode image {name}: it has more than {Image.MAX_IMAGE_PIXELS:,} pixels, the limit against "
            "decompression bombs; make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except UnidentifiedImageError as error:
        problem = f"damaged, or none of {' '.join(_supported(tuple(formats)))}" if content else "empty"
        raise DataError(f"cannot decode image {name}: the file is {problem}") from error
    except Exception as error:  # Pillow's readers raise whatever the damage leads them to
        raise DataError(f"cannot decode image {name}: {str(error) or type(error).__name__}") from error
    import torch  # here, so that listing datasets does not wait for it

    return torch.from_numpy(pixels)


def _check_scans(content: bytes) -> None:
    position, scans = 2, 0
    while (match := MARKER.search(content, position)) and content[match.end() - 1] != END_OF_IMAGE:
        scans += content[match.end() - 1] == START_OF_SCAN
        if scans > MAX_SCANS:
            raise DataError(f"it asks for more than {MAX_SCANS} passes over its pixels; save it again")
        position = match.end() + int.from_bytes(content[match.end() : match.end() + 2], "big")


@cache
def _supported(formats: tuple[str, ...]) -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in formats if name in Image.OPEN)  # Pillow can be built without some


def map_images(read: Callable[[int], Item], number: int) -> Iterator[Item]:
    """What `read` returns for each of so many images, in order; slow images are read by threads."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, number, BLOCK):  # images of the same source are neighbours
            block = range(start, min(start + BLOCK, number))
            started = time.monotonic()
            first = list(map(read, block[:TIMED]))
            slow = time.monotonic() - started > SLOW_SECONDS * TIMED
            yield from first
            yield from (pool.map if slow else map)(read, block[TIMED:])
