"""What a run of images with several labels says, without the model: curves, classes, weak places, other patches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.multilabel import Bools, thresholds_of, weak_places
from patchcleanser.core.threats import Threat
from patchcleanser.records.derive import require_same_grid
from patchcleanser.records.metrics import Proportion, object_values, precision_and_recall
from patchcleanser.records.run import Row, Run

LEVELS = (25, 50, 75)
"""Precisions, in percent, at which recall is printed."""


@dataclass(frozen=True)
class ClassCounts:
    """How many images show one class, and how many answers are right."""

    label: int
    images: int
    """That show it."""
    undefended: int
    clean: int
    certified: int
    """Of those, the ones where it is proved to stay in the answer."""
    false: int
    """Images that do not show it and have it in the answer, without a patch."""
    possible: int
    """Images that do not show it, where it is not proved that it stays out."""


def answered_rows(rows: pa.Table) -> pa.Table:
    """The rows that have an answer."""
    return rows.filter(compute.is_null(rows["skipped"]))


def own_thresholds(run: Run) -> NDArray[np.float32]:
    """The run's thresholds on scores, one for each class or one for all."""
    options = run.job["options"]
    return thresholds_of(options["threshold"], logits=options["scores"] == "logits")


def recall_at(rows: pa.Table, bound: str, percent: float) -> Proportion | None:
    """The largest recall at a threshold of the curve whose precision is at least this; None if there is none."""
    pairs = list(zip(*precision_and_recall(rows, bound), strict=True))[1:]
    recalls = [recall for precision, recall in pairs if precision.total and precision.percent >= percent]
    return max(recalls, key=lambda recall: recall.count, default=None)


def per_label(run: Run, rows: pa.Table) -> list[ClassCounts]:
    """The counts of each class, at the run's own thresholds; `rows` have answers."""
    names = ("undefended", "clean", "lowest", "highest")
    scores = {name: object_values(rows, f"{name}_scores").reshape(len(rows), -1) for name in names}
    present = {name: values >= own_thresholds(run) for name, values in scores.items()}
    truth = truths(rows, present["clean"].shape[1])
    columns = [truth, *(present[name] & truth for name in names[:3])]
    columns += [present["clean"] & ~truth, present["highest"] & ~truth]
    counts = np.stack([column.sum(axis=0) for column in columns], axis=1)
    return [ClassCounts(label, *row) for label, row in enumerate(counts.tolist())]


def truths(rows: pa.Table, classes: int) -> Bools:
    """[images, classes]: the true classes."""
    lengths = compute.list_value_length(rows["classes"]).to_numpy()
    truth = np.zeros((len(rows), classes), dtype=bool)
    truth[np.repeat(np.arange(len(rows)), lengths), object_values(rows, "classes").astype(np.intp)] = True
    return truth


def right_rows(row: Row, masks: MaskSet) -> Bools:
    """[masks, classes]: where a mask's row of two-mask decisions is right throughout."""
    right = np.ones((len(masks), len(row["clean_scores"])), dtype=bool)
    right.flat[row["unproved"]] = False
    return right


def weak_counts(row: Row, masks: MaskSet, threat: Threat) -> dict[Size, NDArray[np.int64]]:
    """Per patch shape and corner the number of classes that are not proved right there."""
    return weak_places(masks, threat, right_rows(row, masks))


def derived_shares(run: Run, rows: pa.Table, threat: Threat) -> tuple[Proportion, Proportion]:
    """Certified precision and recall against another patch that the run's masks cover, at the run's thresholds."""
    require_same_grid(run, threat)
    mask_set = lru_cache(maxsize=256)(run.mask_set)
    true = false = positives = 0
    for row in rows.select(["height", "width", "classes", "clean_scores", "unproved"]).to_pylist():
        masks = mask_set((row["height"], row["width"]))
        masks.require_cover(threat)
        hides, right = masks.cover(threat).hides, right_rows(row, masks)
        placed = np.stack([right[by].any(axis=0) for by in hides])
        truth = np.zeros(right.shape[1], dtype=bool)
        truth[row["classes"]] = True
        true += int((placed & truth).sum(axis=1).min())
        false += int((~placed & ~truth).sum(axis=1).max())
        positives += len(row["classes"])
    return Proportion(true, true + false), Proportion(true, positives)
