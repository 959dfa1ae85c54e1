"""The defended model behind the service: images in, games out; and the samples of the page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.images import checked_image
from patchcleanser.classifiers.load import as_classifier, load_classifier
from patchcleanser.classifiers.specs import ASKING
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.data import load_dataset
from patchcleanser.data.pictures import as_picture, decode
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine.fast.calibration import MIN_IMAGES
from patchcleanser.engine.masking import ImageState
from patchcleanser.errors import ClassifierError, DataError, InputError, MaskError, ThreatError
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.jobs import Pair
from patchcleanser.service.decoding import Pixels, unpacked
from patchcleanser.service.settings import ServiceSettings

SAMPLES = 30
"""Images that the page offers, of every class as many where labels are known."""

BLANKS = (64, 224, 512, 1024)
"""Sides of images without content, for a model without samples; the threat must fit one to warm up."""

Start = Callable[[LabelTable], LabelFlow[Any]]

SERVED = {name: kind for name, entry in DEFENSES.items() if issubclass(kind := entry.load(), MaskDefense)}
"""Requests are games about labels under masks, so these are the defenses that can be served."""


@dataclass(frozen=True)
class Sample:
    """A clean image that comes with the service."""

    content: bytes
    """A PNG."""
    label: int | None


class Engine:
    """A classifier, its defense for every number of masks, and what can be asked of them.

    Images are prepared in any thread; only the worker lets the model look at them.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        if settings.defense not in SERVED:
            raise InputError(f"no defense {settings.defense!r} with masks to serve; there are {', '.join(SERVED)}")
        self.settings = settings
        model, named = settings.model, isinstance(settings.model, str)
        self.classifier: Classifier = (
            load_classifier(model, device=settings.device, trust_code=settings.trust_code)
            if named
            else as_classifier(model)
        )
        self.name = _shown(model) if named else type(model).__name__
        self.fingerprint: str | None = None
        with suppress(ClassifierError):  # a plain function has none, and nothing is stored here
            self.fingerprint = self.classifier.fingerprint
        self.defense = self._build(settings.masks, settings.stride)
        self._variants: dict[int, MaskDefense[Any, Any]] = {}
        self._lock = threading.Lock()
        found = _samples(settings.samples, self.classifier) if settings.samples else ()
        self.samples = tuple(sample for sample in found if self._fits(self._decoded(sample.content)))
        self._warm_up()

    @property
    def may_choose_masks(self) -> bool:
        """Whether a request may name its own number of masks; with several patches that grows too fast."""
        return self.settings.threat.count == 1

    def subject(self, picture: Pixels, masks: int | None) -> ImageState:
        """A decoded picture, on the device, with an empty table."""
        pixels = checked_image(torch.from_numpy(unpacked(picture)), self.classifier.preprocessing.channels)
        with self._lock:  # mask sets are built once for each size
            return self._variant(masks).image_state(pixels)

    def mask_set(self, size: Size, masks: int | None) -> MaskSet:
        """The masks for images of this size on the threat's grid."""
        with self._lock:
            return self._variant(masks).mask_set(size)

    def prediction(self, masks: int | None, *, undefended: bool) -> Start:
        """The game of `predict`; the undefended label comes after it and changes nothing."""
        defense = self._variant(masks)

        def start(table: LabelTable) -> LabelFlow[Any]:
            verdict = yield from defense.verdict_flow(table)
            if undefended:
                yield np.array([UNMASKED])
            return verdict

        return start

    def certificate(self, masks: int | None, label: int, *, maps: bool) -> Start:
        """The game of `certify`."""
        defense = self._variant(masks)
        return lambda table: defense.certificate_flow(table, label, maps=maps)

    def _warm_up(self) -> None:
        """Play one game outside the queue: what is wrong with the model is said now, and kernels are made.

        Fast labels are calibrated by the samples, which are trusted; never by what clients send.
        """
        trusted = [self._decoded(sample.content) for sample in self.samples[:MIN_IMAGES]]
        channels = self.classifier.preprocessing.channels or 3
        blank = (torch.full((channels, side, side), 0.5) for side in BLANKS)
        first = next((image for image in (*trusted, *blank) if self._fits(image)), None)
        if first is not None:
            self.defense.predict([first])
        if trusted:
            self.defense.calibrate(trusted)

    def _fits(self, image: torch.Tensor) -> bool:
        """Whether the threat fits an image of this size."""
        try:
            self.defense.image_state(image)
        except (MaskError, ThreatError):
            return False
        return True

    def _decoded(self, content: bytes) -> torch.Tensor:
        return decode(content, "sent", formats=self.settings.limits.formats)

    def _variant(self, masks: int | None) -> MaskDefense[Any, Any]:
        if masks is None:
            return self.defense
        if masks not in self._variants:
            self._variants[masks] = self._build(masks, None)
        return self._variants[masks]

    def _build(self, masks: Pair, stride: Pair) -> MaskDefense[Any, Any]:
        chosen = self.settings
        plan = {"masks": masks, "stride": stride, "precision": chosen.precision, **chosen.options}
        defense: MaskDefense[Any, Any] = SERVED[chosen.defense](self.classifier, chosen.threat, **plan)
        return defense


def _shown(spec: str) -> str:
    """What clients may know of a model's name: no folders, no options."""
    kind, _, rest = spec.partition(":")
    if kind in ASKING:
        return f"{kind}:{','.join(map(_shown, rest.split(',') if kind == 'mean' else [rest]))}"
    return f"{kind}:{PurePath(rest.partition('?')[0]).name}"


def _samples(name: str, classifier: Classifier) -> tuple[Sample, ...]:
    """A few images of each class; if the model knows other classes, pictures are still pictures."""
    dataset = load_dataset(name)
    labels = None
    with suppress(DataError):
        dataset, _ = match_labels(dataset, classifier)
        labels = dataset.labels
    chosen = range(min(len(dataset), SAMPLES)) if labels is None else _some_of_each(labels)
    return tuple(Sample(_png(dataset.image(i)), None if labels is None else int(labels[i])) for i in chosen)


def _some_of_each(labels: NDArray[np.int64]) -> list[int]:
    """The first of each class, then the second of each, and so on."""
    firsts = [np.flatnonzero(labels == label)[:SAMPLES] for label in np.unique(labels)]
    rounds = ([mine[turn] for mine in firsts if len(mine) > turn] for turn in range(SAMPLES))
    return [int(i) for some in rounds for i in some][:SAMPLES]


def _png(pixels: torch.Tensor) -> bytes:
    file = BytesIO()
    as_picture(pixels).save(file, format="PNG")
    return file.getvalue()
