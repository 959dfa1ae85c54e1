"""Pictures saved beside the rows, so that a report needs neither the data nor the model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from patchcleanser.data.codec import as_picture
from patchcleanser.evaluation.dataset_jobs import DatasetJob
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.run import Row, Run

EXAMPLES, SMALL_EXAMPLES = 8, 64
"""Pictures of each kind, and of small images, which a report shows beside their rows."""
SMALL_SIDE = 64
"""Images up to this side are small, in pixels."""
MAX_SIDE = 512
"""Larger pictures of clean images are shrunk to this side, in pixels."""
ATTACKED = "-attacked"
"""Suffix of the picture of an attacked image."""


def _certificate_refused(row: Row) -> bool:
    """Whether the image was examined and not certified. Without masks there is no row certificate."""
    return (row["certified"] if row["row_certified"] is None else row["row_certified"]) is False


KINDS: dict[str, Callable[[Row], bool]] = {
    "certified": lambda row: bool(row["certified"] or row["detection_certified"]),
    "vulnerable": lambda row: row["answer"] == row["label"] and _certificate_refused(row),
    "wrong": lambda row: row["answer"] != row["label"],
    "disagreer": lambda row: row["case"] == "disagreer",
    "majority": lambda row: row["case"] == "majority",
    "alert": lambda row: bool(row["alert"]),
}
"""The kinds of images a report shows. An image may be of several."""
PICTURED = ("label", "answer", "case", "alert", "certified", "row_certified", "detection_certified")
"""The columns that decide the kind of an image."""


def picture_name(index: int, suffix: str = "") -> str:
    """File name of the picture of an image."""
    return f"{index}{suffix}.png"


def picture_path(run: Run, index: int, suffix: str = "") -> Path:
    """Where the picture of an image is, if it was saved."""
    return run.folder / "gallery" / picture_name(index, suffix)


def as_png(pixels: Tensor, max_side: int | None = None) -> bytes:
    """[C, H, W] in [0, 1] as an 8-bit PNG file."""
    picture, content = as_picture(pixels), io.BytesIO()
    if max_side is not None:
        picture.thumbnail((max_side, max_side))
    picture.save(content, format="PNG")
    return content.getvalue()


def save_picture(run: Run, name: str, content: bytes) -> None:
    """Write a PNG file into the run's gallery."""
    path = run.folder / "gallery" / name
    require_inside(path.parent, run.folder)
    with whole_file(path) as part:
        part.write_bytes(content)


def save_examples(run: Run, job: DatasetJob, columns: Sequence[str], kinds: Iterable[Callable[[Row], bool]]) -> None:
    """Save the pictures of a few images of each kind of row. The same rows always give the same pictures."""
    rows = run.read(["index", "skipped", "height", "width", *columns]).to_pylist()
    rows = [row for row in rows if row["skipped"] is None]
    small = all(max(row["height"], row["width"]) <= SMALL_SIDE for row in rows)
    most = SMALL_EXAMPLES if small else EXAMPLES
    for index in sorted({i for kind in kinds for i in _spread([row["index"] for row in rows if kind(row)], most)}):
        if not picture_path(run, index).is_file():
            image = job.dataset.image(index)
            if job.threat.grid == "input":
                image = job.model.preprocessing.geometry(image[None])[0]
            save_picture(run, picture_name(index), as_png(image, MAX_SIDE))


def _spread(indices: list[int], most: int) -> list[int]:
    """At most so many, spread evenly over the list."""
    if len(indices) <= most:
        return indices
    return [indices[i] for i in np.linspace(0, len(indices) - 1, most).round().astype(int)]
