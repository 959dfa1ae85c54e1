"""Draw a patch that the paper's masks for enlarged CIFAR miss, and count how many they miss.

    python benchmarks/grids.py --out docs/pictures/uncovered.png

A 5×5 patch on 32×32 pixels is enlarged with the image to 224×224. Which pixels it touches there is
measured, not assumed: two images that differ only in the patch are enlarged, and compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from patchcleanser import MaskSet, Preprocessing, Threat, Window, load_dataset
from patchcleanser.data.codec import as_bytes

SOURCE, INPUT, PATCH, ENLARGED = 32, 224, 5, 35
ENLARGE = Preprocessing((INPUT, INPUT), None, "bicubic")


def footprint(top: int, left: int) -> Window:
    """The pixels of the enlarged image that a patch with this corner touches: everything that changes with it."""
    images = torch.full((2, 3, SOURCE, SOURCE), 0.5)
    images[0, :, top : top + PATCH, left : left + PATCH] = 0.0
    images[1, :, top : top + PATCH, left : left + PATCH] = 1.0
    dark, bright = ENLARGE.geometry(images)
    rows, columns = ((dark != bright).any(dim=0).any(dim=axis).nonzero().flatten() for axis in (1, 0))
    return Window(int(rows[0]), int(columns[0]), len(rows), len(columns))


def missed(masks: MaskSet) -> list[tuple[int, int]]:
    """The corners of source patches whose footprint no mask hides, by the core's exact check."""
    axis = [footprint(at, 0) for at in range(SOURCE - PATCH + 1)]  # both axes are enlarged alike
    corners = []
    for top, down in enumerate(axis):
        for left, across in enumerate(axis):
            window = Window(down.top, across.top, down.height, across.height)
            # A patch as large as its region has one place, so this asks about exactly these pixels.
            if not masks.covers(Threat.rectangle(window.height, window.width, region=window)):
                corners.append((top, left))
    return corners


def draw(path: Path, corner: tuple[int, int], masks: MaskSet) -> None:
    image = load_dataset("sample").image(2)
    window = footprint(*corner)
    best = max(masks.masks, key=lambda mask: _overlap(mask[0], window))[0]
    image[:, corner[0] : corner[0] + PATCH, corner[1] : corner[1] + PATCH] = torch.tensor([1.0, 0.1, 0.1])[
        :, None, None
    ]
    large = ENLARGE.geometry(image[None])[0]
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for axes, shown, title in (
        (first, image, f"a {PATCH}×{PATCH} patch on the {SOURCE}×{SOURCE} image"),
        (second, large, f"enlarged: it touches {window.height}×{window.width} px"),
        (third, _hidden(large, best), f"the best of {len(masks)} masks leaves some of it"),
    ):
        axes.imshow(as_bytes(shown), interpolation="nearest")
        axes.set_title(title, fontsize=8.5)
        axes.set_axis_off()
    for axes in (second, third):
        _outline(axes, window, "#ffffff", "touched")
        _outline(axes, best, "#0b6e5d", "mask")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")


def _overlap(mask: Window, window: Window) -> int:
    height = min(mask.bottom, window.bottom) - max(mask.top, window.top)
    width = min(mask.right, window.right) - max(mask.left, window.left)
    return max(0, height) * max(0, width)


def _hidden(image: torch.Tensor, mask: Window) -> torch.Tensor:
    image = image.clone()
    image[:, mask.top : mask.bottom, mask.left : mask.right] = 0.5
    return image


def _outline(axes, window: Window, colour: str, words: str) -> None:  # type: ignore[no-untyped-def]
    style = "--" if words == "touched" else "-"
    box = Rectangle(
        (window.left, window.top),
        window.width,
        window.height,
        fill=False,
        edgecolor=colour,
        linewidth=1.6,
        linestyle=style,
    )
    axes.add_patch(box)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/uncovered.png"))
    given = parser.parse_args()
    masks = MaskSet.build(Threat.square(ENLARGED, grid="input"), image=(INPUT, INPUT), masks=6)
    corners = missed(masks)
    sides = sorted({footprint(at, at).height for at in range(SOURCE - PATCH + 1)})
    print(f"{len(corners)} of {(SOURCE - PATCH + 1) ** 2} patches are missed; they touch {sides} px a side")
    middle = corners[int(np.argmin([abs(top - 14) + abs(left - 14) for top, left in corners]))]
    print(f"drawn: the patch at row {middle[0]}, column {middle[1]}, footprint {footprint(*middle)}")
    draw(given.out, middle, masks)


if __name__ == "__main__":
    main()
