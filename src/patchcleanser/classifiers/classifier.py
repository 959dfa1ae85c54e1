"""Classifier: images in, logits out, always the same answer; and any Python function as one."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import ClassifierError, InputError, OutputError, first_line

ROUNDING = 1e-3
"""How far a probability may lie outside [0, 1]: half precision rounds so much."""

LOGGER = logging.getLogger("patchcleanser")

ENOUGH_SCORES = 32
"""Fewer scores may lie in [0, 1] by chance."""


class Classifier(ABC):
    """What a defense needs of a model. Subclasses give `logits` and `weights`.

    A classifier must be a function: the same input gives the same logits, whatever else is in
    the batch. `fingerprint` identifies everything that decides a label, so that stored labels are
    never mistaken for another model's.
    """

    dtype = torch.float32
    """The precision of the model's own arithmetic."""

    code = ""
    """A hash of the user's file that built the model, if one did: weights alone do not say what forward() does."""

    mask_aware = False
    """Whether the input has one more channel that is 1 where pixels are hidden.
    Logits may then depend on visible pixels and on that channel only."""

    names: tuple[str, ...] | None = None
    """The names of the classes, if they are known. They decide no label."""

    multi_label = ""
    """Why a defense of one label refuses it: its scores are those of classes that may hold together. Else empty."""

    probabilities = False
    """Whether a sigmoid has made probabilities of its scores, as far as can be seen."""

    threshold: float | None = None
    """Of a multi-label classifier, the logit from which on a class is present; None if one label is right."""

    spec: str | None = None
    """The string that loads this classifier, if `load_classifier` made it from one alone. It decides no label."""

    _scores_checked = False
    """Whether scores were looked at for a sigmoid or a softmax inside forward()."""

    def __init__(
        self,
        preprocessing: Preprocessing | None = None,
        *,
        classes: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
            raise InputError(
                f"preprocessing is Preprocessing(mean=…, std=…, resize=…), got {type(preprocessing).__name__}"
            )
        self.preprocessing = preprocessing or Preprocessing()
        self.classes = classes
        self.device = torch.device(device)

    @property
    def steady(self) -> bool:
        """Whether tensor shapes inside the model are the same for all pixels and masks.

        They are not where hidden tokens are dropped, or where values choose an expert.
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

    @property
    def sketch(self) -> str:
        """A fingerprint for this process, compared after each batch of a run; a subclass may have a faster one."""
        return self.fingerprint

    def require_one_label(self, use: str) -> None:
        """Raise ClassifierError if several labels may be right at once; `use` continues with: one label."""
        if self.threshold is not None:
            raise several_labels_error(use)
        if self.multi_label:
            raise ClassifierError(self.multi_label)

    def checked_logits(self, inputs: Tensor) -> Tensor:
        """Logits as float32 [N, classes], a copy; another shape is an OutputError."""
        logits = self.logits(inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(inputs):
            fix = "; wrap the model in a module that returns the tensor of logits alone"
            got = str(tuple(logits.shape)) if isinstance(logits, Tensor) else type(logits).__name__ + fix
            raise OutputError(f"the classifier must return logits [{len(inputs)}, classes], got {got}")
        if self.classes is None:
            self.classes = logits.shape[1]
        if logits.shape[1] != self.classes or self.classes < 2:
            want = f"{self.classes} classes" if self.classes > 1 else "at least 2 classes (for a sigmoid z: [-z, z])"
            raise OutputError(f"the classifier must return {want}, got {logits.shape[1]}")
        several = self.multi_label or self.threshold is not None
        if not (several or self._scores_checked) and logits.numel() >= ENOUGH_SCORES:
            self._scores_checked = True
            _warn_of_probabilities(logits)
        return logits.to(torch.float32, copy=True)  # a classifier may use its output again


class CallableClassifier(Classifier):
    """A function of prepared images [N, C, h, w] that returns scores [N, classes].

    With `array="numpy"` it gets float32 arrays, with `array="torch"` tensors on `device`.
    `outputs="probabilities"` (scikit-learn's predict_proba) takes their logarithm; a value outside [0, 1] counts as
    NaN, which is refused on clean images. A function has no weights to hash: give `fingerprint=` to store its labels.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        preprocessing: Preprocessing | None = None,
        *,
        array: Literal["numpy", "torch"] = "numpy",
        outputs: Literal["logits", "probabilities"] = "logits",
        classes: int | None = None,
        device: torch.device | str = "cpu",
        fingerprint: str | None = None,
    ) -> None:
        if array not in ("numpy", "torch") or outputs not in ("logits", "probabilities"):
            raise InputError(
                f"array is 'numpy' or 'torch' and outputs 'logits' or 'probabilities', got {array!r} and {outputs!r}"
            )
        super().__init__(preprocessing, classes=classes, device=device)
        self.function, self.array, self.outputs, self._name = function, array, outputs, fingerprint

    def logits(self, inputs: Tensor) -> Tensor:
        try:
            answer = self.function(inputs.cpu().numpy() if self.array == "numpy" else inputs)
            if isinstance(answer, dict | tuple):
                raise ValueError(f"it returned a {type(answer).__name__}; return the scores [N, classes] alone")
            scores = torch.as_tensor(answer)
        except Exception as error:  # it is the user's own code
            if is_out_of_memory(error):
                raise
            shape = f"float32 {self.array} images of shape {tuple(inputs.shape)}"
            raise OutputError(f"the function failed on {shape}: {first_line(error)}{self._hint(error)}") from error
        if self.outputs == "probabilities":
            shares = scores.double()
            outside = (shares < -ROUNDING) | (shares > 1 + ROUNDING)
            # Not an error: an attacker's image must not silence the classifier. Engines refuse NaN of clean images.
            scores = shares.clamp_min(np.finfo(np.float64).tiny).log().masked_fill(outside, torch.nan)
        return scores

    def _hint(self, error: Exception) -> str:
        """The end of a sentence about an error that a function of torch tensors raises if it gets arrays."""
        if self.array == "torch" or not isinstance(error, TypeError | AttributeError):
            return ""
        return '; for a function of torch tensors pass CallableClassifier(function, array="torch")'

    @property
    def weights(self) -> str:
        """The name that the user gave."""
        if self._name is None:
            raise ClassifierError(
                "a plain function has no weights to hash, so its labels cannot be stored safely; "
                "make it a CallableClassifier(…, fingerprint='a name that changes whenever the function does')"
            )
        return f"{self._name}:{self.array}:{self.outputs}"


def _warn_of_probabilities(logits: Tensor) -> None:
    """Warn of scores that a sigmoid or a softmax made: a last layer shows neither where forward() calls a function."""
    low, high = (float(value) for value in logits.aminmax())
    if not (low >= 0 and high <= 1):
        return
    if bool(((logits.float().sum(dim=1) - 1).abs() < 0.01).all()):
        text = "the scores of each image sum to 1, as after a softmax: labels are the same without it, but margins and "
        LOGGER.warning(text + "confidences are too small; take it out, or wrap a function with outputs='probabilities'")
        return
    LOGGER.warning(
        "all scores lie in [0, 1] and do not sum to 1, as after torch.sigmoid: if several labels may be right at once, "
        "use MultiLabelMasking with scores='probabilities'; if exactly one is, take the sigmoid out"
    )


def multi_label_reason(
    reason: str, fix: str = "take the sigmoid out (the order of the scores is the same without)"
) -> str:
    """Why a defense of one label refuses a multi-label model, and the ways on."""
    return (
        f"{reason}, so several labels may be right at once (multi-label), but this certificate speaks of one label for "
        f"each image; if several are right, use MultiLabelMasking (certify --task multilabel); if exactly one is, {fix}"
    )


def several_labels_error(use: str) -> ClassifierError:
    """Why a network whose card says that it is multi-label cannot be used for one label."""
    return ClassifierError(
        f"the network's card says that it is multi-label, but {use} one label for each image; "
        "use it in certify --task multilabel (in Python MultiLabelMasking)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might succeed; torch reports this in several ways, not all with their own type."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    phrases = ("out of memory", "failed to allocate memory", "can't allocate memory", "alloc_cpu")
    return any(phrase in str(error).lower() for phrase in phrases)


def padded_batch_size(number: int) -> int:
    """The batch size to pad `number` images to. Kernels are set up anew for each size, so there are only a few.

    Eight sizes for each doubling, so at most an eighth is wasted.

    >>> [padded_batch_size(n) for n in (1, 7, 17, 36, 37, 100, 512)]
    [1, 7, 18, 36, 40, 104, 512]
    """
    step = 1 << max(0, (number - 1).bit_length() - 4)
    return -(-number // step) * step
