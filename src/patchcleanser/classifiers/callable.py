"""Any Python function as a classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.base import Classifier, is_out_of_memory
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import ClassifierError, InputError, OutputError


class CallableClassifier(Classifier):
    """Wraps a function of prepared images [N, C, h, w] that returns scores [N, classes].

    With `array="numpy"` it is handed float32 arrays, with `array="torch"` tensors on `device`.
    `outputs="probabilities"` (scikit-learn's predict_proba) takes their logarithm. A function
    has no weights to hash: give `fingerprint=` if its labels are to be stored.
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
        """The function's scores as logits."""
        given: Any = inputs.cpu().numpy() if self.array == "numpy" else inputs
        try:
            scores = torch.as_tensor(self.function(given))
        except Exception as error:  # it is the user's own code
            if is_out_of_memory(error):
                raise
            shape = f"float32 {self.array} images of shape {tuple(inputs.shape)}"
            raise OutputError(f"the function failed on {shape}: {type(error).__name__}: {error}") from error
        if self.outputs == "probabilities":
            scores = scores.double().clamp_min(np.finfo(np.float64).tiny).log()
        return scores

    @property
    def weights(self) -> str:
        """The name the user gave."""
        if self._name is None:
            raise ClassifierError(
                "a plain function has no weights to hash, so its labels cannot be stored safely; "
                "make it a CallableClassifier(…, fingerprint='a name that changes whenever the function does')"
            )
        return f"{self._name}:{self.array}:{self.outputs}"
