"""The defended model behind the service: a classifier, its defense, and sample images for the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.preprocessing import checked_image
from patchcleanser.classifiers.registry import WRAPPERS, as_classifier, load_classifier, members
from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import PerAxis
from patchcleanser.data import load_dataset
from patchcleanser.data.codec import as_picture, decode
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine.fast.calibration import MIN_IMAGES
from patchcleanser.engine.masking import ImageState
from patchcleanser.errors import ClassifierError, DataError, InputError, MaskError, ThreatError
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.service.config import ServiceSettings
from patchcleanser.service.decoding import Pixels, unpack
from patchcleanser.service.schemas import CertifyOptions, Options, PredictOptions

SAMPLES = 30
"""Images that the page offers, of every class as many where labels are known."""
BLANKS = (64, 224, 512, 1024)
"""Sides of gray images, for a model without samples; the threat must fit one to warm up."""

StartFlow = Callable[[LabelTable], LabelFlow[Any]]

SERVED = {name: kind for name, entry in DEFENSES.items() if issubclass(kind := entry.load(), MaskDefense)}
"""Requests are flows of labels under masks, so these are the defenses that can be served."""


@dataclass(frozen=True)
class Sample:
    """A clean image that comes with the service."""

    png: bytes
    label: int | None


class DefendedModel:
    """A classifier, and its defense for every number of masks that is asked for.

    Images are prepared in any thread; only the scheduler's thread runs the classifier on them.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        if settings.defense not in SERVED:
            raise InputError.unknown("defense", settings.defense, SERVED, ", which have masks")
        self.settings = settings
        self.classifier: Classifier
        if isinstance(settings.model, str):
            self.classifier = load_classifier(settings.model, device=settings.device, trust_code=settings.trust_code)
            self.name = _shown(settings.model)
        else:
            self.classifier, self.name = as_classifier(settings.model), type(settings.model).__name__
        self.fingerprint: str | None = None
        with suppress(ClassifierError):  # a plain function has none, and nothing is stored here
            self.fingerprint = self.classifier.fingerprint
        self.defense = self._build(settings.masks, settings.stride)
        self._variants: dict[int | None, MaskDefense[Any, Any]] = {None: self.defense}
        self._lock = threading.Lock()
        samples = _samples(settings.samples, self.classifier) if settings.samples else ()
        self.samples = tuple(sample for sample in samples if self._fits(self._decode(sample.png)))
        self._warm_up()

    @property
    def may_choose_masks(self) -> bool:
        """Whether a request may name its own number of masks; with several patches that grows too fast."""
        return self.settings.threat.count == 1

    def image_state(self, picture: Pixels, masks: int | None) -> ImageState:
        """A decoded image, on the device, with an empty table."""
        pixels = checked_image(torch.from_numpy(unpack(picture)), self.classifier.preprocessing.channels)
        with self._lock:  # mask sets are built once for each size
            return self._variant(masks).image_state(pixels)

    def empty_table(self, size: Size, masks: int | None) -> LabelTable:
        """A table of labels for images of this size on the threat's grid, with its masks."""
        with self._lock:
            return self._variant(masks).empty_table(size)

    def flows(self, options: Options, images: int) -> list[StartFlow]:
        """What starts the label flow of each image: that of `predict`, or of `certify`."""
        defense = self._variant(options.masks)
        if isinstance(options, CertifyOptions):
            return [partial(defense.certificate_flow, label=label, maps=options.maps) for label in options.labels]
        undefended = isinstance(options, PredictOptions) and options.details

        def predict(table: LabelTable) -> LabelFlow[Any]:
            verdict = yield from defense.verdict_flow(table)
            if undefended:
                yield table, np.array([UNMASKED])  # after the verdict, which it does not change
            return verdict

        return [predict] * images

    def _warm_up(self) -> None:
        """Predict one image before any request: a broken model is an error now, and kernels are compiled.

        Fast labels are calibrated by the samples, which are trusted; never by what clients send.
        """
        trusted = [self._decode(sample.png) for sample in self.samples[:MIN_IMAGES]]
        channels = self.classifier.preprocessing.channels or 3
        blanks = (torch.full((channels, side, side), 0.5) for side in BLANKS)
        first = next((image for image in (*trusted, *blanks) if self._fits(image)), None)
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

    def _decode(self, content: bytes) -> torch.Tensor:
        return decode(content, "sent", formats=self.settings.limits.formats)

    def _variant(self, masks: int | None) -> MaskDefense[Any, Any]:
        if masks not in self._variants:
            self._variants[masks] = self._build(masks, None)
        return self._variants[masks]

    def _build(self, masks: PerAxis, stride: PerAxis) -> MaskDefense[Any, Any]:
        chosen = self.settings
        options = {"masks": masks, "stride": stride, "precision": chosen.precision, **chosen.options}
        defense: MaskDefense[Any, Any] = SERVED[chosen.defense](self.classifier, chosen.threat, **options)
        return defense


def _shown(spec: str) -> str:
    """The part of a model's spec that clients may see: no folders, no options."""
    kind, _, rest = spec.partition(":")
    if kind in WRAPPERS:
        return f"{kind}:{','.join(map(_shown, members(spec) if kind == 'mean' else [rest]))}"
    return f"{kind}:{PurePath(rest.partition('?')[0]).name}"


def _samples(name: str, classifier: Classifier) -> Iterator[Sample]:
    """A few images of each class; without labels if the model has other classes."""
    dataset = load_dataset(name)
    labels = None
    with suppress(DataError):
        dataset, _ = match_labels(dataset, classifier)
        labels = dataset.labels
    for index in range(min(len(dataset), SAMPLES)) if labels is None else _some_of_each(labels):
        file = BytesIO()
        as_picture(dataset.image(index)).save(file, format="PNG")
        yield Sample(file.getvalue(), None if labels is None else int(labels[index]))


def _some_of_each(labels: NDArray[np.int64]) -> list[int]:
    """Indices of the first image of each class, then the second of each, and so on."""
    occurrence = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        occurrence[labels == label] = np.arange(np.count_nonzero(labels == label))
    return [int(i) for i in np.lexsort((labels, occurrence))[:SAMPLES]]
