"""Defense: a classifier, a threat, predict and certify. What every defense promises, however it works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.preprocessing import AnyImages
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.data.dataset import class_index
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.errors import ImageError, InputError, LabelError, did_you_mean
from patchcleanser.progress import tracked

VerdictT = TypeVar("VerdictT")
CertificateT = TypeVar("CertificateT")
T = TypeVar("T")
R = TypeVar("R")


def _naming_the_class(init: Callable[..., None]) -> Callable[..., None]:
    """The same __init__, but an error about its arguments names the class that the user wrote, and the fix."""
    call = signature(init)

    @wraps(init)
    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            call.bind(self, *arguments, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}{_hint(type(self), options)}") from None
        init(self, *arguments, **options)

    return checked


def _hint(kind: type[Any], options: Iterable[str]) -> str:
    """The end of a sentence about arguments that do not fit a class."""
    calls = [signature(vars(parent)["__init__"]) for parent in kind.__mro__[:-1] if "__init__" in vars(parent)]
    named = {name: entry for call in calls for name, entry in call.parameters.items()}  # it may pass **options on
    wrong = [name for name in options if name not in named]
    if wrong:
        own = [name for name, entry in named.items() if entry.kind is Parameter.KEYWORD_ONLY]
        return did_you_mean(wrong[0], named) or f"; its options are {', '.join(own) or 'none'}"
    return "; write classifier, threat and then options by name, as (network, '2%', masks=6)"


@dataclass(frozen=True)
class Examination(Generic[VerdictT, CertificateT]):
    """Everything about one labelled clean image."""

    verdict: VerdictT
    certificate: CertificateT
    size: Size
    """Of the image on the threat's grid."""
    undefended: int
    """The label of the undefended classifier."""


class Defense(ABC, Generic[VerdictT, CertificateT]):
    """Wraps a classifier so that patches of the threat lose their power.

    A verdict has a `label`, and `alert` if the defense may raise one. Images are [N, C, H, W] in [0, 1], or an
    iterable of [C, H, W] or of PIL images.
    """

    may_alert = False
    """Whether a verdict may be an alert instead of a label."""
    multi_label = False
    """Whether it defends multi-label classifiers."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _naming_the_class(cls.__init__)  # type: ignore[method-assign]

    @_naming_the_class
    def __init__(self, classifier: AnyClassifier, threat: AnyThreat) -> None:
        self._threat = Threat.of(threat)
        self.classifier = as_classifier(classifier)
        if not self.multi_label:
            self.classifier.require_one_label(f"{type(self).__name__} certifies")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.classifier!r}, {self.threat})"

    @property
    def threat(self) -> Threat:
        """The patches defended against; fixed, since certificates are made for it."""
        return self._threat

    @property
    def fast(self) -> bool:
        """Whether labels may come from a backend that is faster than float32."""
        return False

    @abstractmethod
    def predict(self, images: AnyImages, *, progress: bool | None = False) -> list[VerdictT]:
        """A verdict for each image. `progress` shows a bar; None does so on a terminal and in a notebook."""

    def certify(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = None
    ) -> list[CertificateT]:
        """A certificate for each clean image with its true label; `maps` asks for the map of proved positions.

        `progress` shows a bar; by default it does so on a terminal and in a notebook.
        """
        return [exam.certificate for exam in self.examine(images, labels, maps=maps, progress=progress)]

    @abstractmethod
    def examine(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = False
    ) -> Sequence[Examination[VerdictT, CertificateT]]:
        """Verdict, certificate and undefended label of clean images; nothing is computed twice."""

    @abstractmethod
    def check_size(self, size: Size) -> None:
        """Raise, with the reason, if images of this size on the threat's grid can never be defended."""

    def reset(self, seed: tuple[int, ...] | None = None) -> None:
        """Forget what was learnt from earlier images, so that rows of a batch do not depend on batches before it.

        `seed` decides which fast labels are audited; None draws a seed that nobody can know beforehand.
        """

    def hint_total_images(self, images: int) -> None:
        """Say about how many images will come, after `check_size`: slow preparations pay only for many."""

    def to_threat_grid(self, image: Tensor) -> Tensor:
        """One checked image [C, H, W] on the device, prepared if the threat lives on the input grid."""
        pixels = image.to(self.classifier.device, non_blocking=image.is_pinned())
        if self.threat.grid == "source":
            return pixels
        with torch.inference_mode(), strict_float32(self.classifier.device):
            return self.classifier.prepare(pixels[None])[0]

    def columns(self, verdict: VerdictT) -> Sequence[int]:
        """The columns of `as_module` that are 1 for a verdict."""
        return [-1 if getattr(verdict, "alert", False) else verdict.label]  # type: ignore[attr-defined]

    def as_module(self) -> nn.Module:
        """An nn.Module [N, C, H, W] in [0, 1] → scores whose argmax is the defended label.

        Scores are one-hot and have no gradient: `backward()` raises, and AdaptiveAttack attacks the defense instead.
        A defense that may raise an alert has one more column for it, the last. A defense of several labels has ones
        for all that are present.
        """
        return DefendedModule(self)


class DefendedModule(nn.Module):
    """A defense as a module; see Defense.as_module."""

    def __init__(self, defense: Defense[Any, Any]) -> None:
        super().__init__()
        self.defense = defense

    def extra_repr(self) -> str:
        return repr(self.defense)

    def forward(self, images: Tensor) -> Tensor:
        """[N, C, H, W] in [0, 1] → one-hot scores [N, classes] on the images' device."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ImageError(f"a module takes a batch of images [N, C, H, W], got {got}")
        verdicts = self.defense.predict(images)
        scores = torch.zeros(len(images), (self.defense.classifier.classes or 0) + self.defense.may_alert)
        for row, verdict in zip(scores, verdicts, strict=True):
            row[list(self.defense.columns(verdict))] = 1.0
        scores = scores.to(images.device)
        if not (images.requires_grad and torch.is_grad_enabled()):
            return scores
        without: Tensor = NoGradient.apply(images, scores)
        return without


class NoGradient(torch.autograd.Function):
    """Says why there is no gradient, where torch would say that a tensor does not require grad."""

    @staticmethod
    def forward(context: Any, images: Tensor, scores: Tensor) -> Tensor:
        return scores

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        raise InputError(
            "a defended label has no gradient; attack with patchcleanser.attacks.AdaptiveAttack(defense), or with the "
            "gradients of defense.classifier"
        )


def checked_labels(images: AnyImages, labels: Any) -> list[int]:
    """Class indices as ints; raise LabelError if they are none, or not one for each image that can be counted."""
    labels = labels.tolist() if hasattr(labels, "tolist") else labels  # whose types tell floats from class indices
    if not isinstance(labels, Iterable) or isinstance(labels, Mapping | Set):
        raise LabelError(f"labels are a list of class indices, one for each image, got {labels!r}")
    values = [class_index(value) for value in labels]
    number = number_of(images)
    if number is not None and number != len(values):
        raise LabelError(f"{counted(len(values), 'label')} for {counted(number, 'image')}")
    return values


def number_of(images: Any) -> int | None:
    """How many images there are, if they can be counted."""
    # A tensor of no axes has a __len__ that raises; checked_images refuses it.
    return len(images) if hasattr(images, "__len__") and getattr(images, "shape", None) != () else None


def examine_each(
    defense: Defense[Any, Any],
    prepared: Iterable[T],
    labels: list[int],
    examine: Callable[[T, int], R],
    *,
    maps: bool,
    progress: bool | None,
) -> list[R]:
    """Examine prepared images one by one with their labels, for defenses that have no map of positions."""
    if maps:
        raise InputError(f"{type(defense).__name__} has no map of positions; leave out maps=")
    results: list[R] = []
    for image in tracked(prepared, "certify", progress, total=len(labels)):
        if len(results) == len(labels):
            raise LabelError(f"{counted(len(labels), 'label')} for at least {counted(len(results) + 1, 'image')}")
        results.append(examine(image, labels[len(results)]))
    if len(results) != len(labels):
        raise LabelError(f"{counted(len(labels), 'label')} for {counted(len(results), 'image')}")
    return results


def check_range(labels: Iterable[int], classes: int) -> None:
    """Raise LabelError for a label that the classifier has no class for."""
    for label in labels:
        if not 0 <= label < classes:
            raise LabelError(f"label {label} is out of range; the classifier has classes 0 to {classes - 1}")
