"""Defenses whose answer is made of many local scores, of which a patch can reach only some."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patchcleanser.classifiers.preprocessing import AnyImages, checked_images
from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.receptive_fields import Footprint, ReceptiveFields
from patchcleanser.core.results import LocalCertificate, LocalVerdict
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.defense import (
    CertificateT,
    Defense,
    Examination,
    VerdictT,
    check_range,
    checked_labels,
    examine_each,
    number_of,
)
from patchcleanser.defenses.local_scores import LocalLogits, LocalScoreSource
from patchcleanser.errors import PatchCleanserError, ThreatError
from patchcleanser.progress import tracked

SUM_ROUNDING = 1e-5
"""A margin up to this proves nothing: float64 sums of an attacked image's scores round differently too."""

GROUP = 64
"""Images of one size that are scored together."""


@dataclass(frozen=True)
class ImageScores:
    """Local scores of one image [classes, down, across] in float64, and which of them a patch can reach."""

    scores: Tensor
    low: Tensor
    high: Tensor
    logits: Tensor
    """Of the undefended classifier [classes]."""
    footprints: tuple[Footprint, ...]
    patches: int
    classifications: int
    size: Size
    """Of the image on the threat's grid."""


class LocalScoreDefense(Defense[VerdictT, CertificateT]):
    """Computes the local scores of each image; a subclass makes verdicts and certificates of them."""

    many_patches = True
    """Whether the certificate also holds for several patches at once."""

    def __init__(self, classifier: AnyClassifier, threat: AnyThreat) -> None:
        super().__init__(classifier, threat)
        if self.threat.count > 1 and not self.many_patches:
            raise ThreatError(f"the certificate of {type(self).__name__} is for one patch, got {self.threat}")
        self.source = self.score_source()
        self._fields: dict[Size, tuple[ReceptiveFields, tuple[Footprint, ...]]] = {}

    def score_source(self) -> LocalScoreSource:
        """Where local scores come from; by default a network of small receptive fields."""
        return LocalLogits(self.classifier, self.threat.grid)

    def transform_scores(self, scores: Tensor) -> Tensor:
        """This defense's own function of each score; it must not decrease, so that bounds stay bounds."""
        return scores

    @abstractmethod
    def verdict(self, image: ImageScores) -> VerdictT:
        """Decide one image."""

    @abstractmethod
    def certificate(self, image: ImageScores, label: int) -> CertificateT:
        """Prove, or not, one clean image with its true label."""

    def predict(self, images: AnyImages, *, progress: bool | None = False) -> list[VerdictT]:
        scored = tracked(self._scored_images(images), "predict", progress, total=number_of(images))
        return [self.verdict(image) for image in scored]

    def examine(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = False
    ) -> list[Examination[VerdictT, CertificateT]]:
        def examine(image: ImageScores, label: int) -> Examination[VerdictT, CertificateT]:
            check_range([label], len(image.logits))
            certificate = self.certificate(image, label)
            return Examination(self.verdict(image), certificate, image.size, int(image.logits.argmax()))

        truths = checked_labels(images, labels)
        return examine_each(self, self._scored_images(images), truths, examine, maps=maps, progress=progress)

    def check_size(self, size: Size) -> None:
        """Raise if ablations, receptive fields or patches do not fit images of this size."""
        if size not in self._fields:
            fields = self.source.receptive_fields(size)
            self._fields[size] = fields, fields.footprints(self.threat)

    def _scored_images(self, images: AnyImages) -> Iterator[ImageScores]:
        group: list[Tensor] = []
        for number, image in enumerate(checked_images(images, self.classifier.preprocessing.channels)):
            pixels = self.to_threat_grid(image)
            try:
                self.check_size((pixels.shape[1], pixels.shape[2]))
            except PatchCleanserError as error:
                error.args = (f"image {number}: {error}",)
                raise
            if group and (len(group) == GROUP or group[0].shape != pixels.shape):
                yield from self._scored_group(group)
                group = []
            group.append(pixels)
        yield from self._scored_group(group)

    def _scored_group(self, group: list[Tensor]) -> Iterator[ImageScores]:
        size = (group[0].shape[1], group[0].shape[2])
        _, footprints = self._fields[size]
        local = self.source(torch.stack(group))
        # Sums are made in float64, which Apple's GPUs do not have.
        device = torch.device("cpu") if local.scores.device.type == "mps" else local.scores.device
        bounds = [self.transform_scores(t.to(device).double()) for t in (local.scores, local.low, local.high)]
        for scores, low, high, logits in zip(*bounds, local.logits, strict=True):
            yield ImageScores(scores, low, high, logits, footprints, self.threat.count, local.classifications, size)


class LocalRecovery(LocalScoreDefense[LocalVerdict, LocalCertificate]):
    """Answers the class of the highest score; certifies it if it stays highest under the worst patch."""

    def class_scores(self, image: ImageScores) -> Tensor:
        """The score of each class [classes], by default its sum; of equals the smallest class wins."""
        return image.scores.sum((1, 2))

    @abstractmethod
    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        """For each placement of one patch [down, across], a lower bound of the label's lead; above 0 is a proof."""

    def verdict(self, image: ImageScores) -> LocalVerdict:
        return LocalVerdict(int(self.class_scores(image).argmax()), image.classifications)

    def certificate(self, image: ImageScores, label: int) -> LocalCertificate:
        worst, where = torch.inf, None
        for footprint in image.footprints:
            margins = self.worst_case_margin(image, label, footprint).flatten().nan_to_num(nan=-torch.inf)
            number = int(margins.argmin())
            if float(margins[number]) < worst:
                worst, where = float(margins[number]), footprint.window(number)
        if worst <= SUM_ROUNDING:
            worst = min(worst, 0.0)
        failing: tuple[Window, ...] | None = None if worst > 0 or where is None else (where,)
        return LocalCertificate(label, worst > 0, failing, worst, image.classifications)


def reached_sums(scores: Tensor, footprint: Footprint) -> Tensor:
    """The sum of the scores [..., down, across] that each placement reaches [..., placements down, across]."""
    rows, columns = (torch.from_numpy(m).to(scores) for m in (footprint.rows, footprint.columns))
    return rows @ scores @ columns.T


def other_classes(scores: Tensor, label: int) -> Tensor:
    """The scores [classes - 1, ...] of all classes but the label."""
    return torch.cat([scores[:label], scores[label + 1 :]])


def summed_margin(image: ImageScores, label: int, footprint: Footprint, *, max_drop: float) -> Tensor:
    """Lower bound of the lead of the label's sum of scores over every other sum, for each placement [down, across].

    A score of one class minus that of another is never below -max_drop. On the attacked image, the scores that a
    patch does not reach are unchanged, and each that it reaches gives the label at worst -max_drop against another
    class. So the difference of the sums falls by at most the damage: the sum of (difference + max_drop) over the
    scores reached. Damages are not negative, so several patches do at most the sum of what each does, and at most
    that many times the worst. Checked by Coq for integer scores (proofs/LocalScores.v: summed_margin_is_a_lower_bound,
    proofs/LocalScores.v: several_patches_do_at_most_the_worst_each).
    """
    leads = image.low[label] - other_classes(image.high, label)
    damage = reached_sums(leads + max_drop, footprint)
    if image.patches > 1:
        worst = torch.stack([reached_sums(leads + max_drop, f).amax((1, 2)) for f in image.footprints]).amax(0)
        damage = damage + (image.patches - 1) * worst[:, None, None]
    return (leads.sum((1, 2))[:, None, None] - damage).amin(0)
