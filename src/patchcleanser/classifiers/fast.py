"""Faster ways to nearly the same logits of a torch module; which of their labels to trust, `precision.py` says."""

from __future__ import annotations

import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchcleanser.classifiers.precision import half_type

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

EXPORTS = 2
"""A network is exported anew for each size of input; so many are kept."""


class Way(ABC):
    """A way to compute logits."""

    resolution: float
    """Differences between logits below this share of their size mean nothing."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] → float32 logits [N, classes]; UnusableError if this way is none here."""

    def renew(self) -> None:  # noqa: B027
        """Forget what may have become old; called whenever the way is compared with the exact one."""


class UnusableError(Exception):
    """This way does not work for this network."""


class Halved(Way):
    """Half precision by autocast: the network's own code, so whatever it does is done."""

    def __init__(self, classifier: TorchClassifier, half: torch.dtype) -> None:
        self.classifier, self.half = classifier, half
        self.resolution = torch.finfo(half).eps

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the module under autocast."""
        with torch.autocast(self.classifier.device.type, dtype=self.half):
            return self.classifier.checked_logits(inputs)


class Exported(Way):
    """The network through ONNX Runtime, on a CPU: as precise as float32 is, with other kernels and fused layers.

    The export follows the network's code once and refuses code that would branch on what is in an
    image, so it computes what the network does for every image, attacked ones too. If the network
    changes it is exported again: changed weights are noticed at once, other settings when it is
    compared with the network next.
    """

    resolution = torch.finfo(torch.float32).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier
        self._sessions: dict[tuple[int, ...], Any] = {}
        self._seen: list[tuple[int, int]] = []
        self._digest = ""

    def __getstate__(self) -> dict[str, Any]:
        """Sessions belong to this process; elsewhere the network is exported anew."""
        return {**vars(self), "_sessions": {}}

    def renew(self) -> None:
        """Export again if anything about the network is another."""
        if self._digest != (digest := self.classifier.weights):
            self._sessions, self._digest = {}, digest

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the exported network."""
        seen = [(tensor.data_ptr(), tensor._version) for tensor in self.classifier.module.state_dict().values()]
        if seen != self._seen:
            self._sessions, self._seen = {}, seen
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
    if half is not None:
        ways.append(Halved(classifier, half))
    exportable = not classifier.mask_aware and classifier.device.type == "cpu"
    if exportable and all(find_spec(name) for name in ("onnxruntime", "onnxscript")):
        ways.append(Exported(classifier))
    return ways


def _session(module: torch.nn.Module, inputs: Tensor) -> Any:
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
