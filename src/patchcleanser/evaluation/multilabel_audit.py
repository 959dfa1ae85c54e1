"""Audit of images with several labels: rows are derived again one masked image at a time, and classes attacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.attacks.flip_classes import attack_classes
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.geometry import Size
from patchcleanser.data.multilabel_sets import MultiLabelDataset
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.evaluation.audit import Audit, AuditWorkload, picks_of, require_auditable, require_finished
from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
from patchcleanser.evaluation.reference import (
    NEAR,
    Bools,
    hidden_pixels,
    hiding_sets,
    reference_logits,
    slow_double_masking,
)
from patchcleanser.evaluation.row_checks import Difference, contradiction
from patchcleanser.records.run import Row, Run

Floats = NDArray[np.float64]
CountsAt = Callable[[Floats], tuple[int, int]]
"""True and false positives at thresholds [classes]."""


def audited_labels(run: Run, classifier: Classifier, dataset: MultiLabelDataset) -> MultiLabelJob:
    """The job of a finished run, with its model and images. RecordError if they are not those of the run."""
    shared = dataset.shared_with(classifier.names)[0] if classifier.names else dataset
    require_finished(run)
    picks, options = picks_of(run, shared), run.job["options"]
    images = shared if picks == list(range(len(shared))) else shared.pick(picks)
    masks, stride = (tuple(pair) if pair else None for pair in (run.job["masks"], run.job["stride"]))
    job = MultiLabelJob(classifier, images, run.threat, masks, stride, outputs=run.job["outputs"], **options)
    require_auditable(run, classifier, job.identity)
    return job


@dataclass(frozen=True)
class MultiLabelAudit(AuditWorkload):
    """Rows of a run of several labels to check."""

    job: MultiLabelJob  # type: ignore[assignment]

    @cached_property
    def checker(self) -> LabelRowChecker:  # type: ignore[override]
        return LabelRowChecker(self.run, self.job)

    def attack(self, rows: list[Row], images: list[Tensor], result: Audit) -> None:
        """Attack classes of each image. One that is certified must stay, and counts must keep their bounds."""
        truths = [self.job.dataset.targets[row["index"]] for row in rows]
        result.attacked += [row["index"] for row in rows]
        for attacked in attack_classes(self.job.built, images, truths, self.settings):
            if attacked.broken:
                reached = (attacked.true_positives, attacked.false_positives)
                text = f"class {attacked.label} or the counts of a certified image were beaten"
                result.contradictions.append(
                    {**contradiction(rows[attacked.image], text, attacked.promised, reached), "patches": []}
                )


class LabelRowChecker:
    """Compares rows with the reference: scores one by one, Algorithm 1 as printed, placements pixel by pixel."""

    def __init__(self, run: Run, job: MultiLabelJob) -> None:
        self.run, self.job = run, job
        self.sizes: dict[Size, tuple[list[Bools], list[frozenset[int]]]] = {}

    def masks(self, size: Size) -> tuple[list[Bools], list[frozenset[int]]]:
        """Hidden pixels of each mask, and for every placement the masks that hide it; built once for each size."""
        if size not in self.sizes:
            hidden = [hidden_pixels(mask, size) for mask in self.run.mask_set(size).masks]
            self.sizes[size] = hidden, hiding_sets(hidden, self.run.threat, size)
        return self.sizes[size]

    def check(self, row: Row, image: Tensor, result: Audit) -> None:
        """Derive one row again, and add every difference to the result."""
        hidden, hiding = self.masks((row["height"], row["width"]))
        if self.run.threat.grid == "input":
            with torch.inference_mode(), strict_float32(self.job.device):
                image = self.job.classifier.prepare(image[None].to(self.job.device))[0].cpu()
        pairs = self._pairs(image, hidden)
        undefended = self._scores(image, None)
        differences = self._differences(row, undefended, pairs, hiding)
        result.add_row(row, differences, 1 + len(hidden) * (len(hidden) + 1) // 2)

    def _pairs(self, image: Tensor, hidden: list[Bools]) -> Floats:
        """[masks, masks, classes]: the scores under two masks."""
        classes = len(self.job.dataset.classes)
        pairs = np.zeros((len(hidden), len(hidden), classes))
        for i, j in combinations_with_replacement(range(len(hidden)), 2):
            pairs[i, j] = pairs[j, i] = self._scores(image, hidden[i] | hidden[j])
        return pairs

    def _scores(self, image: Tensor, hidden: Bools | None) -> Floats:
        prepared = self.run.threat.grid == "input"
        logits = reference_logits(self.job.classifier, image, hidden, prepared=prepared)[0]
        scores: Floats = logits.nan_to_num(nan=-torch.inf).numpy()
        return scores if self.job.outputs is None else scores[list(self.job.outputs)]

    def _differences(
        self, row: Row, undefended: Floats, pairs: Floats, hiding: list[frozenset[int]]
    ) -> Iterator[Difference]:
        truth = self.job.dataset.targets[row["index"]]
        low, high = pairs.min(axis=1), pairs.max(axis=1)
        placed_low = np.stack([max_of(low, masks) for masks in hiding])
        placed_high = np.stack([-max_of(-high, masks) for masks in hiding])
        if row["classes"] != np.flatnonzero(truth).tolist():
            yield "classes", row["classes"], np.flatnonzero(truth).tolist(), False
        expected = {"undefended": undefended, "lowest": placed_low.min(axis=0), "highest": placed_high.max(axis=0)}
        for name, scores in expected.items():
            stored = np.array(row[f"{name}_scores"])
            wrong = ~(np.isclose(stored, scores, rtol=NEAR, atol=NEAR) | (stored == scores))
            for place in np.flatnonzero(wrong):
                yield f"{name} score of class {place}", stored[place], float(scores[place]), False

        def clean(thresholds: Floats) -> tuple[int, int]:
            present = np.array([slow_presence(pairs[..., c] >= t) for c, t in enumerate(thresholds)])
            return int((present & truth).sum()), int((present & ~truth).sum())

        counts: dict[str, CountsAt] = {
            "undefended": lambda t: worst_counts(undefended[None], undefended[None], truth, t),
            "clean": clean,
            "certified": lambda t: worst_counts(placed_low, placed_high, truth, t),
            "one_mask": lambda t: worst_counts(low, high, truth, t),
            "each_class": lambda t: worst_counts(placed_low.min(axis=0)[None], placed_high.max(axis=0)[None], truth, t),
        }
        for name, at in counts.items():
            yield from self._count_differences(row, name, at)

    def _count_differences(self, row: Row, name: str, at: CountsAt) -> Iterator[Difference]:
        """Counts fall as thresholds rise. So a count that rounding explains lies between those of near thresholds."""
        for number, thresholds in enumerate(self.job.thresholds.astype(np.float64)):
            stored = row[f"{name}_true"][number], row[f"{name}_false"][number]
            expected = at(thresholds)
            if stored != expected:
                slack = NEAR * np.maximum(1.0, np.abs(thresholds))
                most, least = at(thresholds - slack), at(thresholds + slack)
                near = all(a <= b <= c for a, b, c in zip(least, stored, most, strict=True))
                yield f"{name} counts at threshold {number}", list(stored), list(expected), near


def max_of(rows: Floats, masks: frozenset[int]) -> Floats:
    """The largest of these masks' rows; nothing is promised without any."""
    largest: Floats = np.max([rows[mask] for mask in masks], axis=0) if masks else np.full(rows.shape[1], -np.inf)
    return largest


def slow_presence(decisions: Bools) -> bool:
    """Algorithm 1 for one class, from its decisions [masks, masks]."""
    labels = [int(decisions[i, i]) for i in range(len(decisions))]
    return bool(slow_double_masking(labels, lambda i, j: int(decisions[i, j]), {}))


def worst_counts(low: Floats, high: Floats, truth: Bools, thresholds: Floats) -> tuple[int, int]:
    """The fewest true and the most false positives over placements, from bounds [placements, classes]."""
    true = min(int((truth & (bound >= thresholds)).sum()) for bound in low)
    return true, max(int((~truth & (bound >= thresholds)).sum()) for bound in high)
