"""LocalDefense: an answer made of many local scores, of which a patch can reach only some."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchcleanser.classifiers.images import checked_images
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.receptive_fields import Footprint, ReceptiveFields
from patchcleanser.core.results import LocalCertificate, LocalVerdict
from patchcleanser.core.threats import Threat
from patchcleanser.defenses.defense import C, Defense, Examined, V, check_range, counted_labels, each_labelled
from patchcleanser.defenses.local_scores import Evidence, Local
from patchcleanser.errors import InputError, OutputError, PatchCleanserError, ThreatError

SUMMED = 1e-5
"""A lead below this is none: sums of other numbers, as an attack makes them, round differently in float64 too."""

GROUP = 64
"""Images of one size that are worked on together."""


@dataclass(frozen=True)
class Scores:
    """One image: its local scores [classes, down, across] in float64, and what a patch can reach of them."""

    score: Tensor
    low: Tensor
    high: Tensor
    whole: Tensor
    reaches: tuple[Footprint, ...]
    patches: int
    spent: int


class LocalBase(Defense[V, C]):
    """Images into cases; what is made of a case is each defense's own."""

    many_patches = True
    """Whether the certificate also holds for several patches at once."""

    def __init__(self, classifier: Any, threat: Threat) -> None:
        super().__init__(classifier, threat)
        if threat.count > 1 and not self.many_patches:
            raise ThreatError(f"the certificate of {type(self).__name__} is for one patch, got {threat}")
        self.evidence = self._evidence()
        self._known: dict[Size, tuple[ReceptiveFields, tuple[Footprint, ...]]] = {}

    @abstractmethod
    def _evidence(self) -> Evidence:
        """Where the local scores come from."""

    @abstractmethod
    def _verdict(self, case: Scores) -> V:
        """Decide one image."""

    @abstractmethod
    def _certificate(self, case: Scores, label: int) -> C:
        """Prove, or not, one labelled image."""

    def _scored(self, local: Tensor) -> Tensor:
        """What this defense makes of each local score by itself; never falling, so that bounds stay bounds."""
        return local

    def predict(self, images: Any) -> list[V]:
        """A verdict for each image; images are [N, C, H, W] in [0, 1], or an iterable of [C, H, W]."""
        return [self._verdict(case) for _, case in self._cases(images)]

    def certify(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> list[C]:
        """A certificate for each clean image with its true label."""
        return [found.certificate for found in self.examine(images, labels, maps=maps)]

    def examine(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> list[Examined[V, C]]:
        """Verdict, certificate and undefended label of clean images."""
        if maps:
            raise InputError(f"{type(self).__name__} has no map of positions; leave out maps=")

        def one(seen: tuple[Size, Scores], label: int) -> Examined[V, C]:
            size, case = seen
            check_range([label], len(case.whole))
            return Examined(self._verdict(case), self._certificate(case, label), size, int(case.whole.argmax()))

        return each_labelled(self._cases(images), counted_labels(images, labels), one)

    def check_size(self, size: Size) -> None:
        """Ablations and patches that do not fit are refused."""
        self._seen(size)

    def _seen(self, size: Size) -> tuple[ReceptiveFields, tuple[Footprint, ...]]:
        """What the scores see, and what a patch reaches of them; found out once for each size."""
        if size not in self._known:
            sight = self.evidence.sight(size)
            self._known[size] = sight, sight.reaches(self.threat)
        return self._known[size]

    def _cases(self, images: Any) -> Iterator[tuple[Size, Scores]]:
        group: list[Tensor] = []
        for number, image in enumerate(checked_images(images, self.classifier.preprocessing.channels)):
            pixels = self.to_threat_grid(image)
            try:
                self.check_size((pixels.shape[1], pixels.shape[2]))
            except PatchCleanserError as error:
                error.args = (f"image {number}: {error}",)
                raise
            if group and (len(group) == GROUP or group[0].shape != pixels.shape):
                yield from self._looked(group)
                group = []
            group.append(pixels)
        yield from self._looked(group)

    def _looked(self, group: list[Tensor]) -> Iterator[tuple[Size, Scores]]:
        size = (group[0].shape[1], group[0].shape[2])
        sight, reaches = self._seen(size)
        local: Local = self.evidence(torch.stack(group))
        if local.score.shape[2:] != sight.grid:
            got = tuple(local.score.shape[2:])
            raise OutputError(f"the network has {got} local scores where its receptive fields make {sight.grid}")
        # Sums are made in float64, which Apple's GPUs do not have.
        home = torch.device("cpu") if local.score.device.type == "mps" else local.score.device
        scored = [self._scored(t.to(home).double()) for t in (local.score, local.low, local.high)]
        for score, low, high, whole in zip(*scored, local.whole, strict=True):
            yield size, Scores(score, low, high, whole, reaches, self.threat.count, local.spent)


class LocalDefense(LocalBase[LocalVerdict, LocalCertificate]):
    """Recovery: the label with the highest total, and a certificate by how far it stays ahead."""

    @abstractmethod
    def _totals(self, case: Scores) -> Tensor:
        """The score of each class [classes]; of equals the smallest class wins."""

    @abstractmethod
    def _ahead(self, case: Scores, label: int, reach: Footprint) -> Tensor:
        """For each placement of one patch [down, across]: how far the label surely stays ahead; above 0 is proved."""

    def _verdict(self, case: Scores) -> LocalVerdict:
        return LocalVerdict(int(self._totals(case).argmax()), case.spent)

    def _certificate(self, case: Scores, label: int) -> LocalCertificate:
        worst, where = torch.inf, None
        for reach in case.reaches:
            # What is not a number proves nothing.
            ahead = self._ahead(case, label, reach).flatten().nan_to_num(nan=-torch.inf)
            place = int(ahead.argmin())
            if float(ahead[place]) < worst:
                worst, where = float(ahead[place]), reach.window(place)
        if worst <= SUMMED:
            worst = min(worst, 0.0)
        failing: tuple[Window, ...] | None = None if worst > 0 or where is None else (where,)
        return LocalCertificate(label, worst > 0, failing, worst, case.spent)

    def _outcome(self, verdict: LocalVerdict) -> int:
        return verdict.label


def reached_sums(scores: Tensor, reach: Footprint) -> Tensor:
    """The sum of the scores [..., down, across] that each placement reaches [..., placements down, across]."""
    rows, columns = (torch.from_numpy(m).to(scores) for m in (reach.rows, reach.columns))
    return rows @ scores @ columns.T


def others(scores: Tensor, label: int) -> Tensor:
    """The scores [classes, ...] of all classes but one."""
    return torch.cat([scores[:label], scores[label + 1 :]])


def summed_ahead(case: Scores, label: int, reach: Footprint, *, swing: float) -> Tensor:
    """How far the sum of the label's scores stays ahead of every other sum, for each placement [down, across].

    A score of one class minus that of another is never below -swing. Then, on the attacked image,
    the scores that a patch does not reach are as they were, and each that it reaches gives the
    label at worst -swing against another class. So the difference of the sums falls by at most
    the damage: the sum of (difference + swing) over the scores reached. Damages are not negative,
    so several patches do at most the sum of what each does, and at most that many times the worst.
    """
    apart = case.low[label] - others(case.high, label)
    damage = reached_sums(apart + swing, reach)
    if case.patches > 1:
        worst = torch.stack([reached_sums(apart + swing, r).amax((1, 2)) for r in case.reaches]).amax(0)
        damage = damage + (case.patches - 1) * worst[:, None, None]
    return (apart.sum((1, 2))[:, None, None] - damage).amin(0)
