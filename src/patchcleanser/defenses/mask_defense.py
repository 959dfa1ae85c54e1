"""MaskDefense: labels under masks decide, where some mask always hides the patch."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from patchcleanser.classifiers.preprocessing import AnyImages, checked_images
from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size, image_window, is_integer, size_in_words
from patchcleanser.core.label_table import UNMASKED, Indices, LabelTable
from patchcleanser.core.masks import MaskSet, PerAxis, masks_per_axis
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.results import Certificate
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.defenses.defense import (
    CertificateT,
    Defense,
    Examination,
    VerdictT,
    check_range,
    checked_labels,
    number_of,
)
from patchcleanser.engine import Confirm, LabelEngine, Precision, RecomputeError, build_engine
from patchcleanser.engine.masking import ImageState, LabelRequest
from patchcleanser.errors import InputError, LabelError, MaskError, PatchCleanserError
from patchcleanser.progress import Show, progress_bar

R = TypeVar("R")
Report = Callable[[list[ImageState], Container[int]], None]
"""Shows how far a group of images is, of which those with these numbers are finished."""

LOGGER = logging.getLogger("patchcleanser")

GROUP_LIMITS = {"cuda": (4096, 310_000_000), "cpu": (256, 256_000_000)}
"""Most images, and bytes of images, that are worked on together, so that memory stays bounded (512 images of 224×224
on a GPU). A fast engine calibrates once a group, which takes a GPU as long as 20 images."""

MANY_PAIRS = 200_000
"""More pairs of masks than this take a second or more to build."""

CACHED_SIZES = 256
"""Most mask sets kept, one for each image size: images of ever new sizes must not fill the memory."""


class TableRequest(NamedTuple):
    """The unions whose labels a flow needs next, and the table they belong to."""

    flow: int
    """Its number."""
    table: LabelTable
    unions: Indices


def joint_requests(flows: Sequence[LabelFlow[R]], results: dict[int, R]) -> Iterator[list[TableRequest]]:
    """Advance flows side by side: yield the requests of all of them.

    Whoever iterates writes those labels into the tables before the next step. What a flow returns goes into `results`
    under its number.

    >>> def flow(n):
    ...     yield None, np.arange(n)  # a table, and unions
    ...     return n
    >>> results = {}
    >>> for step in joint_requests([flow(2), flow(1)], results):
    ...     print([(number, list(map(int, unions))) for number, _, unions in step])
    [(0, [0, 1]), (1, [0])]
    >>> results
    {0: 2, 1: 1}
    """
    waiting = dict(enumerate(flows))
    while waiting:
        wanted: list[TableRequest] = []
        for number, flow in list(waiting.items()):
            try:
                wanted.append(TableRequest(number, *next(flow)))
            except StopIteration as end:
                results[number] = end.value
                del waiting[number]
        if wanted:
            yield wanted


class MaskSets:
    """The masks for images of each size on the threat's grid, built when first needed, and proved to cover it.

    With the side and distance in px of receptive `fields`, masks hide few of the local scores with such fields.
    """

    def __init__(
        self,
        threat: Threat,
        masks: PerAxis,
        stride: PerAxis = None,
        given: MaskSet | None = None,
        fields: tuple[int, int] | None = None,
    ) -> None:
        if given is not None and (masks is not None or stride is not None):
            raise MaskError("give mask_set= or masks=/stride=, not both")
        masks_per_axis(masks, stride)  # refused at once, not with the first image
        self.threat, self._masks, self._stride, self._given = threat, masks, stride, given
        self._fields = fields
        self._built: dict[Size, MaskSet] = {}
        self._warned = False
        if given is not None:
            if not isinstance(given, MaskSet):
                raise MaskError(f"mask_set is a MaskSet((height, width), masks), got {type(given).__name__}")
            given.require_cover(threat)
            _warn_of_blind(given)

    def __str__(self) -> str:
        if self._given is not None:
            return f"mask_set={self._given}"
        return f"stride={self._stride}" if self._stride else f"masks={6 if self._masks is None else self._masks}"

    @property
    def built(self) -> list[MaskSet]:
        """Those that were used so far."""
        return list(self._built.values()) if self._given is None else [self._given]

    def of(self, size: Size) -> MaskSet:
        """The masks for images of this size."""
        if self._given is not None:
            if self._given.image != size:
                want = "×".join(map(str, self._given.image))
                raise MaskError(f"the given mask set is for images of {want} px, got {size[0]}×{size[1]} px")
            return self._given
        if size not in self._built:
            fields = ReceptiveFields.fields(size, *self._fields) if self._fields else None
            built = MaskSet.build(self.threat, image=size, masks=self._masks, stride=self._stride, fields=fields)
            pairs = len(built) * (len(built) + 1) // 2
            self._warn_of_too_many(built, pairs)
            if pairs > MANY_PAIRS and not self._warned:
                LOGGER.info("%s masks make %s pairs; checking them takes a while", f"{len(built):,}", f"{pairs:,}")
            built.require_cover(self.threat)
            _warn_of_blind(built)
            if len(self._built) >= CACHED_SIZES:
                self._built.clear()
            self._built[size] = built
            return built
        return self._built[size]

    def _warn_of_too_many(self, built: MaskSet, pairs: int) -> None:
        """Warn, once, if more masks per axis are asked for than a patch has places."""
        if self._masks is None or self._warned:
            return
        counts, _ = masks_per_axis(self._masks, None)
        room, shapes = self.threat.room(built.image), self.threat.shapes(built.image)
        places = [room.height + 1 - min(h for h, _ in shapes), room.width + 1 - min(w for _, w in shapes)]
        if all(number <= most for number, most in zip(counts, places, strict=True)):
            return
        self._warned = True
        LOGGER.warning(
            "%d×%d masks are more than the %d×%d places of a patch in an image of %s px: %s masks are used, and a "
            "certificate tries all %s pairs of them; fewer cover the threat, too (the default is 6×6)",
            *(*counts, *places, size_in_words(built.image), f"{len(built):,}", f"{pairs:,}"),
        )


def _warn_of_blind(masks: MaskSet) -> None:
    """Warn if a mask hides everything."""
    if image_window(masks.image) in chain(*masks.masks):
        LOGGER.warning("a mask hides the whole image of %d×%d px: its label is the same for every image", *masks.image)


@dataclass(frozen=True)
class TableExamination(Examination[VerdictT, CertificateT]):
    """An examination with the table of labels that it rests on."""

    table: LabelTable
    """Also holds the undefended label, at UNMASKED."""


class MaskDefense(Defense[VerdictT, CertificateT]):
    """Wraps any classifier so that patches of the threat lose their power.

    `classifier` is a Classifier, a torch module, a function or a string for load_classifier. `masks` is the number of
    masks per axis (6 by default, or a pair of numbers), `stride` the alternative in pixels. A `mask_set` of your own is
    accepted only if it provably covers the threat. `chunk` is the number of masked images computed at once. Images may
    differ in size: each size gets its own masks on the source grid.
    `precision="fast"` uses half precision, where the device is faster with it, and computes every label of small
    margin again in float32. Certificates by such labels are statistical; `confirm="all"` computes all labels of a
    certified image again.
    """

    receptive_field: tuple[int, int] | None = None
    """Side and distance in px of the fields of local scores, if labels come from these and masks hide few of them."""

    passes: int | None = None
    """Inputs of the network that give all labels of an image together; None if each label takes one."""

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        *,
        masks: PerAxis = None,
        stride: PerAxis = None,
        mask_set: MaskSet | None = None,
        chunk: int | None = None,
        precision: Precision = "exact",
        confirm: Confirm = "sampled",
    ) -> None:
        super().__init__(classifier, threat)
        if chunk is not None and (not is_integer(chunk) or chunk < 1):
            raise MaskError(f"chunk is at least 1 image at a time, got {chunk!r}")
        self.engine = self._label_engine(chunk, precision)
        self.mask_sets = MaskSets(self.threat, masks, stride, mask_set, self.receptive_field)
        if confirm not in ("sampled", "all"):
            raise InputError(f"confirm is 'sampled' or 'all', got {confirm!r}")
        self.confirm = confirm

    def __repr__(self) -> str:
        own = {name: vars(self).get(name) for name in ("coarse", "threshold")}
        own |= {"precision": "fast" if self.fast else None}
        more = "".join(
            f", {name}={value}" for name, value in own.items() if isinstance(value, int | float | str) and value
        )
        return f"{type(self).__name__}({self.classifier!r}, {self.threat}, {self.mask_sets}{more})"

    def _label_engine(self, chunk: int | None, precision: Precision) -> LabelEngine:
        """What computes the labels: by default it classifies masked images."""
        return build_engine(self.classifier, grid=self.threat.grid, chunk=chunk, precision=precision)

    @property
    def fast(self) -> bool:
        """Whether labels may come from a backend that is faster than float32."""
        return self.engine.fast

    def check_size(self, size: Size) -> None:
        """Raise if no masks can be built for images of this size."""
        self.empty_table(size)

    def reset(self, seed: tuple[int, ...] | None = None) -> None:
        self.engine.reset(seed)

    def hint_total_images(self, images: int) -> None:
        unions = (len(masks.unions) for masks in self.mask_sets.built)
        self.engine.hint_total_labels(images * max(unions, default=0))

    def mask_set(self, size: Size) -> MaskSet:
        """The masks for images of this size on the threat's grid, proved to cover it."""
        return self.mask_sets.of(size)

    def empty_table(self, size: Size) -> LabelTable:
        """A table of labels for an image of this size, with nothing known yet."""
        return LabelTable(self.mask_set(size))

    def predict(self, images: AnyImages, *, progress: bool | None = False) -> list[VerdictT]:
        """A verdict for each image; images are [N, C, H, W] in [0, 1], or an iterable of [C, H, W] or PIL images."""
        verdicts: list[VerdictT] = []
        with progress_bar("predict", progress, total=number_of(images)) as show:
            for group in self._groups(images):
                report = partial(_show_images, show, number_of(images), len(verdicts))
                verdicts += self._run(group, [self.verdict_flow] * len(group), self.engine, report, clean=False)
                report(group, range(len(group)))
        return verdicts

    def certify(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = None
    ) -> list[CertificateT]:
        """A certificate for each clean image with its true label.

        Stops at the first label that refutes an image, hardest masks first, with the same answer as the full check.
        `maps=True` computes every label, and so the map of positions. `progress` shows a bar, by default on a terminal
        and in a notebook.
        """
        return self._run_labelled(images, labels, partial(self.certificate_flow, maps=maps), progress)

    def examine(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = False
    ) -> list[TableExamination[VerdictT, CertificateT]]:
        """Verdict, certificate and undefended label of clean images; no label is computed twice."""

        def flow(table: LabelTable, label: int) -> LabelFlow[TableExamination[VerdictT, CertificateT]]:
            yield table, np.array([UNMASKED, *table.masks()])
            verdict = yield from self.verdict_flow(table)
            certificate = yield from self.certificate_flow(table, label, maps=maps)
            return TableExamination(verdict, certificate, table.mask_set.image, int(table.labels[UNMASKED]), table)

        return self._run_labelled(images, labels, flow, progress)

    def calibrate(self, images: AnyImages) -> None:
        """Learn from clean images that you trust which fast labels are uncertain; without it `predict` is exact.

        `certify` and `examine` do it by themselves: their images are clean. Images for `predict` may be an
        attacker's, and nothing is learnt from them.
        """
        for group in self._groups(images):
            self.engine.calibrate(group)

    def image_state(self, image: Tensor) -> ImageState:
        """A checked image [C, H, W] on the device, with an empty table of labels."""
        pixels = self.to_threat_grid(image)
        height, width = pixels.shape[-2:]
        return ImageState(pixels, self.empty_table((height, width)))

    @abstractmethod
    def verdict_flow(self, table: LabelTable) -> LabelFlow[VerdictT]:
        """Decide one image; `predict` and the service run it."""

    @abstractmethod
    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[CertificateT]:
        """Prove, or not, one clean image with its true label."""

    def _checked_truths(self, images: AnyImages, truths: Any) -> list[Any]:
        """What is true of each image, checked as far as it can be without the classifier."""
        return checked_labels(images, truths)

    def _check_truths(self, truths: list[Any]) -> None:
        """Raise LabelError for what the classifier has no class for; it knows its classes now."""
        check_range(truths, self.classifier.classes or 0)

    def _run_labelled(
        self, images: AnyImages, labels: Iterable[int], flow: Callable[..., LabelFlow[R]], progress: bool | None
    ) -> list[R]:
        """Run a flow for each image with its label."""
        truths = self._checked_truths(images, labels)
        results: list[R] = []
        with progress_bar("certify", progress, total=len(truths)) as show:
            for group in self._groups(images):
                group_labels = truths[len(results) : len(results) + len(group)]
                if len(group_labels) < len(group):
                    least = counted(len(results) + len(group), "image")
                    raise LabelError(f"{counted(len(truths), 'label')} for at least {least}")
                report = partial(_show_images, show, len(truths), len(results))
                results += self._run_clean(group, group_labels, flow, report)
                report(group, range(len(group)))
        if len(results) != len(truths):
            raise LabelError(f"{counted(len(truths), 'label')} for {counted(len(results), 'image')}")
        return results

    def _run_clean(
        self, group: list[ImageState], labels: list[int], flow: Callable[..., LabelFlow[R]], report: Report
    ) -> list[R]:
        """Run a flow for each clean image of a group with its label."""
        if self.classifier.classes is None:
            # Not in the table: labels in it would change the batches of the rest, by which kernels round.
            self.engine.exact.count_classes(group[0])
        self._check_truths(labels)
        self.engine.calibrate(group)
        starts = [partial(flow, label=label) for label in labels]
        first = self._run(group, starts, self.engine, report, clean=True)
        return self._confirmed(group, starts, first) if self.confirm == "all" else first

    def _run(
        self,
        group: list[ImageState],
        starts: Sequence[Callable[[LabelTable], LabelFlow[R]]],
        engine: LabelEngine,
        report: Report | None = None,
        *,
        clean: bool,
    ) -> list[R]:
        """Run a flow for each image; begin all of them anew whenever the engine asks for it."""
        while True:
            flows = [start(image.table) for start, image in zip(starts, group, strict=True)]
            results: dict[int, R] = {}
            try:
                for wanted in joint_requests(flows, results):
                    requests = [LabelRequest(group[n].with_table(table), unions) for n, table, unions in wanted]
                    engine.compute(requests, strict=clean, clean=clean)
                    if report is not None:
                        report(group, results)
                return [results[number] for number in range(len(flows))]
            except RecomputeError as error:
                LOGGER.info("the labels of %d images are computed again: %s", len(group), error)
                for image in group:
                    image.table = image.table.anew()

    def _confirmed(
        self, group: list[ImageState], starts: Sequence[Callable[[LabelTable], LabelFlow[R]]], results: list[R]
    ) -> list[R]:
        """The same results, but every certificate that rests on fast labels is computed again from exact ones."""
        claimed = [number for number, result in enumerate(results) if _rests_on_fast_labels(result)]
        for number in claimed:
            group[number].table = group[number].table.anew()
        again = self._run([group[n] for n in claimed], [starts[n] for n in claimed], self.engine.exact, clean=True)
        confirmed = dict(zip(claimed, again, strict=True))
        return [confirmed.get(number, result) for number, result in enumerate(results)]

    def _groups(self, images: AnyImages) -> Iterator[list[ImageState]]:
        group: list[ImageState] = []
        most_images, most_bytes = GROUP_LIMITS["cuda" if self.classifier.device.type == "cuda" else "cpu"]
        left = most_bytes
        for number, image in enumerate(checked_images(images, self.classifier.preprocessing.channels)):
            try:
                group.append(self.image_state(image))
            except PatchCleanserError as error:
                error.args = (f"image {number}: {error}",)
                raise
            left -= 4 * group[-1].pixels.numel()
            if len(group) == most_images or left <= 0:
                yield group
                group, left = [], most_bytes
        if group:
            yield group


def _show_images(show: Show, total: int | None, before: int, group: list[ImageState], finished: Container[int]) -> None:
    """Show how many images are done; of an unfinished one, the share of its labels."""
    shares = (
        1.0 if number in finished else image.table.spent / (image.table.size + 1) for number, image in enumerate(group)
    )
    show(round(before + sum(shares), 1), total, "")


def _rests_on_fast_labels(result: Any) -> bool:
    """Whether a certificate, or that of an examination, promises something by fast labels only."""
    certificate = getattr(result, "certificate", result)
    if not isinstance(certificate, Certificate):  # of a defense that has no fast labels
        return False
    maps = certificate.positions or {}
    return certificate.unconfirmed > 0 and (certificate.row_certified or any(safe.any() for safe in maps.values()))
