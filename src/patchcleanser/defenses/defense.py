"""Defense: a classifier, a threat, and two verbs. What every defense promises, however it works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.load import as_classifier
from patchcleanser.core.geometry import Size
from patchcleanser.core.threats import Threat
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.errors import ImageError, LabelError, PatchCleanserError

V = TypeVar("V")
C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Examined(Generic[V, C]):
    """Everything about one labelled clean image."""

    verdict: V
    certificate: C
    size: Size
    """Of the image on the threat's grid."""
    undefended: int
    """What the classifier says without any defense."""


class Defense(ABC, Generic[V, C]):
    """Wraps a classifier so that patches of the threat lose their power."""

    may_alert = False
    """Whether a verdict may be an alert instead of a label."""

    def __init__(self, classifier: Any, threat: Threat) -> None:
        if not isinstance(threat, Threat):
            raise PatchCleanserError(f"a threat is made by Threat.square(32) or the like, got {type(threat).__name__}")
        self.classifier = as_classifier(classifier)
        self._threat = threat

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.classifier!r}, {self.threat})"

    @property
    def threat(self) -> Threat:
        """The patches defended against; fixed, since certificates are made for it."""
        return self._threat

    @property
    def fast(self) -> bool:
        """Whether labels are computed in a faster way than float32, and checked."""
        return False

    @abstractmethod
    def predict(self, images: Any) -> list[V]:
        """A verdict for each image; images are [N, C, H, W] in [0, 1], or an iterable of [C, H, W]."""

    @abstractmethod
    def certify(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> list[C]:
        """A certificate for each clean image with its true label; `maps` asks for the map of proved positions."""

    @abstractmethod
    def examine(self, images: Any, labels: Iterable[int], *, maps: bool = False) -> Sequence[Examined[V, C]]:
        """Verdict, certificate and undefended label of clean images, nothing computed twice."""

    @abstractmethod
    def check_size(self, size: Size) -> None:
        """Refuse, with the reason, what can never work on images of this size on the threat's grid."""

    def reset(self, seed: tuple[int, ...] | None = None) -> None:
        """Forget what earlier images taught, so that no batch's rows depend on the batches before it.

        `seed` decides which fast labels are audited; None: nobody can know beforehand.
        """

    def hint_total_images(self, images: int) -> None:
        """Say about how many images will come, after `ready`: what takes long to prepare is worth it for many only."""

    @abstractmethod
    def _outcome(self, verdict: V) -> int:
        """The class that `as_module` scores highest; -1 is a class of its own, the alert."""

    def to_threat_grid(self, image: Tensor) -> Tensor:
        """One checked image [C, H, W] on the device, prepared if the threat lives on the input grid."""
        pixels = image.to(self.classifier.device, non_blocking=image.is_pinned())
        if self.threat.grid == "source":
            return pixels
        with torch.inference_mode(), strict_float32(self.classifier.device):
            return self.classifier.prepare(pixels[None])[0]

    def as_module(self) -> nn.Module:
        """An nn.Module [N, C, H, W] in [0, 1] → scores whose argmax is the defended label.

        Scores are one-hot and carry no gradient. A defense that may raise an alert has one
        more column, the last, for it.
        """
        return DefendedModule(self)


class DefendedModule(nn.Module):
    """A defense as a module; see Defense.as_module."""

    def __init__(self, defense: Defense[Any, Any]) -> None:
        super().__init__()
        self.defense = defense

    def forward(self, images: Tensor) -> Tensor:
        """[N, C, H, W] in [0, 1] → one-hot scores [N, classes] on the images' device."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ImageError(f"a module takes a batch of images [N, C, H, W], got {got}")
        outcomes = [self.defense._outcome(verdict) for verdict in self.defense.predict(images)]
        classes = self.defense.classifier.classes or 0
        columns = classes + 1 if self.defense.may_alert else classes
        scores = torch.zeros(len(images), columns, device=images.device)
        index = torch.tensor(outcomes, device=images.device) % columns
        return scores.scatter_(1, index[:, None], 1.0)


def checked_labels(labels: Any) -> list[int]:
    """Class indices as a list of ints; what is none is refused."""
    labels = _plain(labels)
    if not isinstance(labels, Iterable):
        raise LabelError(f"labels are a list of class indices, one for each image, got {labels!r}")
    values = [_plain(value) for value in labels]
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise LabelError(f"a label is a class index (int), got {value!r} of type {type(value).__name__}")
    return [int(value) for value in values]


def counted_labels(images: Any, labels: Any) -> list[int]:
    """The labels, one for each image where the number of images can be told."""
    truths = checked_labels(labels)
    # A tensor of no axes has a __len__ that raises; what is wrong with it is said below.
    if hasattr(images, "__len__") and getattr(images, "shape", None) != () and len(images) != len(truths):
        raise LabelError(f"{len(truths)} labels for {len(images)} images")
    return truths


def each_labelled(things: Iterable[T], truths: Sequence[int], examine: Callable[[T, int], R]) -> list[R]:
    """What is found out about each thing with its label, as they come; there must be as many of both."""
    found: list[R] = []
    for thing in things:
        if len(found) == len(truths):
            raise LabelError(f"{len(truths)} labels for at least {len(found) + 1} images")
        found.append(examine(thing, truths[len(found)]))
    if len(found) != len(truths):
        raise LabelError(f"{len(truths)} labels for {len(found)} images")
    return found


def check_range(labels: Iterable[int], classes: int) -> None:
    """Refuse labels that the classifier has no class for."""
    for label in labels:
        if not 0 <= label < classes:
            raise LabelError(f"label {label} is out of range; the classifier has classes 0 to {classes - 1}")


def _plain(value: Any) -> Any:
    """Tensors and arrays, also of one number, as Python's numbers, whose types tell floats from class indices."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
