"""Figures 20 to 22: certified accuracy by object size and by class, and pictures of small objects under a patch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from patchcleanser.core.geometry import Window
from patchcleanser.core.threats import Threat
from patchcleanser.data import Dataset
from patchcleanser.data.boxes import ImageBoxes
from patchcleanser.data.catalog import boxed_images
from patchcleanser.data.codec import as_bytes
from patchcleanser.errors import DataError
from patchcleanser.paper.experiments import Axis, Claim, Experiment, PaperRow, larger_beyond
from patchcleanser.paper.measurements import QUANTILES, accuracies, class_quantile, object_size
from patchcleanser.paper.models import PAPER_DATASETS, usual_patch, usual_rows
from patchcleanser.reports.drawing import Drawing, style
from patchcleanser.reports.tables import CERTIFIED, CLEAN

BUCKETS = tuple(f"{low}–{low + 10}%" for low in range(0, 100, 10))
"""Shares of the pixels inside the boxes of an image's objects."""
BY_SIZE = Axis("objects' share of the picture, %", lambda row, _: float(row.variant.split("–")[0]) + 5)
FIGURE20 = Experiment(
    "figure20",
    "Figure 20",
    "Certified accuracy by object size",
    "Images of larger objects are certified more often: a small object can vanish under a mask.",
    tuple(
        PaperRow(spec, bucket)
        for spec in (
            usual_patch("imagenet-resnet50-hardened", data="tiny-imagenet"),
            usual_patch("imagenet-mobilenet-hardened", data="tiny-imagenet"),
            usual_patch("imagenet-resnet50-hardened"),
            usual_patch("authors-vit-imagenet"),
        )
        for bucket in BUCKETS
    ),
    (CLEAN, CERTIFIED),
    accuracies,
    variant="Objects take",
    read_boxed=object_size,
    axis=BY_SIZE,
    claims=(
        Claim(
            "Certified accuracy is larger where objects take more than half of the picture",
            partial(larger_beyond, BY_SIZE, "certified", 50),
        ),
    ),
)

CLASSES_PRINTED = {"least certified class": {"certified": 4.0}, "most certified class": {"certified": 100.0}}
FIGURE22 = Experiment(
    "figure22",
    "Figure 22",
    "Certified accuracy by class",
    "Classes differ widely: some are certified whole, some hardly at all.",
    usual_rows(
        ("tiny", "resnet", "vit", "mlp", "imagenet-resnet50-hardened", "authors-vit-imagenet"),
        QUANTILES,
        CLASSES_PRINTED,
    ),
    (CERTIFIED,),
    class_quantile,
    variant="Class",
)

THREAT = Threat.share(0.02)


def small_objects(root: Path | None) -> Drawing:
    """Images whose only object fits under a 2% patch, without the patch and with it; from the first dataset found."""
    problems = []
    for name in ("imagenet", "tiny-imagenet"):  # those that have boxes
        try:
            dataset = PAPER_DATASETS[name].load(root)
            ids = [dataset.id(n) for n in range(len(dataset))]
            boxes = boxed_images(name, ids, PAPER_DATASETS[name].folder(root))
        except DataError as error:
            problems.append(str(error))
            continue
        hidden = {index: boxed.windows[0] for index, boxed in boxes.items() if _fits(boxed)}
        # The largest of them: the smallest boxes are often annotation errors.
        largest = sorted(hidden, key=lambda index: (-hidden[index].area, index))[:6]
        return _draw(dataset, {index: hidden[index] for index in largest})
    raise DataError(" And: ".join(problems))


def _fits(boxed: ImageBoxes) -> bool:
    """Whether an image's only object is no larger than the patch."""
    side = THREAT.shapes(boxed.size)[0][0]
    return len(boxed.windows) == 1 and max(boxed.windows[0].height, boxed.windows[0].width) <= side


def _draw(dataset: Dataset, objects: dict[int, Window]) -> Drawing:
    with style():
        figure = Figure(figsize=(1.2 * len(objects), 2.9), layout="constrained")
        above, below = figure.subplots(2, len(objects), squeeze=False)
        for top, bottom, (index, window) in zip(above, below, objects.items(), strict=True):
            image = dataset.image(index)
            labels = dataset.labels
            top.set_title("" if labels is None else dataset.classes[int(labels[index])], fontsize=7)
            for axes, pixels in ((top, image), (bottom, _occlude(image, window))):
                axes.imshow(as_bytes(pixels))
                axes.set_axis_off()
        caption = (
            f"Images of {dataset.name} whose object is no larger than the patch. Above as they are, below with a grey "
            "patch of 2% of the pixels over the object."
        )
        return Drawing("figure21", "Small objects under a patch", caption, caption, figure)


def _occlude(image: torch.Tensor, window: Window) -> torch.Tensor:
    """Image [3, H, W] with a grey 2% patch centred on a window, moved inside the image."""
    height, width = image.shape[1:]
    side = THREAT.shapes((height, width))[0][0]
    top = min(max(0, window.top + (window.height - side) // 2), height - side)
    left = min(max(0, window.left + (window.width - side) // 2), width - side)
    occluded = image.clone()
    occluded[:, top : top + side, left : left + side] = 0.5
    return occluded


FIGURE21 = Experiment(
    "figure21",
    "Figure 21",
    "Small objects under a patch",
    "A patch of 2% of the image can hide a small object whole, so no classifier could be certified there.",
    (),
    (),
    accuracies,
    pictures=small_objects,
)
