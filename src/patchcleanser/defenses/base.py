"""MaskDefense: a classifier, a threat, masks that cover it; labels under masks decide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from patchcleanser.classifiers.images import checked_images
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.masks import MaskSet, axis_plan
from patchcleanser.core.tables import UNMASKED, Indices, LabelTable
from patchcleanser.core.threats import Threat
from patchcleanser.core.verdicts import Certificate
from patchcleanser.core.windows import Size
from patchcleanser.defenses.contract import C, Defense, Examined, V, check_range, counted_labels
from patchcleanser.engine.batches import Subject
from patchcleanser.engine.masked import MaskedClassifier, Request
from patchcleanser.engine.precision import Confirm, Precision, SmallerBatchError, TooFarError, WrongFastLabelError
from patchcleanser.errors import InputError, LabelError, MaskError, PatchCleanserError

R = TypeVar("R")

GROUP = {"cuda": (512, 512_000_000), "cpu": (256, 256_000_000)}
"""How many images, and bytes of images, are worked on together; memory stays bounded. Of each group it is learnt which
fast labels are doubtful, which takes a GPU as long as 20 images."""

AGAIN = 3
"""How often a group is computed again with more labels in doubt before all are computed exactly."""

SIZES = 256
"""Mask sets kept, one for each size of image: whoever sends images of every size must not fill the memory."""


def play(games: Sequence[LabelFlow[R]], fill_in: Callable[[list[tuple[int, Indices]]], None]) -> list[R]:
    """Run games side by side: what all of them want next is asked for in one call.

    `fill_in` gets (game number, unions) pairs and must make those labels known.

    >>> def game(n):
    ...     yield np.arange(n)
    ...     return n
    >>> play([game(2), game(1)], lambda asked: print([(g, list(map(int, u))) for g, u in asked]))
    [(0, [0, 1]), (1, [0])]
    [2, 1]
    """
    results: dict[int, R] = {}
    waiting = dict(enumerate(games))
    while waiting:
        asked: list[tuple[int, Indices]] = []
        for number, game in list(waiting.items()):
            try:
                asked.append((number, next(game)))
            except StopIteration as end:
                results[number] = end.value
                del waiting[number]
        if asked:
            fill_in(asked)
    return [results[number] for number in range(len(games))]


@dataclass(frozen=True)
class TableExamined(Examined[V, C]):
    """The same, from one table of labels."""

    table: LabelTable
    """Also holds the undefended label, at UNMASKED."""


class MaskDefense(Defense[V, C]):
    """Wraps any classifier so that patches of the threat lose their power.

    `classifier` is a Classifier, a torch module, a function or a string for load_classifier.
    `masks` is the number of masks per axis (or one for each axis), `stride` the alternative.
    A hand-made `mask_set` is accepted only if it provably covers the threat. Images may
    differ in size: each size gets its own masks on the source grid. `precision="fast"` uses
    half precision, where the device is faster with it, and computes every label of small margin again in float32.
    Certificates by such labels are statistical; `confirm="all"` computes all labels of a certified image again.
    """

    def __init__(
        self,
        classifier: Any,
        threat: Threat,
        *,
        masks: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] | None = None,
        mask_set: MaskSet | None = None,
        chunk: int | None = None,
        precision: Precision = "exact",
        confirm: Confirm = "sampled",
    ) -> None:
        super().__init__(classifier, threat)
        if mask_set is not None and (masks is not None or stride is not None):
            raise MaskError("give mask_set= or masks=/stride=, not both")
        axis_plan(masks, stride)  # refused at once, not with the first image
        if chunk is not None and chunk < 1:
            raise MaskError(f"chunk is at least 1 image at a time, got {chunk}")
        self.masked = MaskedClassifier(self.classifier, grid=threat.grid, chunk=chunk, precision=precision)
        if confirm not in ("sampled", "all"):
            raise InputError(f"confirm is 'sampled' or 'all', got {confirm!r}")
        self.confirm = confirm
        self._masks, self._stride, self._given = masks, stride, mask_set
        self._built: dict[Size, MaskSet] = {}
        if mask_set is not None:
            mask_set.require_cover(threat)

    @property
    def fast(self) -> bool:
        """Whether there is a faster way to labels, worth checking them for."""
        return self.masked.fast

    def ready(self, size: Size) -> None:
        """Masks that cannot be built are refused."""
        self.mask_set(size)

    def begin(self, seed: tuple[int, ...] | None = None) -> None:
        """Forget which fast labels were found to be doubtful."""
        self.masked.recheck.seed = seed
        self.masked.recheck.begin()

    def expect(self, images: int) -> None:
        """Compiling a network pays only for many labels."""
        known = self._built.values() if self._given is None else [self._given]
        self.masked.expect(images * max((len(masks.unions) for masks in known), default=0))

    def place(self, image: Tensor) -> Tensor:
        """One checked image [C, H, W] on the device, prepared if the threat lives on the input grid."""
        return self.masked.place(image)

    def mask_set(self, size: Size) -> MaskSet:
        """The masks for images of this size on the threat's grid, proved to cover it."""
        if self._given is not None:
            if self._given.image != size:
                want = "×".join(map(str, self._given.image))
                raise MaskError(f"the given mask set is for images of {want} px, got {size[0]}×{size[1]} px")
            return self._given
        if size not in self._built:
            built = MaskSet.build(self.threat, image=size, masks=self._masks, stride=self._stride)
            built.require_cover(self.threat)
            if len(self._built) >= SIZES:
                self._built.clear()
            self._built[size] = built
            return built
        return self._built[size]

    def predict(self, images: Any) -> list[V]:
        """A verdict for each image; images are [N, C, H, W] in [0, 1], or an iterable of [C, H, W]."""
        verdicts: list[V] = []
        for group in self._groups(images):
            verdicts += self._played(group, [self._verdict] * len(group), clean=False)
        return verdicts

    def certify(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> list[C]:
        """A certificate for each clean image with its true label.

        Stops at the first label that refutes an image, hardest masks first, and gives the same
        answer as the full check. `maps=True` computes every label, and so the map of positions.
        """
        return self._labelled(images, labels, partial(self._certificate, maps=maps))

    def examine(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> list[TableExamined[V, C]]:
        """Verdict, certificate and undefended label of clean images, no label computed twice."""

        def game(table: LabelTable, label: int) -> LabelFlow[TableExamined[V, C]]:
            yield np.array([UNMASKED, *table.masks()])
            verdict = yield from self._verdict(table)
            certificate = yield from self._certificate(table, label, maps)
            return TableExamined(verdict, certificate, table.mask_set.image, int(table.labels[UNMASKED]), table)

        return self._labelled(images, labels, game)

    def calibrate(self, images: Any) -> None:
        """Learn from clean images that you trust which fast labels are doubtful; without it `predict` is exact.

        `certify` and `examine` do it by themselves: their images are clean. What `predict` is
        handed may be an attacker's, and teaches nothing.
        """
        for group in self._groups(images):
            self.masked.calibrate(group)
            self.masked.release()

    def subject(self, image: Tensor) -> Subject:
        """A checked image [C, H, W] on the device, with an empty table of labels."""
        pixels = self.masked.place(image)
        height, width = pixels.shape[-2:]
        return Subject(pixels, LabelTable(self.mask_set((height, width))))

    def predicting(self, table: LabelTable) -> LabelFlow[V]:
        """The game that `predict` plays for one image, for whoever plays games that come and go."""
        return self._verdict(table)

    def certifying(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[C]:
        """The game that `certify` plays for one image."""
        return self._certificate(table, label, maps)

    @abstractmethod
    def _verdict(self, table: LabelTable) -> LabelFlow[V]:
        """Decide one image."""

    @abstractmethod
    def _certificate(self, table: LabelTable, label: int, maps: bool) -> LabelFlow[C]:
        """Prove, or not, one labelled image."""

    def _labelled(self, images: Any, labels: Iterable[int], game: Callable[..., LabelFlow[R]]) -> list[R]:
        """Play a game for each image with its label."""
        truths = counted_labels(images, labels)
        results: list[R] = []
        for group in self._groups(images):
            mine = truths[len(results) : len(results) + len(group)]
            if len(mine) < len(group):
                raise LabelError(f"{len(truths)} labels for at least {len(results) + len(group)} images")
            self._check_range(mine, group[0])
            self.masked.calibrate(group)
            starts = [partial(game, label=label) for label in mine]
            played = self._played(group, starts, clean=True)
            results += self._confirmed(group, starts, played) if self.confirm == "all" else played
        if len(results) != len(truths):
            raise LabelError(f"{len(truths)} labels for {len(results)} images")
        return results

    def _played(
        self, group: list[Subject], starts: Sequence[Callable[[LabelTable], LabelFlow[R]]], *, clean: bool
    ) -> list[R]:
        """Play a game for each image; if fast labels turn out to be worse than was thought, once more.

        Where one moved too far, with more labels in doubt; if that happens again and again, or an audit catches a
        wrong one, with exact labels.
        """
        turn = 0
        while True:
            games = [start(subject.table) for start, subject in zip(starts, group, strict=True)]
            try:
                return self._play(group, games, clean=clean)
            except WrongFastLabelError as error:
                self.masked.recheck.hopeless |= turn >= AGAIN or not isinstance(error, TooFarError)
                turn += 1
            except SmallerBatchError:
                pass  # so often as batches can be halved
            for subject in group:
                subject.table = subject.table.anew()

    def _confirmed(
        self, group: list[Subject], starts: Sequence[Callable[[LabelTable], LabelFlow[R]]], results: list[R]
    ) -> list[R]:
        """The same results, but what fast labels certify is certified by exact ones or not at all."""
        claimed = [number for number, result in enumerate(results) if _rests_on_fast_labels(result)]
        for number in claimed:
            group[number].table = group[number].table.anew()
        self.masked.exact_only = True
        try:
            again = self._played([group[n] for n in claimed], [starts[n] for n in claimed], clean=True)
        finally:
            self.masked.exact_only = False
        confirmed = dict(zip(claimed, again, strict=True))
        return [confirmed.get(number, result) for number, result in enumerate(results)]

    def _play(self, group: list[Subject], games: Sequence[LabelFlow[R]], *, clean: bool) -> list[R]:
        def fill_in(asked: list[tuple[int, Indices]]) -> None:
            requests = [Request(group[number], unions) for number, unions in asked]
            self.masked.fill_in(requests, strict=clean, clean=clean)

        return play(games, fill_in)

    def _groups(self, images: Any) -> Iterator[list[Subject]]:
        group: list[Subject] = []
        most, room = GROUP["cuda" if self.classifier.device.type == "cuda" else "cpu"]
        left = room
        for number, image in enumerate(checked_images(images, self.classifier.preprocessing.channels)):
            try:
                group.append(self.subject(image))
            except PatchCleanserError as error:
                error.args = (f"image {number}: {error}",)
                raise
            left -= 4 * group[-1].pixels.numel()
            if len(group) == most or left <= 0:
                yield group
                group, left = [], room
        if group:
            yield group

    def _check_range(self, labels: Sequence[int], subject: Subject) -> None:
        if self.classifier.classes is None:
            # Beside the table: labels known beforehand would change the batches of the rest, by which kernels round.
            self.masked.ask(subject)
        check_range(labels, self.classifier.classes or 0)


def _rests_on_fast_labels(result: Any) -> bool:
    """Whether a certificate, or what an examination found, promises something that only fast labels say."""
    certificate = getattr(result, "certificate", result)
    if not isinstance(certificate, Certificate):  # of a defense that has no fast labels
        return False
    maps = certificate.positions or {}
    return certificate.unconfirmed > 0 and (certificate.row_certified or any(safe.any() for safe in maps.values()))
