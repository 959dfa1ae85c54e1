"""An ONNX model as a classifier, run by ONNX Runtime."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier, multi_label_reason
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import ClassifierError, InputError, MissingDependencyError


class OnnxClassifier(Classifier):
    """Wraps an .onnx file with one image input [N, C, h, w] whose first output is logits [N, classes].

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
        self.path = Path(path)
        self.session, self._weights = open_session(self.path, providers)
        if is_sigmoid(self.path.read_bytes(), self.session.get_outputs()[0].name):
            self.multi_label = multi_label_reason(f"the output of {self.path} comes from a Sigmoid")
            self.probabilities = True
        first = self.session.get_inputs()[0]
        self.input, self.dtype = first.name, torch.float16 if "float16" in first.type else torch.float32
        self.batch: int | None = first.shape[0] if isinstance(first.shape[0], int) else None

    def logits(self, inputs: Tensor) -> Tensor:
        array = inputs.cpu().to(self.dtype).numpy()
        if self.batch is None:
            return torch.from_numpy(self._run(array))
        padding = -len(array) % self.batch
        array = np.concatenate([array, np.repeat(array[-1:], padding, axis=0)]) if padding else array
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
        """A hash of the file and of its external data, as they were when the session started."""
        return self._weights


def open_session(path: Path, providers: list[str] | None = None, *, threads: int = 0) -> tuple[Any, str]:
    """An ONNX Runtime session of a file, and a hash of the file and its external data as the session read them.

    `threads` is the number of threads of one operator; 0 leaves the choice to ONNX Runtime.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError.of("onnxruntime", "onnx") from error
    if not path.is_file():
        raise InputError(f"no ONNX file at {path}")
    try:
        # Hashed now: the session goes on with what it read when the files are replaced.
        weights = _hash_files(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = providers or onnxruntime.get_available_providers()
        return onnxruntime.InferenceSession(path, options, providers=providers), weights
    except ClassifierError:
        raise
    except Exception as error:  # onnxruntime raises its own types for each cause
        raise ClassifierError(f"{path} is not a model ONNX Runtime can load: {error}") from error


def _hash_files(path: Path) -> str:
    model = path.read_bytes()
    digest = hashlib.sha256(model)
    for name in sorted(external_files(model)):
        if not (path.parent / name).resolve().is_relative_to(path.parent.resolve()):
            raise ClassifierError(f"{path} keeps weights in {name!r}, outside its own folder; put them beside it")
        if (path.parent / name).is_file():
            with (path.parent / name).open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
    return digest.hexdigest()


def external_files(model: bytes) -> set[str]:
    r"""The files a serialised ONNX model keeps tensors in, relative to its folder.

    Each such tensor has an entry with key "location" (field 1) and a file name (field 2),
    which is read without the onnx package, since ONNX Runtime does not need it either.

    >>> sorted(external_files(b"...\x0a\x08location\x12\x09model.bin..."))
    ['model.bin']
    """
    matches = re.finditer(rb"\x0a\x08location\x12" + LENGTH, model)
    return {model[match.end() : match.end() + _number(match[1])].decode(errors="replace") for match in matches}


def is_sigmoid(model: bytes, output: str) -> bool:
    r"""Whether a node of a serialised ONNX model makes this output by the operator Sigmoid.

    A node has outputs (field 2), usually a name (field 3), and the name of its operator (field 4), in this order.

    >>> is_sigmoid(b"...\x12\x01y\x1a\x04last\x22\x07Sigmoid...", "y")
    True
    """
    name = output.encode()
    matches = re.finditer(
        rb"\x12" + re.escape(bytes([min(len(name), 255)]) + name) + rb"(?:\x1a" + LENGTH + rb")?", model
    )
    ends = (match.end() + _number(match[1] or b"") for match in matches)
    return any(model.startswith(b"\x22\x07Sigmoid", end) for end in ends)


LENGTH = rb"([\x80-\xff]*[\x00-\x7f])"


def _number(digits: bytes) -> int:
    """Protocol buffers write a length as 7-bit digits, the smallest first."""
    return sum((digit & 127) << 7 * place for place, digit in enumerate(digits))
