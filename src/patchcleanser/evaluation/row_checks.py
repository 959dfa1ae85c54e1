"""RowChecker: compares the rows of one label each with the reference implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchcleanser.core.geometry import Size
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import RecordError
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.reference import (
    REFERENCES,
    Bools,
    ReferenceClassifier,
    ReferenceLabel,
    hidden_pixels,
    hiding_sets,
)
from patchcleanser.records.run import Row, Run

if TYPE_CHECKING:
    from patchcleanser.evaluation.audit import Audit

Difference = tuple[str, Any, Any, bool]
"""What differs, the stored value, the reference's value, and whether rounding explains it."""


def contradiction(row: Row, what: str, stored: Any, expected: Any) -> dict[str, Any]:
    """A row, and what differs in it."""
    image = {"index": row["index"], "id": row["id"], "label": row.get("label", row.get("classes"))}
    return {**image, "what": what, "stored": stored, "found": expected}


def reference_of(run: Run) -> str:
    """Name of the reference algorithm of the run's defense."""
    name = run.job["defense"]
    reference = DEFENSES[name].reference if name in DEFENSES else None
    if reference is None:
        auditable = ", ".join(name for name, entry in DEFENSES.items() if entry.reference)
        raise RecordError(f"{run.folder} was made by {name}, which cannot be audited; {auditable} can")
    return reference


class RowChecker:
    """Compares rows with the reference, image by image."""

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.job = run, job
        self.algorithm = reference_of(run)
        self.sizes: dict[Size, list[tuple[list[Bools], list[frozenset[int]]]]] = {}

    def masks(self, size: Size) -> list[tuple[list[Bools], list[frozenset[int]]]]:
        """Hidden pixels of each mask, and for every placement the masks that hide it; built once for each size.

        Those of the run's masks, then those of its coarse masks, if it has any.
        """
        if size not in self.sizes:
            self.sizes[size] = []
            for masks in filter(None, (self.run.mask_set(size), self.run.coarse_mask_set(size))):
                hidden = [hidden_pixels(mask, size) for mask in masks.masks]
                self.sizes[size].append((hidden, hiding_sets(hidden, self.run.threat, size)))
        return self.sizes[size]

    def check(self, row: Row, image: Tensor, result: Audit) -> None:
        """Derive one row again, and add every difference to the result."""
        sets, grid = self.masks((row["height"], row["width"])), self.run.threat.grid
        reference, *coarse = (ReferenceClassifier(self.job.classifier, image, hidden, grid=grid) for hidden, _ in sets)
        hiding = [needed for _, needed in sets]
        detects = self.algorithm == "minority_reports"
        outcome = self._detection(row, reference) if detects else self._recovery(row, [reference, *coarse], hiding)
        differences = [*self._labels(row, reference), *outcome]
        for number, label in enumerate(coarse[0].one_mask() if coarse else ()):
            differences += _compare(f"coarse label {number}", row["coarse_labels"][number], label)
        if row["certified"] and any(frozenset() in needed for needed in hiding):
            uncovered = "the masks do not cover the threat"
            differences.append((uncovered, row["certified"], "a patch that none hides", False))
        result.add_row(row, differences, sum(1 + len(labels.by_pixels) for labels in (reference, *coarse)))
        ties = sum(labels.near_ties for labels in (reference, *coarse))
        if ties and not any(near for *_, near in differences):
            result.near_ties.append(contradiction(row, "labels that rounding may change", ties, "no difference"))

    def _labels(self, row: Row, reference: ReferenceClassifier) -> Iterator[Difference]:
        truth, size = int(self.job.labels[row["index"]]), [row["height"], row["width"]]
        if row["label"] != truth:
            yield "label", row["label"], truth, False
        if size != list(reference.image.shape[1:]):
            yield "size", size, list(reference.image.shape[1:]), False
        yield from _compare("undefended", row["undefended"], reference.unmasked)
        for i, label in enumerate(reference.one_mask()):
            yield from _compare(f"one-mask label {i}", row["one_mask_labels"][i], label)
        if row["table"] is not None:
            index = self.run.mask_set((row["height"], row["width"])).unions.index
            for i in range(len(reference.hidden)):
                for j in range(i + 1, len(reference.hidden)):
                    yield from _compare(f"two-mask label {i}, {j}", row["table"][index[i, j]], reference.under(i, j))
        if row["failing_pair"] is not None:
            label = reference.under(*row["failing_pair"])
            if label.label == row["label"]:
                yield "failing pair", row["failing_pair"], label.label, label.near_tie

    def _recovery(
        self, row: Row, references: list[ReferenceClassifier], hiding: list[list[frozenset[int]]]
    ) -> Iterator[Difference]:
        """Compare answer and certificates with the references', and with what rounding might make of them."""
        reference, *coarse = references
        labels = [label.label for label in reference.one_mask()]
        coarse_labels = {label.label for labels in coarse for label in labels.one_mask()}
        if len(coarse_labels) == 1:
            (answer,) = coarse_labels
        else:
            options = self.run.job["options"]
            answer = REFERENCES[self.algorithm](labels, lambda i, j: reference.under(i, j).label, options)
        if row["answer"] != answer:
            yield "answer", row["answer"], answer, any(labels.near_ties for labels in references)
        truth = row["label"]

        def good_masks(correct: Callable[[ReferenceLabel], bool]) -> list[set[int]]:
            """Masks with only correct labels in their rows, and coarse masks of correct labels."""
            alone = [{i for i, label in enumerate(labels.one_mask()) if correct(label)} for labels in coarse]
            return [reference.masks_where(correct), *alone]

        correct = good_masks(lambda label: label.label == truth)
        fewest = good_masks(lambda label: label.label == truth and not label.near_tie)
        most = good_masks(lambda label: label.may_be(truth))
        certificates: dict[str, Callable[[list[set[int]]], bool]] = {
            "certified": lambda good: [len(masks) for masks in good] == [len(labels.hidden) for labels in references],
            "row_certified": lambda good: all(
                masks & needed for masks, sets in zip(good, hiding, strict=True) for needed in sets
            ),
        }
        for name, holds in certificates.items():
            if row[name] != holds(correct):
                yield name, row[name], holds(correct), row[name] in (holds(fewest), holds(most))

    def _detection(self, row: Row, reference: ReferenceClassifier) -> Iterator[Difference]:
        threshold, labels = self.run.job["options"].get("threshold", 0.5), reference.one_mask()
        undefended = reference.unmasked.label
        near = reference.near_ties > 0 or any(abs(label.confidence - threshold) < 1e-3 for label in labels)
        alert = any(label.label != undefended and label.confidence > threshold for label in labels)
        confident = all(label.label == row["label"] and label.confidence > threshold for label in labels)
        for name, value in (
            ("answer", undefended),
            ("alert", alert),
            ("detection_certified", confident and undefended == row["label"]),
        ):
            if row[name] != value:
                yield name, row[name], value, near


def _compare(what: str, stored: int, label: ReferenceLabel) -> Iterator[Difference]:
    if stored != label.label:
        yield what, stored, f"{label.label} by a margin of {label.margin:.3g}", label.may_be(stored)
