"""DetectJob: everything that decides the rows of objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from patchcleanser.core.threats import Threat
from patchcleanser.data.object_sets import ObjectDataset
from patchcleanser.defenses.object_seeker import FILL, ObjectSeeker
from patchcleanser.detectors.detector import Detector, require_detector
from patchcleanser.errors import DataError, InputError
from patchcleanser.evaluation.jobs import (
    CHECKED_IMAGES,
    Pair,
    as_list,
    created,
    init_fields,
    named_error,
    require_unchanged,
)

DETECTIONS = 1
"""Version of the detections. Raise it when a change of the code may change a box: old and new rows then never mix."""


@dataclass(frozen=True)
class DetectJob:
    """Which objects to certify: images with boxes, detector, threat and masks. Jobs of equal identity have equal rows.

    `dataset` has the detector's class numbers. With `lines`, masks are also both sides of that many rows and columns.
    Rows hold what every mask promises, so that smaller patches and others can be derived without the detector.
    """

    detector: Detector
    dataset: ObjectDataset
    threat: Threat
    masks: Pair = None
    stride: Pair = None
    lines: int = 0
    score: float = 0.3
    masked_score: float = 0.5
    prune: float = 0.8
    spec: str | None = None
    """The string that loads the detector; it decides no row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        require_detector(self.detector)
        if not isinstance(self.dataset, ObjectDataset):
            raise InputError(f"objects come from load_objects(…), got {type(self.dataset).__name__}")
        if self.dataset.classes != tuple(self.detector.classes):
            raise InputError("the dataset's classes are not the detector's; use dataset.renumbered(detector.classes)")
        self.built  # noqa: B018  # raises if it cannot be built

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @property
    def device(self) -> torch.device:
        """Where the detector is."""
        return self.detector.device

    @property
    def title(self) -> str:
        """Threat and masks."""
        return f"objects, {self.threat}"

    @property
    def options(self) -> dict[str, float]:
        """The defense's thresholds."""
        return {"score": self.score, "masked_score": self.masked_score, "prune": self.prune}

    @cached_property
    def built(self) -> ObjectSeeker:
        """The defense."""
        return ObjectSeeker(
            self.detector, self.threat, masks=self.masks, stride=self.stride, lines=self.lines, **self.options
        )

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        objects = self.dataset.objects[index]
        return {"classes": objects.classes.tolist(), "boxes": objects.boxes.ravel().tolist()}

    def check(self, *, skip: bool = False) -> None:
        """Raise, before anything is written, if the masks cannot be built for an image.

        With `skip`, images that cannot be read are left out later, so the first one that can be read is taken.
        """
        for index in range(min(CHECKED_IMAGES, len(self.dataset))):
            try:
                height, width = self.dataset.image(index).shape[1:]
            except DataError as error:
                if not skip:
                    raise named_error(error, self.dataset.id(index)) from error
                continue
            self.built.mask_set((height, width))
            return

    def check_unchanged(self) -> None:
        """Raise if the detector is no longer the one of the identity."""
        require_unchanged(self.identity, self.detector.fingerprint)

    @property
    def sketch(self) -> str:
        """Changes if the detector does."""
        return self.detector.fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """What a manifest says besides the job itself."""
        names = list(self.detector.classes)
        return {**({"model": self.spec} if self.spec else {}), **self.dataset.origin, "classes": names, **created()}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        return {
            "kind": "detect",
            "detections": DETECTIONS,
            "classifier": self.detector.fingerprint,
            "device": self.device.type,
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "threat": self.threat.to_json(),
            "masks": as_list(self.masks or (None if self.stride else 6)),
            "stride": as_list(self.stride),
            "lines": self.lines,
            "fill": FILL,
            "defense": "object-seeker",
            "options": self.options,
        }
