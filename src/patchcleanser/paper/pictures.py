"""Pictures of small objects, and of the patch that hides them."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

from patchcleanser.core.geometry import Window
from patchcleanser.core.threats import Threat
from patchcleanser.data import Dataset
from patchcleanser.data.boxes import Boxed, boxed_images
from patchcleanser.data.pictures import as_bytes
from patchcleanser.errors import DataError
from patchcleanser.paper.images import DATA
from patchcleanser.reports.drawing import Drawing, style

SHOWN = 6
SOURCES = ("imagenet", "tiny-imagenet")
"""The datasets that have boxes; the first that is here is shown."""
THREAT = Threat.share(0.02)


def small_objects(root: Path | None) -> Drawing:
    """Images whose only object just fits under a 2% patch, bare and with the patch over it."""
    problems = []
    for name in SOURCES:
        try:
            dataset = DATA[name].load(root)
            boxes = boxed_images(name, [dataset.id(n) for n in range(len(dataset))], DATA[name].folder(root))
        except DataError as error:
            problems.append(str(error))
            continue
        hidden = {index: found.windows[0] for index, found in boxes.items() if _fits(found)}
        # The largest of them: the smallest boxes are often slips of who drew them.
        best = sorted(hidden, key=lambda index: (-hidden[index].area, index))[:SHOWN]
        return _drawn(dataset, {index: hidden[index] for index in best})
    raise DataError(" And: ".join(problems))


def _fits(found: Boxed) -> bool:
    """Whether a picture's only object is no larger than the patch."""
    side = THREAT.shapes(found.size)[0][0]
    return len(found.windows) == 1 and max(found.windows[0].height, found.windows[0].width) <= side


def _drawn(dataset: Dataset, shown: dict[int, Window]) -> Drawing:
    with style():
        figure = Figure(figsize=(1.2 * len(shown), 2.9), layout="constrained")
        above, below = figure.subplots(2, len(shown), squeeze=False)
        for bare, hidden, (index, window) in zip(above, below, shown.items(), strict=True):
            image = dataset.image(index)
            labels = dataset.labels
            bare.set_title("" if labels is None else dataset.classes[int(labels[index])], fontsize=7)
            for axes, pixels in ((bare, image), (hidden, _occluded(image, window))):
                axes.imshow(as_bytes(pixels))
                axes.set_axis_off()
        words = "Above as they are, below with a grey patch of 2% of the pixels over the object."
        caption = f"Images of {dataset.name} whose object is no larger than the patch. {words}"
        return Drawing("figure21", "Small objects under a patch", caption, caption, figure)


def _occluded(image: torch.Tensor, window: Window) -> torch.Tensor:
    """A grey patch of the usual size, centred on the object and moved inside the picture."""
    height, width = image.shape[1:]
    side = THREAT.shapes((height, width))[0][0]
    top = min(max(0, window.top + (window.height - side) // 2), height - side)
    left = min(max(0, window.left + (window.width - side) // 2), width - side)
    hidden = image.clone()
    hidden[:, top : top + side, left : left + side] = 0.5
    return hidden
