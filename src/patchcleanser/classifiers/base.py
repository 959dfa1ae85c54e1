"""The Classifier protocol: images in, logits out, always the same answer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import OutputError


class Classifier(ABC):
    """What a defense needs of a model. Subclasses say how to get logits and what they are.

    A classifier must be a function: the same input gives the same logits, whatever else is in
    the batch. `fingerprint` names everything that decides a label, so that stored labels are
    never mistaken for another model's.
    """

    dtype = torch.float32
    """The precision of the model's own arithmetic."""

    code = ""
    """A hash of the user's own file that made it, if one did: weights alone do not say what forward() does."""

    mask_aware = False
    """Whether it is told which pixels are hidden, as one more channel of the input (1 where hidden).
    Its logits may depend on visible pixels and on that channel only."""

    names: tuple[str, ...] | None = None
    """What the classes are called, if that is known. Names decide nothing."""

    def __init__(
        self,
        preprocessing: Preprocessing | None = None,
        *,
        classes: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.preprocessing = preprocessing or Preprocessing()
        self.classes = classes
        self.device = torch.device(device)

    @property
    def steady(self) -> bool:
        """Whether tensors inside have the same shapes whatever the pixels are and masks hide.

        Not so where hidden tokens are dropped, or where an image's own numbers choose an expert.
        """
        return not self.mask_aware

    def prepare(self, images: Tensor) -> Tensor:
        """[N, C, H, W] in [0, 1] → the model's input: resized, cropped, normalised."""
        return self.preprocessing(images)

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] on `device` → logits [N, classes]."""

    @property
    @abstractmethod
    def weights(self) -> str:
        """A hash of the weights and the structure of the model."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(classes={self.classes}, device={self.device})"

    @property
    def fingerprint(self) -> str:
        """A hash of the weights, the structure and the preprocessing."""
        parts = [type(self).__name__, self.weights, repr(self.preprocessing), *([self.code] if self.code else [])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def checked_logits(self, inputs: Tensor) -> Tensor:
        """Logits as float32 [N, classes], a copy; another shape is an OutputError."""
        logits = self.logits(inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(inputs):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise OutputError(f"the classifier must return logits [{len(inputs)}, classes], got {got}")
        if self.classes is None:
            self.classes = logits.shape[1]
        if logits.shape[1] != self.classes or self.classes < 2:
            want = f"{self.classes}" if self.classes > 1 else "at least 2 (for a sigmoid z, return [-z, z])"
            raise OutputError(f"the classifier must return {want} classes, got {logits.shape[1]}")
        return logits.to(torch.float32, copy=True)  # a classifier may use its output again


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might succeed; torch says so in several ways, not all with a type of their own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return (
        "out of memory" in text
        or "failed to allocate memory" in text
        or "can't allocate memory" in text
        or "alloc_cpu" in text
    )


def rounded(number: int) -> int:
    """The batch size used for so many images: kernels are made anew for each size, so there are only a few.

    Eight sizes for each doubling, so at most an eighth is wasted.

    >>> [rounded(n) for n in (1, 7, 17, 36, 37, 100, 512)]
    [1, 7, 18, 36, 40, 104, 512]
    """
    step = 1 << max(0, (number - 1).bit_length() - 4)
    return -(-number // step) * step
