"""patchcleanser masks: a mask set, and the proof that it covers the threat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import AsJson, MaskOptions, parse_threat, per_axis
from patchcleanser.cli.progress import LOGGER
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import size_in_words
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.core.masks import MaskSet

MAX_PANELS = 144
"""More masks than this are not drawn one by one."""
VISIBLE, HIDDEN = (226, 231, 238), (24, 61, 112)
"""Colours of pixels."""


def masks(
    options: MaskOptions,
    image: Annotated[str, typer.Option(help="Size of the image in px: 224, or 480x640 (height x width).")] = "224",
    png: Annotated[Path | None, typer.Option(help="Draw the masks into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the masks for a threat, how many classifications they cost, and that they cover it."""
    from patchcleanser.core.masks import MaskSet

    threat, size = parse_threat(options.patch, options.patches, None), per_axis(image, "image")
    chosen = options.mask_set_options
    mask_set = MaskSet.build(threat, image=size, masks=chosen["masks"], stride=chosen["stride"])
    mask_set.require_cover(threat)
    shapes, cover = threat.shapes(size), mask_set.cover(threat)
    positions = sum((size[0] - h + 1) * (size[1] - w + 1) for h, w in shapes) ** threat.count
    if png is not None:
        draw(mask_set, png)
    if as_json:
        result = {
            "threat": threat.to_dict(),
            "image": list(size),
            "patch_shapes": [list(shape) for shape in shapes],
            "masks": [[list(window.numbers) for window in mask] for mask in mask_set.masks],
            "predict_classifications": len(mask_set),
            "certify_classifications": len(mask_set.unions),
            "covered": True,
            "positions": positions,
            "hardest_placements": len(cover.placements),
        }
        print(json.dumps(result, indent=1))
        return
    largest = max((w.area, w) for mask in mask_set.masks for w in mask)[1]
    if size[0] > size[1]:
        LOGGER.info("--image %s is upright; for a picture that is wider than high write %dx%d", image, size[1], size[0])
    number = counted(len(mask_set), "mask")
    print(f"{threat} on an image of {size_in_words(size)} px: {number}, the largest window {largest}")
    if len(shapes) == 1:
        print(f"the patch is {shapes[0][0]}×{shapes[0][1]} px, {shapes[0][0] * shapes[0][1] / size[0] / size[1]:.2%}")
    else:
        print(f"{len(shapes)} shapes of patch, from {shapes[0]} to {shapes[-1]} px")
    certify = len(mask_set.unions)
    print(f"predict: {counted(len(mask_set), 'classification')} of a clean image; certify: {certify}")
    hardest = len(cover.placements)
    checked = f"the {hardest:,} hardest were checked one by one, and the others are under their masks"
    checked = "all were checked one by one" if hardest >= positions else checked
    print(f"covering: proved. Each of the {positions:,} placements lies under some mask; {checked}")
    if png is not None:
        print(f"drawn in {png}")


def draw(masks: MaskSet, path: Path) -> None:
    """Draw one small panel per mask, with the pixels it hides in a dark colour."""
    from math import ceil, sqrt

    import numpy as np
    from PIL import Image

    from patchcleanser.records.atomic import whole_file

    if len(masks) > MAX_PANELS:
        raise InputError(f"{len(masks)} masks are too many to draw one by one; at most {MAX_PANELS}")
    if path.suffix.lower() != ".png":
        raise InputError(f"--png writes a PNG file, got {path}")
    height, width = masks.image
    scale = max(1, 96 // max(height, width)) if max(height, width) < 96 else 96 / max(height, width)
    cell = round(height * scale), round(width * scale)
    across = ceil(sqrt(len(masks)))
    down, gap = ceil(len(masks) / across), 6
    sheet = np.full((down * (cell[0] + gap) + gap, across * (cell[1] + gap) + gap, 3), 255, dtype=np.uint8)
    for number, visible in enumerate(masks.visible()):
        panel = np.where(visible[..., None], np.array(VISIBLE), np.array(HIDDEN))
        small = Image.fromarray(panel.astype(np.uint8)).resize((cell[1], cell[0]), Image.Resampling.NEAREST)
        top, left = gap + number // across * (cell[0] + gap), gap + number % across * (cell[1] + gap)
        sheet[top : top + cell[0], left : left + cell[1]] = np.asarray(small)
    with whole_file(path) as part:
        Image.fromarray(sheet).save(part, format="PNG")
