"""The faster ways there are for a torch module, ONNX Runtime's among them; whom to trust, `precision.py` says."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.copied import Copied
from patchcleanser.classifiers.precision import half_type
from patchcleanser.classifiers.split import Split
from patchcleanser.classifiers.ways import Derived, Halved, UnusableError, Way

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

EXPORTS = 2
"""A network is exported anew for each size of input; so many are kept."""


class Exported(Derived):
    """The network through ONNX Runtime, on a CPU: as precise as float32 is, with other kernels and fused layers.

    The export follows the network's code once and refuses code that would branch on what is in an
    image, so it computes what the network does for every image, attacked ones too.
    """

    resolution = torch.finfo(torch.float32).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self._sessions: dict[tuple[int, ...], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Sessions belong to this process; elsewhere the network is exported anew."""
        return {**super().__getstate__(), "_sessions": {}}

    def forget(self) -> None:
        """Drop the sessions."""
        self._sessions = {}

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the exported network."""
        self._follow()
        size = tuple(inputs.shape[1:])
        if size not in self._sessions:
            if len(self._sessions) == EXPORTS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[size] = _session(self.classifier.module, inputs)
        logits = torch.from_numpy(self._sessions[size].run(None, {"x": inputs.contiguous().numpy()})[0])
        if logits.shape != (len(inputs), self.classifier.classes or logits.shape[-1]):
            raise UnusableError(f"the exported network gave logits {tuple(logits.shape)}")
        return logits


def ways_of(classifier: TorchClassifier) -> list[Way]:
    """The ways that may pay for a network on its device, the fastest first; none changes the network."""
    if classifier.dtype != torch.float32:
        return []
    ways: list[Way] = []
    half = half_type(classifier.device)
    if half is not None and classifier.device.type == "cuda":
        ways.append(Copied(classifier, finer=_finer(classifier)))
    if half is not None:
        ways.append(Halved(classifier, half))
    exportable = classifier.steady and classifier.device.type == "cpu"
    if exportable and all(find_spec(name) for name in ("onnxruntime", "onnxscript")):
        ways.append(Exported(classifier))
    return ways


def _finer(classifier: TorchClassifier) -> Way | None:
    """Float32's products in pieces, where a GPU has fast ones for the pieces."""
    has_tf32 = torch.cuda.get_device_capability(classifier.device) >= (8, 0)
    return Split(classifier) if has_tf32 else None


def _session(module: nn.Module, inputs: Tensor) -> Any:
    """An ONNX Runtime session of the module for inputs of this size, in any number."""
    import onnxruntime

    number = torch.export.Dim("number", min=1, max=1 << 20)
    example = inputs[:1].expand(2, *inputs.shape[1:]).contiguous()  # a batch of one would be taken for fixed
    file = io.BytesIO()
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                module, (example,), input_names=["x"], dynamic_shapes=({0: number},), dynamo=True, verbose=False
            )
            program.save(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # torch.export, onnxscript and onnxruntime have dozens of kinds
        raise UnusableError(f"{type(module).__name__} cannot be exported: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what exporters print, warn and log away from whoever only asked for labels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
