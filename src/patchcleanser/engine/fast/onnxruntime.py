"""ONNX Runtime as a backend, for CPUs."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.engine.fast.backends import Backend, UnusableError, own_copy
from patchcleanser.engine.float32 import pause_other_threads

RUN_NUMEL = 300_000
"""Input numbers per run of a thread: 2 images at 224×224, 97 at 32×32. With more, MobileNetV2 leaves the caches."""

EXPORTS = 2
"""How many exports are kept: a network is exported for each size of input."""

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
NAN_DROPPING = frozenset({"Clip", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin", "Sign", "TopK", *CONTROL_FLOW})
"""Operators of ONNX Runtime that may turn NaN into a number, or hold others that do. A NaN that is lost on the way can
neither be refused nor computed again."""

NAN_FREE = frozenset(
    """Add AveragePool BatchNormalization Concat Constant Conv Expand Flatten Gather Gelu Gemm GlobalAveragePool
    HardSigmoid HardSwish Identity InstanceNormalization LayerNormalization MatMul Mul Pad Range ReduceMean
    ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Squeeze Sub Tanh Transpose Unsqueeze""".split()  # noqa: SIM905
)
"""Operators that make no NaN of numbers: behind these alone, the ones above are harmless."""


class OnnxRuntimeBackend(Backend):
    """The network through ONNX Runtime, on a CPU: as precise as float32, with other kernels and fused layers.

    The export traces the network's code once and refuses code that branches on pixel values, so it computes what the
    network does for every image, attacked ones too.
    """

    resolution = torch.finfo(torch.float32).eps
    chunks = 4

    def logits(self, inputs: Tensor) -> Tensor:
        self._check_unchanged()
        sessions: dict[tuple[int, ...], _Session]
        sessions = self._built = self._built or {}
        size = tuple(inputs.shape[1:])
        if size not in sessions:
            if len(sessions) == EXPORTS:
                sessions.pop(next(iter(sessions)))
            sessions[size] = self._export(inputs)
        logits = sessions[size].logits(inputs)
        if logits.shape != (len(inputs), self.classifier.classes or logits.shape[-1]):
            raise UnusableError(f"the exported network gave logits {tuple(logits.shape)}")
        return logits

    def _export(self, inputs: Tensor) -> _Session:
        """Export a copy, since exporters leave attributes in what they trace; the network itself if it has no copy."""
        with torch.inference_mode(False), torch.no_grad():
            network = self.classifier.module
            with suppress(UnusableError):
                network = own_copy(self.classifier, lambda module: module.requires_grad_(False)).module
            return _session(network, inputs[:1].clone(), len(inputs))


class _Session(NamedTuple):
    """A session of ONNX Runtime: each of its threads has images of its own, or all share a batch if `together`."""

    session: Any
    threads: int
    together: bool

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of inputs [N, …]."""
        array = inputs.contiguous().numpy()
        try:
            return torch.from_numpy(self._run(array) if self.together else self._run_parts(array))
        except Exception as error:  # onnxruntime has exception types of its own
            if is_out_of_memory(error):
                raise
            raise UnusableError(f"ONNX Runtime failed on inputs {array.shape}: {error}") from error

    def _run_parts(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """Each thread takes the next few images as soon as it is done with its last."""
        parts = self.threads * -(-array.size // (RUN_NUMEL * self.threads))  # every thread has as much to do
        with ThreadPoolExecutor(self.threads) as pool:
            return np.concatenate(list(pool.map(self._run, np.array_split(array, min(len(array), parts)))))

    def _run(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.session.run(None, {"x": array})[0]
        return logits


def _session(module: nn.Module, inputs: Tensor, number: int) -> _Session:
    """An ONNX Runtime session of the module for inputs of this size, about so many at a time.

    Threads with images of their own neither wait for each other at every layer nor, spinning, keep torch's threads from
    working. That is how they work if several such chunks have an image for each of them.
    """
    import onnxruntime

    batch = {0: torch.export.Dim("number", min=1, max=1 << 20)}
    example = inputs[:1].expand(2, *inputs.shape[1:]).contiguous()  # a batch of one would be taken for fixed
    file = io.BytesIO()
    try:
        with pause_other_threads(), _quiet():
            program: Any = torch.onnx.export(
                module, (example,), input_names=["x"], dynamic_shapes=(batch,), dynamo=True, verbose=False
            )
            program.save(file)
        graphs = [program.model.graph, *program.model.functions.values()]
        operators = frozenset(node.op_type for graph in graphs for node in graph)
        options = onnxruntime.SessionOptions()
        threads = torch.get_num_threads()
        together = number * OnnxRuntimeBackend.chunks < threads
        options.intra_op_num_threads = threads if together else 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # torch.export, onnxscript and onnxruntime have dozens of exception types
        raise UnusableError(f"{type(module).__name__} cannot be exported: {error}") from error
    _require_nan_kept(operators)
    return _Session(session, threads, together)


def _require_nan_kept(operators: frozenset[str]) -> None:
    unknown = operators - NAN_FREE - NAN_DROPPING
    if operators & CONTROL_FLOW or (unknown and operators & NAN_DROPPING):
        raise UnusableError(
            f"NaN made by {', '.join(sorted(unknown or CONTROL_FLOW))} might be lost in "
            f"{', '.join(sorted(operators & NAN_DROPPING))} of ONNX Runtime"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what exporters print, warn and log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
