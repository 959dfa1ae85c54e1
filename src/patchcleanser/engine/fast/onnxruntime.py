"""ONNX Runtime as a backend; and the cascades that there are for a torch module."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.engine.fast.backends import (
    AutocastBackend,
    Backend,
    DerivedBackend,
    UnusableError,
    half_type,
    own_copy,
)
from patchcleanser.engine.fast.float8.backend import Float8Backend
from patchcleanser.engine.fast.half import HalfPrecisionBackend
from patchcleanser.engine.fast.split import TripleTf32Backend
from patchcleanser.engine.float32 import pause_other_threads

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

RUN = 300_000
"""Input numbers per run of a thread: 2 images at 224×224, 97 at 32×32. With more, MobileNetV2 leaves the caches."""

EXPORTS = 2
"""A network is exported anew for each size of input; so many are kept."""


BODIES = frozenset({"If", "Loop", "Scan"})
DROPPING = frozenset({"Clip", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin", "Sign", "TopK", *BODIES})
"""Operations from which, in ONNX Runtime, a number may come though something that is none went in, or that hold others:
labels of such numbers are refused, or computed again, only if they are seen."""

TAME = frozenset(
    """Add AveragePool BatchNormalization Concat Constant Conv Expand Flatten Gather Gelu Gemm GlobalAveragePool
    HardSigmoid HardSwish Identity InstanceNormalization LayerNormalization MatMul Mul Pad Range ReduceMean
    ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Squeeze Sub Tanh Transpose Unsqueeze""".split()  # noqa: SIM905
)
"""Operations that make numbers of numbers: behind these alone nothing has to come through the ones above."""


class OnnxRuntimeBackend(DerivedBackend):
    """The network through ONNX Runtime, on a CPU: as precise as float32 is, with other kernels and fused layers.

    The export follows the network's code once and refuses code that would branch on what is in an
    image, so it computes what the network does for every image, attacked ones too.
    """

    resolution = torch.finfo(torch.float32).eps
    chunks = 4

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self._sessions: dict[tuple[int, ...], _Session] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Sessions belong to this process; elsewhere the network is exported anew."""
        return {**super().__getstate__(), "_sessions": {}}

    def release(self) -> None:
        """Drop the sessions."""
        self._sessions = {}

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the exported network."""
        self._check_unchanged()
        size = tuple(inputs.shape[1:])
        if size not in self._sessions:
            if len(self._sessions) == EXPORTS:
                self._sessions.pop(next(iter(self._sessions)))
            with self._copied() as network:
                session = _session(network, inputs[:1].clone(), len(inputs))
            _require_tame(session.kinds)
            self._sessions[size] = session
        return self._answered(self._sessions[size], inputs)

    @contextmanager
    def _copied(self) -> Iterator[nn.Module]:
        """A copy for the exporter, which leaves things of its own in what it follows; no inference tensors.

        What cannot be copied is followed itself.
        """
        with torch.inference_mode(False), torch.no_grad():
            network = self.classifier.module
            with suppress(UnusableError):
                network = own_copy(self.classifier, lambda module: module.requires_grad_(False)).module
            yield network

    def _answered(self, session: _Session, inputs: Tensor) -> Tensor:
        logits = session.logits(inputs)
        if logits.shape != (len(inputs), self.classifier.classes or logits.shape[-1]):
            raise UnusableError(f"the exported network gave logits {tuple(logits.shape)}")
        return logits


def candidates_for(classifier: TorchClassifier) -> list[list[Backend]]:
    """The cascades that may pay for a network on its device, the fastest first; none changes the network."""
    if classifier.dtype != torch.float32:
        return []
    candidates: list[list[Backend]] = []
    half = half_type(classifier.device)
    if half is not None and classifier.device.type == "cuda":
        capability = torch.cuda.get_device_capability(classifier.device)
        copied = HalfPrecisionBackend(classifier)
        refined: list[Backend] = [copied, *([TripleTf32Backend(classifier)] if capability >= (8, 0) else [])]
        if capability >= (8, 9) and classifier.steady:
            candidates.append([Float8Backend(classifier, copied), *refined])
        candidates.append(refined)
    if half is not None:
        candidates.append([AutocastBackend(classifier, half)])
    exportable = classifier.steady and classifier.device.type == "cpu"
    if exportable and all(find_spec(name) for name in ("onnxruntime", "onnxscript")):
        candidates.append([OnnxRuntimeBackend(classifier)])
    return candidates


class _Session(NamedTuple):
    """A session of ONNX Runtime, whose threads work on images of their own, or all on one batch if `together`."""

    session: Any
    threads: int
    together: bool
    kinds: frozenset[str]
    """Of its operations."""

    def logits(self, inputs: Tensor) -> Tensor:
        """Of inputs [N, …]."""
        array = inputs.contiguous().numpy()
        try:
            return torch.from_numpy(self._run(array) if self.together else self._in_turns(array))
        except Exception as error:  # onnxruntime has kinds of its own, which no other code knows
            if is_out_of_memory(error):
                raise
            raise UnusableError(f"ONNX Runtime failed on inputs {array.shape}: {error}") from error

    def _in_turns(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """Threads that work apart take the next few images as soon as they are done with their last."""
        parts = self.threads * -(-array.size // (RUN * self.threads))  # every thread has as much to do
        with ThreadPoolExecutor(self.threads) as pool:
            return np.concatenate(list(pool.map(self._run, np.array_split(array, min(len(array), parts)))))

    def _run(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.session.run(None, {"x": array})[0]
        return logits


def _session(module: nn.Module, inputs: Tensor, number: int) -> _Session:
    """An ONNX Runtime session of the module for inputs of this size, and about so many at a time.

    Threads that work on images of their own do not wait for each other at every layer, nor, spinning, keep torch's
    from working. If several chunks like the one it is made for have an image for each of them, that is how they work.
    """
    import onnxruntime

    free = {0: torch.export.Dim("number", min=1, max=1 << 20)}
    example = inputs[:1].expand(2, *inputs.shape[1:]).contiguous()  # a batch of one would be taken for fixed
    file = io.BytesIO()
    try:
        with pause_other_threads(), _quiet():
            program: Any = torch.onnx.export(
                module, (example,), input_names=["x"], dynamic_shapes=(free,), dynamo=True, verbose=False
            )
            program.save(file)
        graphs = [program.model.graph, *program.model.functions.values()]
        kinds = frozenset(node.op_type for graph in graphs for node in graph)
        options = onnxruntime.SessionOptions()
        threads = torch.get_num_threads()
        together = number * OnnxRuntimeBackend.chunks < threads
        options.intra_op_num_threads = threads if together else 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # torch.export, onnxscript and onnxruntime have dozens of kinds
        raise UnusableError(f"{type(module).__name__} cannot be exported: {error}") from error
    return _Session(session, threads, together, kinds)


def _require_tame(kinds: frozenset[str]) -> None:
    wild = kinds - TAME - DROPPING
    if kinds & BODIES or (wild and kinds & DROPPING):
        raise UnusableError(
            f"what {', '.join(sorted(wild or BODIES))} makes of numbers might not come through "
            f"{', '.join(sorted(kinds & DROPPING))} in ONNX Runtime"
        )


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
