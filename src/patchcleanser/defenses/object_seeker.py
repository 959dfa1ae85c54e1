"""ObjectSeeker: boxes of the image under masks beside those without, so that a patch cannot hide an object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.core.counts import counted
from patchcleanser.core.cover import Mask
from patchcleanser.core.detections import Detections, areas, coverage, merge, pixel_window, promised_coverage
from patchcleanser.core.geometry import Size, is_number
from patchcleanser.core.hiding import ObjectCertificate, certify_object, object_masks
from patchcleanser.core.masks import MaskSet, PerAxis
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.detectors.detector import Detector, require_detector
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.errors import ImageError, InputError, LabelError, NotAFunctionError, OutputError, ThreatError

COLUMNS = ("boxes", "classes", "scores")
"""What a function gives twice for the same image."""

FILL = 114 / 255
"""The gray of hidden pixels: what networks of this kind see beside a picture."""


@dataclass(frozen=True, eq=False)
class ObjectExamination:
    """Everything about one clean image with its objects."""

    base: Detections
    """Of the undefended detector."""
    merged: Detections
    """Of the defended detector."""
    undefended: NDArray[np.float64]
    """[objects]: the largest share of each object that one box of its class in `base` covers."""
    defended: NDArray[np.float64]
    """The same for `merged`."""
    promises: NDArray[np.float64]
    """[objects, masks]: the share that the detections under each mask promise."""
    certificates: list[ObjectCertificate]

    @property
    def masks(self) -> int:
        """The number of masks."""
        return int(self.promises.shape[1])


class ObjectSeeker:
    """Finds objects that a patch hides: every mask shows what is left without the place that it hides.

    The detector sees the image and the image under each mask. The answer is all boxes of the unmasked image, and the
    masked boxes that no box of their class in the answer covers (`merge`). Every object that some masked image shows
    is in the answer. The certificate and its proof are those of `certify_object`. What is promised is that a box of
    the object's class covers a share of it. The box may be larger than the object, and there may be more boxes, also
    false ones: an attacker can always add objects.

    Masks are the paper's windows for a patch of a stated size, and with `lines` also both sides of that many rows and
    columns, for a patch of any size (`object_masks`). More masks that hide one placement are more chances to see the
    object.

    `score` is the least score of a box, `masked_score` that of a box under a mask, and `prune` the share of a masked
    box that another one must cover to replace it.
    """

    def __init__(
        self,
        detector: Detector,
        threat: AnyThreat,
        *,
        masks: PerAxis = None,
        stride: PerAxis = None,
        lines: int = 0,
        score: float = 0.3,
        masked_score: float = 0.5,
        prune: float = 0.8,
    ) -> None:
        self.detector, self.threat = detector, Threat.of(threat)
        self.masks, self.stride, self.lines = masks, stride, lines
        self.score, self.masked_score, self.prune = score, masked_score, prune
        for name in ("score", "masked_score", "prune"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} lies above 0 and at most at 1, got {getattr(self, name)!r}")
        require_detector(detector)
        if self.threat.count > 1 or self.threat.grid != "source":
            raise ThreatError(f"objects are certified against 1 patch on the image as it came, got {self.threat}")
        self.mask_set = lru_cache(maxsize=64)(self._mask_set)
        self._probed = False

    def __repr__(self) -> str:
        classes = counted(len(self.detector.classes), "class")
        return f"ObjectSeeker({type(self.detector).__name__} of {classes}, {self.threat})"

    def _mask_set(self, size: Size) -> MaskSet:
        """The masks for images of a size; CoverError if they do not cover a threat that masks can cover."""
        return object_masks(self.threat, size, masks=self.masks, stride=self.stride, lines=self.lines)

    def predict(self, image: Tensor) -> Detections:
        """The defended detections of one image [3, H, W] in [0, 1]."""
        return self._merged(self.undefended(image), self._masked(image))

    def certify(self, image: Tensor, boxes: Any, labels: Any) -> list[ObjectCertificate]:
        """A certificate for each object of a clean image: its box (left, top, right, bottom) and its class number."""
        _check_image(image)
        for box in Detections(boxes, labels, np.ones(len(labels))).boxes:
            _check_box(box, (image.shape[1], image.shape[2]))
        return self.examine(image, boxes, labels).certificates

    def examine(self, image: Tensor, boxes: Any, labels: Any) -> ObjectExamination:
        """Detections without and with the defense, and the certificates; nothing is computed twice."""
        objects = Detections(boxes, labels, np.ones(len(labels)))
        if not all(0 <= label < len(self.detector.classes) for label in objects.classes):
            raise LabelError(f"classes of objects go from 0 to {len(self.detector.classes) - 1}, got {list(labels)}")
        base, masked = self.undefended(image), self._masked(image)
        self._probe(image, base)
        numbers = Detections.concat([base, *masked]).classes
        if not all(0 <= number < len(self.detector.classes) for number in numbers):
            last = len(self.detector.classes) - 1
            raise OutputError(f"class numbers of a detector go from 0 to {last}, got {sorted({*numbers.tolist()})}")
        merged = self._merged(base, masked)
        promises = self.promises(objects, masked)
        return ObjectExamination(
            base,
            merged,
            best_coverage(objects, base),
            best_coverage(objects, merged),
            promises,
            self._certificates(objects, promises, (image.shape[1], image.shape[2])),
        )

    def promises(self, objects: Detections, masked: list[Detections]) -> NDArray[np.float64]:
        """[objects, masks]: the share of each object that the detections under each mask promise."""
        pairs = zip(objects.boxes, objects.classes, strict=True)
        shares = [[promised_coverage(part, box, label, prune=self.prune) for part in masked] for box, label in pairs]
        return np.array(shares, dtype=np.float64).reshape(len(objects), len(masked))

    def _certificates(self, objects: Detections, promises: NDArray[np.float64], size: Size) -> list[ObjectCertificate]:
        masks = self.mask_set(size)
        return [
            certify_object(masks, self.threat, pixel_window(box, size), int(label), shares)
            for box, label, shares in zip(objects.boxes, objects.classes, promises, strict=True)
        ]

    def _merged(self, base: Detections, masked: list[Detections]) -> Detections:
        return merge(base, masked, prune=self.prune)

    def undefended(self, image: Tensor) -> Detections:
        """The detections of one image without the defense."""
        return self._detections(image, self.score)

    def _masked(self, image: Tensor) -> list[Detections]:
        """The detections under each mask."""
        masks = self.mask_set((image.shape[1], image.shape[2])).masks
        return [self._detections(hidden(image, mask), self.masked_score) for mask in masks]

    def _detections(self, image: Tensor, score: float) -> Detections:
        _check_image(image)
        # Equal pixels take equal kernels, however they lay in memory. A copy, as a detector may write into its input:
        # what it makes of the whole image must not reach the images that masks are put on.
        pixels = image.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        with strict_float32(self.detector.device):
            detections = self.detector(pixels)
        if not isinstance(detections, Detections):
            got = type(detections).__name__
            raise OutputError(f"a detector returns Detections(boxes, classes, scores) of one image, got {got}")
        return detections.clipped((image.shape[1], image.shape[2])).above(score)

    def _probe(self, image: Tensor, base: Detections) -> None:
        """Refuse a detector that sees other boxes in the same image; tried once, with an image that has boxes."""
        again = base if self._probed else self.undefended(image)
        if not all(np.array_equal(getattr(again, column), getattr(base, column)) for column in COLUMNS):
            raise NotAFunctionError(
                "the same image got other boxes, classes or scores the second time; a certificate needs a function"
            )
        self._probed |= len(base) > 0


def _check_image(image: Any) -> None:
    """Raise ImageError unless it is one image."""
    if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != 3:
        got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ImageError(f"a detector takes one image, a tensor [3, height, width], got {got}")


def _check_box(box: NDArray[np.float64], size: Size) -> None:
    """Raise LabelError unless a true box lies in an image, at least with a part, and is in pixels."""
    numbers = box.tolist()
    if not areas(box[None])[0] > 0:
        raise LabelError(f"a box is left, top, right, bottom, with left < right and top < bottom; got {numbers}")
    if box.max() <= 1:
        raise LabelError(f"a box is in pixels, not in shares of the image of {size[0]}×{size[1]} px; got {numbers}")
    if not len(Detections(box, [0], [1.0]).clipped(size)):
        raise LabelError(f"the box {numbers} lies outside the image of {size[0]}×{size[1]} px")


def hidden(image: Tensor, mask: Mask) -> Tensor:
    """A copy of an image with the mask's pixels gray."""
    copy = image.clone()
    for window in mask:
        copy[(..., *window.slices)] = FILL
    return copy


def best_coverage(objects: Detections, boxes: Detections) -> NDArray[np.float64]:
    """[objects]: the largest share of each object that one box of its class covers; 0 without any."""
    same = objects.classes[:, None] == boxes.classes[None, :]
    shares: NDArray[np.float64] = (coverage(objects.boxes, by=boxes.boxes) * same).max(axis=1, initial=0.0)
    return shares
