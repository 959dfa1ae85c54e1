"""Pictures that commands draw: images with captions, in rows on a sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from patchcleanser.core.geometry import Window

SIDE = 256
"""Height of an enlarged picture in pixels."""


def frame(pixels: Tensor, words: str, window: Window | None = None, *, hide: bool = False) -> Image.Image:
    """An enlarged picture with a caption; a window is framed, or hidden as by a mask."""
    from PIL import Image, ImageDraw, ImageFont

    from patchcleanser.data.codec import as_picture

    picture = as_picture(pixels)
    scale = max(1, SIDE // picture.height)
    size = picture.width * scale, picture.height * scale
    frame = Image.new("RGB", (size[0], size[1] + 28), "white")
    frame.paste(picture.resize(size, Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(frame)
    if window is not None:
        left, top, right, bottom = (scale * v for v in (window.left, window.top, window.right, window.bottom))
        inside, outside = (left, top, right - 1, bottom - 1), (left - 3, top - 3, right + 2, bottom + 2)
        draw.rectangle(inside if hide else outside, "grey" if hide else None, "grey" if hide else "red", width=3)
    draw.text((0, size[1] + 6), words, "black", ImageFont.load_default(15))
    return frame


def draw_sheet(rows: list[list[Image.Image]], path: Path) -> None:
    """Frames in rows on one white sheet."""
    from PIL import Image

    from patchcleanser.records.atomic import whole_file

    gap = 12
    widths = [sum(f.width + gap for f in frames) + gap for frames in rows]
    heights = [max(f.height for f in frames) + gap for frames in rows]
    sheet = Image.new("RGB", (max(widths), sum(heights)), "white")
    top = gap
    for frames, height in zip(rows, heights, strict=True):
        left = gap
        for one in frames:
            sheet.paste(one, (left, top))
            left += one.width + gap
        top += height
    with whole_file(path) as part:
        sheet.save(part, format="PNG")
