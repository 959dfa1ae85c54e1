"""An ONNX model as a classifier, run by ONNX Runtime."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import ClassifierError, InputError, MissingDependencyError


class OnnxClassifier(Classifier):
    """Wraps an .onnx file with one image input [N, C, h, w] and logits [N, classes] first.

    `providers` are ONNX Runtime's, in order of preference; by default all that are installed.
    A model exported for a fixed batch size is fed in batches of that size.
    """

    def __init__(
        self,
        path: str | Path,
        preprocessing: Preprocessing | None = None,
        *,
        classes: int | None = None,
        providers: list[str] | None = None,
    ) -> None:
        super().__init__(preprocessing, classes=classes)
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError.of("onnxruntime", "onnx") from error
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"no ONNX file at {self.path}")
        try:
            self.session = onnxruntime.InferenceSession(
                self.path, providers=providers or onnxruntime.get_available_providers()
            )
        except Exception as error:  # onnxruntime raises its own types for each cause
            raise ClassifierError(f"{self.path} is not a model ONNX Runtime can load: {error}") from error
        first = self.session.get_inputs()[0]
        self.input, self.dtype = first.name, np.float16 if "float16" in first.type else np.float32
        self.batch: int | None = first.shape[0] if isinstance(first.shape[0], int) else None

    def logits(self, inputs: Tensor) -> Tensor:
        """The first output of the session."""
        array = inputs.cpu().numpy().astype(self.dtype)
        if self.batch is None:
            return torch.from_numpy(self._run(array))
        short = -len(array) % self.batch
        array = np.concatenate([array, np.repeat(array[-1:], short, axis=0)]) if short else array
        parts = [self._run(array[i : i + self.batch]) for i in range(0, len(array), self.batch)]
        return torch.from_numpy(np.concatenate(parts)[: len(inputs)])

    def _run(self, array: Any) -> Any:
        try:
            return self.session.run(None, {self.input: array})[0]
        except Exception as error:
            if "alloc" in str(error).lower():
                raise MemoryError(str(error)) from error
            want = self.session.get_inputs()[0].shape
            raise ClassifierError(f"the ONNX model takes {want}, got {array.shape}: {error}") from error

    @property
    def weights(self) -> str:
        """A hash of the file and of the external data beside it."""
        digest = hashlib.sha256(self.path.read_bytes())
        external = self.path.with_name(self.path.name + ".data")
        if external.is_file():
            digest.update(external.read_bytes())
        return digest.hexdigest()
