"""Pictures saved beside the rows, so that a report needs neither the data nor the model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from patchcleanser.data.codec import as_picture
from patchcleanser.evaluation.detect_jobs import DetectJob
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.metrics import OVERLAP
from patchcleanser.records.run import Row, Run

EXAMPLES = 8
"""Pictures of each kind."""
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


def save_examples(run: Run, job: Job) -> None:
    """Save the pictures of a few images of each kind. The same rows always give the same pictures."""
    columns = ["index", "skipped", "label", "answer", "case", "alert", "certified", "row_certified"]
    rows = run.read([*columns, "detection_certified"]).to_pylist()
    rows = [row for row in rows if row["skipped"] is None]
    for index in sorted({i for kind in KINDS.values() for i in _spread([r["index"] for r in rows if kind(r)])}):
        if not picture_path(run, index).is_file():
            image = job.dataset.image(index)
            if job.threat.grid == "input":
                image = job.classifier.preprocessing.geometry(image[None])[0]
            save_picture(run, picture_name(index), as_png(image, MAX_SIDE))


def save_object_examples(run: Run, job: DetectJob) -> None:
    """Save the pictures of a few images with objects that the clean image shows; the same rows, the same pictures."""
    rows = run.read(["index", "undefended", "skipped"]).to_pylist()
    shown = [row["index"] for row in rows if row["skipped"] is None and max(row["undefended"], default=0.0) >= OVERLAP]
    for index in _spread(shown):
        if not picture_path(run, index).is_file():
            save_picture(run, picture_name(index), as_png(job.dataset.image(index), MAX_SIDE))


def save_label_examples(run: Run, job: MultiLabelJob) -> None:
    """Save the pictures of a few images that show several classes; the same rows, the same pictures."""
    rows = run.read(["index", "classes", "skipped"]).to_pylist()
    shown = [row["index"] for row in rows if row["skipped"] is None and len(row["classes"]) > 1]
    for index in _spread(shown):
        if not picture_path(run, index).is_file():
            image = job.dataset.image(index)
            if job.threat.grid == "input":
                image = job.classifier.preprocessing.geometry(image[None])[0]
            save_picture(run, picture_name(index), as_png(image, MAX_SIDE))


def _spread(indices: list[int]) -> list[int]:
    """A few, spread evenly over the list."""
    if len(indices) <= EXAMPLES:
        return indices
    return [indices[i] for i in np.linspace(0, len(indices) - 1, EXAMPLES).round().astype(int)]
