"""patchcleanser masks: a mask set, and the proof that it covers the threat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import PATCH, AsJson, Masks, Patch, Patches, Stride, pair, pair_if, threat_of
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.core.masks import MaskSet

PANELS = 144
"""More masks than this are not drawn one by one."""
LIGHT, DARK = (226, 231, 238), (24, 61, 112)


def masks(
    patch: Patch = PATCH,
    image: Annotated[str, typer.Option(help="Size of the image in px: 224, or 480x640 (height x width).")] = "224",
    patches: Patches = 1,
    count: Masks = None,
    stride: Stride = None,
    png: Annotated[Path | None, typer.Option(help="Draw the masks into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the masks for a threat, how many classifications they cost, and that they cover it."""
    from patchcleanser.core.masks import MaskSet

    threat, size = threat_of(patch, patches, None), pair(image, "image")
    built = MaskSet.build(threat, image=size, masks=pair_if(count, "masks"), stride=pair_if(stride, "stride"))
    built.require_cover(threat)
    shapes, cover = threat.shapes(size), built.cover(threat)
    corners = sum((size[0] - h + 1) * (size[1] - w + 1) for h, w in shapes)
    facts = {
        "threat": threat.to_json(),
        "image": list(size),
        "patch_shapes": [list(shape) for shape in shapes],
        "masks": [[list(window.numbers) for window in mask] for mask in built.masks],
        "predict_classifications": len(built),
        "certify_classifications": len(built.unions),
        "covered": True,
        "positions": corners**threat.count,
        "hardest_placements": len(cover.placements),
    }
    if png is not None:
        draw(built, png)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    largest = max((w.area, w) for mask in built.masks for w in mask)[1]
    print(f"{threat} on an image of {size[0]}×{size[1]} px: {len(built)} masks, the largest window {largest}")
    if len(shapes) == 1:
        print(f"the patch is {shapes[0][0]}×{shapes[0][1]} px, {shapes[0][0] * shapes[0][1] / size[0] / size[1]:.2%}")
    else:
        print(f"{len(shapes)} shapes of patch, from {shapes[0]} to {shapes[-1]} px")
    print(f"predict: {len(built)} classifications of a clean image; certify: {len(built.unions)}")
    print(
        f"covering: proved. Each of the {corners**threat.count:,} placements lies under some mask; the "
        f"{len(cover.placements)} hardest were checked one by one, and the others are under their masks"
    )
    if png is not None:
        print(f"drawn in {png}")


def draw(masks: MaskSet, path: Path) -> None:
    """One small picture for each mask: what it hides of the image."""
    from math import ceil, sqrt

    import numpy as np
    from PIL import Image

    from patchcleanser.records.atomic import whole_file

    if len(masks) > PANELS:
        raise InputError(f"{len(masks)} masks are too many to draw one by one; at most {PANELS}")
    if path.suffix.lower() != ".png":
        raise InputError(f"--png writes a PNG file, got {path}")
    height, width = masks.image
    scale = max(1, 96 // max(height, width)) if max(height, width) < 96 else 96 / max(height, width)
    cell = round(height * scale), round(width * scale)
    across = ceil(sqrt(len(masks)))
    down, gap = ceil(len(masks) / across), 6
    sheet = np.full((down * (cell[0] + gap) + gap, across * (cell[1] + gap) + gap, 3), 255, dtype=np.uint8)
    for number, kept in enumerate(masks.visible()):
        panel = np.where(kept[..., None], np.array(LIGHT), np.array(DARK))
        small = Image.fromarray(panel.astype(np.uint8)).resize((cell[1], cell[0]), Image.Resampling.NEAREST)
        top, left = gap + number // across * (cell[0] + gap), gap + number % across * (cell[1] + gap)
        sheet[top : top + cell[0], left : left + cell[1]] = np.asarray(small)
    with whole_file(path) as part:
        Image.fromarray(sheet).save(part, format="PNG")
