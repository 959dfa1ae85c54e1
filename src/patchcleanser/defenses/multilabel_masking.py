"""Multi-label masking: double-masking for each class, where several classes may be right at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.classifier import CallableClassifier, Classifier
from patchcleanser.classifiers.preprocessing import AnyImages
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet, PerAxis
from patchcleanser.core.multilabel import (
    Bools,
    Counts,
    MultiLabelCertificate,
    MultiLabelVerdict,
    ScoreBounds,
    Scores,
    ScoreTable,
    certify_classes,
    disagreeing,
    double_masking_of_classes,
    thresholds_of,
)
from patchcleanser.core.threats import AnyThreat, Grid
from patchcleanser.defenses.defense import number_of
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Precision
from patchcleanser.engine.exact import NOT_FINITE, ExactEngine, nonfinite, sanitize
from patchcleanser.engine.masking import PairBatch
from patchcleanser.errors import InputError, LabelError, OutputError

ScoreKind = Literal["logits", "probabilities"]
Columns = NDArray[np.intp] | None
"""The numbers of the classes that count; None is all."""


class ScoreEngine(ExactEngine):
    """Writes the scores of all classes into tables.

    They come from the batches of ExactEngine, so a score is a function of the weights, the image and the union. NaN
    counts as -inf: the class is absent.
    """

    def __init__(
        self, classifier: Classifier, *, grid: Grid, chunk: int | None, kind: ScoreKind, columns: Columns
    ) -> None:
        super().__init__(classifier, grid=grid, chunk=chunk)
        self.kind, self.columns = kind, columns

    def write(self, pairs: PairBatch, logits: Tensor, *, strict: bool, confirmed: bool = True) -> None:
        finite = ~nonfinite(logits)
        if strict and not finite.all():
            raise OutputError(NOT_FINITE)
        if strict and self.kind == "probabilities" and not ((logits >= 0) & (logits <= 1)).all():
            raise OutputError("probabilities lie from 0 to 1, and the classifier returned others; use scores='logits'")
        scores = self._counted(sanitize(logits).cpu().numpy())
        answered = finite.cpu().numpy()
        for i in np.unique(pairs.which):
            table, rows = _score_table(pairs.images[i].table), pairs.which == i
            if len(table.thresholds) not in (1, scores.shape[1]):
                text = f"there are {scores.shape[1]} classes and there are {len(table.thresholds)} thresholds"
                raise InputError(f"{text}; give one for each class, or one for all")
            table.write(pairs.unions[rows], scores[rows])
            table.answered |= bool(answered[rows].any())

    def _counted(self, scores: Scores) -> Scores:
        """The columns of the classes that count."""
        if self.columns is None:
            return scores
        if self.columns.max() >= scores.shape[1]:
            raise InputError(f"the classifier has {scores.shape[1]} classes, got class {self.columns.max()}")
        return scores[:, self.columns]


def _score_table(table: LabelTable) -> ScoreTable:
    """The same table, which for this defense holds scores."""
    if not isinstance(table, ScoreTable):
        raise TypeError(f"multi-label masking fills tables of scores, got {type(table).__name__}")
    return table


@dataclass(frozen=True, eq=False)
class MultiLabelExamination:
    """Everything about one clean image with its true classes."""

    verdict: MultiLabelVerdict
    certificate: MultiLabelCertificate
    size: Size
    """Of the image on the threat's grid."""
    truth: Bools
    """[classes]."""
    hides: Bools
    """[placements, masks]: which masks hide each of the placements that stand for all."""
    table: ScoreTable

    @property
    def undefended(self) -> Scores:
        """[classes]: the scores without masks."""
        scores: Scores = self.table.scores[UNMASKED]
        return scores

    @cached_property
    def bounds(self) -> ScoreBounds:
        """The defended scores, and what bounds them."""
        return ScoreBounds.of(self.table.scores[:UNMASKED], self.table.mask_set.unions.index)

    def counts(self, thresholds: Scores) -> dict[str, Counts]:
        """True and false positives at thresholds [n, classes or 1]: of clean images, and at worst under attack.

        `certified` is the worst placement, `one_mask` the bound that fixes one mask, and `each_class` the one that
        takes each class at its own worst placement.
        """
        placed = self.bounds.placed(self.hides)
        return {
            "undefended": Counts.of(self.undefended, self.truth, thresholds),
            "clean": Counts.of(self.bounds.defended, self.truth, thresholds),
            "certified": placed.counts(self.truth, thresholds),
            "one_mask": self.bounds.each_mask().counts(self.truth, thresholds),
            "each_class": placed.each_class().counts(self.truth, thresholds),
        }


class MultiLabelMasking(MaskDefense[MultiLabelVerdict, MultiLabelCertificate]):
    """Double-masking for every class of a classifier whose classes may hold together.

    A class is present if its score is at least its threshold: a probability above 0 and below 1, one for all classes or
    one for each; by default that of the classifier's card, or 0.5. With scores="logits" the probability of a score z is
    1 / (1 + exp(-z)). By default scores are logits, unless the network ends in a sigmoid that can be seen.

    `classes` are the numbers of those that count, by default all. Verdicts and certificates then name a class by its
    place in that list.

    All classes share one table of masked outputs, so certifying takes as many passes as for one label (666 for 36
    masks). Certificate: at a placement of the patch, a class keeps its right answer if some mask that hides the
    placement has a whole row of right decisions. The worst placement bounds how many true classes stay, and how many
    absent ones come. The proofs are those of core.multilabel (ScoreBounds.placed, PlacedBounds.counts).

    >>> import torch
    >>> from patchcleanser import CallableClassifier, Threat
    >>> halves = lambda x: torch.stack([x[..., :8].mean((1, 2, 3)), x[..., 8:].mean((1, 2, 3))], 1) - 0.3
    >>> model = CallableClassifier(halves, array="torch")
    >>> defense = MultiLabelMasking(model, Threat.square(2), masks=4)
    >>> (certificate,) = defense.certify(torch.ones(1, 3, 16, 16), [[0, 1]])
    >>> certificate.certified, certificate.true_positives, certificate.false_positives
    ((0, 1), 2, 0)
    """

    multi_label = True

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        *,
        threshold: float | Sequence[float] | None = None,
        scores: ScoreKind | None = None,
        classes: Sequence[int] | None = None,
        masks: PerAxis = None,
        stride: PerAxis = None,
        mask_set: MaskSet | None = None,
        chunk: int | None = None,
        precision: Precision = "exact",
    ) -> None:
        classifier = as_classifier(classifier)
        if threshold is None:
            threshold = 0.5 if classifier.threshold is None else float(1 / (1 + np.exp(-classifier.threshold)))
        values = np.atleast_1d(np.asarray(threshold, dtype=np.float64))
        if values.ndim != 1 or not len(values) or not ((values > 0) & (values < 1)).all():
            raise InputError(f"thresholds are probabilities above 0 and below 1, got {threshold!r}")
        if scores not in (None, "logits", "probabilities"):
            raise InputError(f"scores is 'logits' or 'probabilities', got {scores!r}")
        self.threshold, self._scores = values, scores
        self.outputs: Columns = None if classes is None else np.asarray(classes, dtype=np.intp)
        if self.outputs is not None and (
            len(set(self.outputs.tolist())) != len(self.outputs) or self.outputs.min() < 0
        ):
            raise InputError(f"classes are distinct numbers from 0, got {list(self.outputs)}")
        super().__init__(
            classifier, threat, masks=masks, stride=stride, mask_set=mask_set, chunk=chunk, precision=precision
        )

    @property
    def scores(self) -> ScoreKind:
        """What the scores are."""
        return self._scores or ("probabilities" if self.classifier.probabilities else "logits")

    def _label_engine(self, chunk: int | None, precision: Precision) -> ScoreEngine:
        if precision != "exact":
            raise InputError(f"multi-label certificates rest on exact scores; use precision='exact', got {precision!r}")
        if self.classifier.probabilities and self.scores == "logits":
            raise InputError("the classifier ends in a sigmoid; use scores='probabilities', got scores='logits'")
        if isinstance(self.classifier, CallableClassifier) and self.classifier.outputs == "probabilities":
            raise InputError(
                "outputs='probabilities' takes logarithms; leave it out of the CallableClassifier, "
                "and give the defense scores='probabilities'"
            )
        if len(self.threshold) > 1 and self.classes not in (0, len(self.threshold)):
            text = f"thresholds are one for all classes or one for each of {self.classes}"
            raise InputError(f"{text}, got {len(self.threshold)}")
        self.score_thresholds = self.on_scores(self.threshold)
        return ScoreEngine(self.classifier, grid=self.threat.grid, chunk=chunk, kind=self.scores, columns=self.outputs)

    @property
    def classes(self) -> int:
        """The number of classes that count; 0 while the classifier does not know its classes."""
        return (self.classifier.classes or 0) if self.outputs is None else len(self.outputs)

    def on_scores(self, thresholds: NDArray[np.float64]) -> Scores:
        """Probabilities as thresholds of this classifier's scores."""
        return thresholds_of(thresholds, logits=self.scores == "logits")

    def empty_table(self, size: Size) -> ScoreTable:
        return ScoreTable(self.mask_set(size), self.score_thresholds)

    def columns(self, verdict: MultiLabelVerdict) -> Sequence[int]:
        return verdict.present if self.outputs is None else self.outputs[list(verdict.present)].tolist()

    def _checked_truths(self, images: AnyImages, truths: Any) -> list[Any]:
        """True classes as arrays: rows of a bool array [N, classes], or lists of class numbers."""
        rows = truths.numpy() if isinstance(truths, Tensor) else truths
        checked = [_true_classes(row) for row in rows]
        number = number_of(images)
        if number is not None and number != len(checked):
            raise LabelError(f"true classes of {counted(len(checked), 'image')} for {counted(number, 'image')}")
        return checked

    def _check_truths(self, truths: list[Any]) -> None:
        for truth in truths:
            self.truth_of(truth)

    def truth_of(self, truth: NDArray[Any]) -> Bools:
        """[classes]: the true classes; LabelError if the classifier has others."""
        classes = self.classes
        if truth.dtype == bool:
            if len(truth) != classes:
                raise LabelError(f"there are {classes} classes, and the true ones are given for {len(truth)}")
            return truth
        if len(truth) and not (truth.min() >= 0 and truth.max() < classes):
            raise LabelError(f"class numbers go from 0 to {classes - 1}, got {truth.tolist()}")
        present = np.zeros(classes, dtype=bool)
        present[truth] = True
        return present

    def certify(
        self, images: AnyImages, labels: Iterable[Any], *, maps: bool = False, progress: bool | None = None
    ) -> list[MultiLabelCertificate]:
        """A certificate for each clean image with its true classes: class numbers, or a bool for each class.

        `maps` counts for each place of a patch the classes that are not proved right there.
        """
        return super().certify(images, labels, maps=maps, progress=progress)

    def examine(  # type: ignore[override]
        self, images: AnyImages, labels: Iterable[Any], *, maps: bool = False, progress: bool | None = False
    ) -> list[MultiLabelExamination]:
        """Verdict, certificate and all scores of clean images; nothing is computed twice."""

        def flow(table: LabelTable, label: Any) -> LabelFlow[MultiLabelExamination]:
            yield table, np.append(np.arange(len(table.mask_set.unions)), UNMASKED)
            verdict = yield from self.verdict_flow(table)
            certificate = yield from self.certificate_flow(table, label, maps=maps)
            hides = table.mask_set.cover(self.threat).hides
            size, truth = table.mask_set.image, self.truth_of(label)
            return MultiLabelExamination(verdict, certificate, size, truth, hides, _score_table(table))

        return self._run_labelled(images, labels, flow, progress)

    def verdict_flow(self, table: LabelTable) -> LabelFlow[MultiLabelVerdict]:
        """All one-mask scores, then the rows of masks that disagree for some class."""
        yield table, table.masks()
        scores, masks = _score_table(table), len(table.mask_set)
        yield table, table.rows(np.flatnonzero(disagreeing(scores.decisions[:masks]).any(axis=1)).tolist())
        answers = double_masking_of_classes(scores.decisions, table.mask_set.unions.index)
        return MultiLabelVerdict(tuple(np.flatnonzero(answers.present).tolist()), answers.cases, table.spent)

    def certificate_flow(
        self, table: LabelTable, label: Any, *, maps: bool = False
    ) -> LabelFlow[MultiLabelCertificate]:
        yield table, np.arange(len(table.mask_set.unions))
        return certify_classes(_score_table(table), self.threat, self.truth_of(label), maps=maps)


def _true_classes(row: Any) -> NDArray[Any]:
    """A bool for each class, or class numbers."""
    values = np.asarray(row.cpu() if isinstance(row, Tensor) else row)
    if values.ndim == 1 and values.dtype == bool:
        return values
    if values.ndim != 1 or (len(values) and not np.issubdtype(values.dtype, np.integer)):
        raise LabelError(f"the true classes of an image are a list of class numbers or of bools, got {row!r:.80}")
    return values.astype(np.int64)
