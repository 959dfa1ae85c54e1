"""A few pictures kept beside the rows, so that a report needs neither the data nor the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from patchcleanser.data.codec import as_picture
from patchcleanser.evaluation.jobs import Job
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.run import Row, Run

EACH = 8
"""Pictures of each kind."""
LONGEST = 512
"""Larger pictures are shrunk to this side, in pixels."""


def _unproved(row: Row) -> bool:
    """Whether the certificate was tried and not given; without masks there is no row certificate."""
    return (row["certified"] if row["row_certified"] is None else row["row_certified"]) is False


KINDS: dict[str, Callable[[Row], bool]] = {
    "certified": lambda row: bool(row["certified"] or row["detection_certified"]),
    "vulnerable": lambda row: row["answer"] == row["label"] and _unproved(row),
    "wrong": lambda row: row["answer"] != row["label"],
    "disagreer": lambda row: row["case"] == "disagreer",
    "majority": lambda row: row["case"] == "majority",
    "alert": lambda row: bool(row["alert"]),
}
"""The kinds of images a report shows; an image may be of several."""


def gallery_path(run: Run, index: int, end: str = "") -> Path:
    """Where the picture of an image is kept, if it is; `end` tells pictures of one image apart."""
    return run.folder / "gallery" / f"{index}{end}.png"


def keep_gallery(run: Run, job: Job) -> None:
    """Keep the pictures of a few images of each kind: the same ones whenever it is done."""
    columns = ["index", "skipped", "label", "answer", "case", "alert", "certified", "row_certified"]
    rows = run.read([*columns, "detection_certified"]).to_pylist()
    rows = [row for row in rows if row["skipped"] is None]
    for index in sorted({i for wanted in KINDS.values() for i in _some([r["index"] for r in rows if wanted(r)])}):
        path = gallery_path(run, index)
        if not path.is_file():
            require_inside(path.parent, run.folder)
            with whole_file(path) as part:
                _picture(job, index).save(part, format="PNG")


def _some(indices: list[int]) -> list[int]:
    """A few, spread over the whole list."""
    if len(indices) <= EACH:
        return indices
    return [indices[i] for i in np.linspace(0, len(indices) - 1, EACH).round().astype(int)]


def _picture(job: Job, index: int) -> Image.Image:
    """The image as the threat sees it: as it came, or as the classifier's input."""
    image = job.dataset.image(index)
    if job.threat.grid == "input":
        image = job.classifier.preprocessing.geometry(image[None])[0]
    picture = as_picture(image)
    picture.thumbnail((LONGEST, LONGEST))
    return picture
