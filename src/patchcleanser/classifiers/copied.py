"""A half-precision copy of a network on a GPU: compiled blocks for many labels, CUDA graphs for few."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchcleanser.classifiers.precision import long_sums, tuned
from patchcleanser.classifiers.rewrites import ChannelwiseGroupNorm, rewritten
from patchcleanser.classifiers.ways import Derived, UnusableError, Way, own_copy
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

GRAPHED = 64
GRAPH_AFTER = 2
GRAPHS = 8
"""Batches up to this size are recorded as CUDA graphs when their shape has come so often; so many graphs are kept."""

SHAPES = 256
"""Shapes that are counted: whoever sends images of every size must not fill the memory."""

BLOCK_NUMBERS = 50_000_000
"""Numbers in a block of inputs for a GPU: 328 images at 224×224. With twice as many a ViT-B takes 7% longer."""

COMPILING = 40.0
SAVED = {True: 0.35, False: 0.1}
"""Seconds that compiling takes, and the share of the time it saves, with and without layers that normalise whole
images channel by channel: fusing these is most of what a compiler can do (measured on an H200: ResNets 40%, ViT 7%)."""

COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {"conv_1x1_as_mm": True}
"""Most products of a ResNet are convolutions of single pixels; as products of matrices they take less time."""

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels for attention, the quickest first; where one does not fit, the next is taken."""


class Copied(Derived):
    """A half-precision copy of the network, on a GPU, with known layers written anew for it.

    Small batches, as `predict` asks for, are recorded once as a CUDA graph and played back. Large ones are cut into
    blocks of one size; if so many labels are expected that it pays, the copy is compiled for that block.
    """

    resolution = torch.finfo(torch.float16).eps
    blocks = True

    def __init__(self, classifier: TorchClassifier, finer: Way | None = None) -> None:
        super().__init__(classifier)
        self.finer = finer
        self._fill = False
        self._copy: TorchClassifier | None = None
        self._graphs: dict[tuple[int, ...], _Graph | int] = {}
        self._block: _Block | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process."""
        return {**super().__getstate__(), "_copy": None, "_graphs": {}, "_block": None}

    def forget(self) -> None:
        """Drop the copy and what was recorded and compiled of it."""
        self._copy, self._graphs, self._block = None, {}, None
        if self.finer is not None:
            self.finer.forget()

    @contextmanager
    def whole_blocks(self) -> Iterator[None]:
        """Batches are filled up to whole blocks, by their own images again and again."""
        self._fill = True
        try:
            yield
        finally:
            self._fill = False

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy."""
        self._follow()
        self.expected -= len(inputs)
        if self._copy is None:
            self._copy = own_copy(self.classifier, _half)
            self._copy.dtype = torch.float16
        try:
            # Whatever precision the program chose around it, the copy's is its own.
            with (
                torch.autocast(inputs.device.type, enabled=False),
                sdpa_kernel(ATTENTION, set_priority=True),
                long_sums(),
            ):
                return self._computed(self._copy, inputs)
        except OutputError as error:  # some networks do not bear another precision
            raise UnusableError(f"{type(self.classifier.module).__name__} does not work in float16") from error

    def _computed(self, copied: TorchClassifier, inputs: Tensor) -> Tensor:
        if not self.classifier.steady or inputs.device.type != "cuda":
            return copied.checked_logits(inputs)
        size = block_size(inputs[0].numel())
        if self._fill and len(inputs) % size:
            again = torch.arange(-(-len(inputs) // size) * size, device=inputs.device) % len(inputs)
            return self._computed(copied, inputs[again])[: len(inputs)]
        if len(inputs) <= GRAPHED:
            return self._played(copied, inputs)
        if len(inputs) < size:
            return copied.checked_logits(inputs)
        if self._block is None or self._block.shape != (size, *inputs.shape[1:]):
            self._block = _Block(copied, inputs[:size], self.expected)
        whole = len(inputs) // size * size
        done = [self._block(inputs[at : at + size]) for at in range(0, whole, size)]
        rest = [copied.checked_logits(inputs[whole:])] if whole < len(inputs) else []
        return torch.cat([*done, *rest])

    def _played(self, copied: TorchClassifier, inputs: Tensor) -> Tensor:
        """Logits of a small batch; once its shape has come a few times, from a CUDA graph."""
        shape = tuple(inputs.shape)
        if len(self._graphs) >= SHAPES:
            self._graphs = {kept: graph for kept, graph in self._graphs.items() if isinstance(graph, _Graph)}
        state = self._graphs.setdefault(shape, 0)
        if isinstance(state, _Graph):
            return state(inputs)
        if state == GRAPH_AFTER and sum(isinstance(graph, _Graph) for graph in self._graphs.values()) < GRAPHS:
            with suppress(OutputError, RuntimeError):  # a network that waits for its own numbers cannot be recorded
                self._graphs[shape] = graph = _Graph(copied, inputs)
                return graph(inputs)
        self._graphs[shape] = state + 1
        return copied.checked_logits(inputs)


class _Graph:
    """One forward pass of one shape as a CUDA graph: a GPU plays it back without waiting for Python."""

    def __init__(self, copied: TorchClassifier, inputs: Tensor) -> None:
        self._lock = threading.Lock()
        self._inputs = inputs.clone()
        self._graph = torch.cuda.CUDAGraph()
        # On the network's device, which need not be the current one: of another's stream the graph would stay empty.
        with torch.cuda.device(inputs.device):
            side = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(inputs.device))
            with torch.cuda.stream(side):
                copied.checked_logits(self._inputs)
            torch.cuda.current_stream(inputs.device).wait_stream(side)
            # Other threads may put images on the device meanwhile.
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._outputs = copied.checked_logits(self._inputs)
        self._outputs.fill_(torch.nan)  # what the graph does not write is computed again, never an old answer

    def __call__(self, inputs: Tensor) -> Tensor:
        with self._lock:
            self._inputs.copy_(inputs)
            self._graph.replay()
            return self._outputs.clone()


class _Block:
    """Forward passes of one large shape, compiled when that pays: so from the first, which labels are compared with."""

    def __init__(self, copied: TorchClassifier, inputs: Tensor, expected: int) -> None:
        self.copied, self.shape = copied, tuple(inputs.shape)
        self._compiled: TorchClassifier | None = None
        self(inputs)  # makes kernels
        torch.cuda.synchronize(inputs.device)
        started = time.monotonic()
        self(inputs)
        torch.cuda.synchronize(inputs.device)
        seconds = time.monotonic() - started
        norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, ChannelwiseGroupNorm)
        saved = SAVED[any(isinstance(part, norms) for part in copied.module.modules())]
        if expected / len(inputs) * seconds * saved > COMPILING:
            self._compiled = copy.copy(copied)
            quick = torch.compile(copied.module, dynamic=False, options=COMPILER)
            self._compiled.module = cast("nn.Module", quick)

    def __call__(self, inputs: Tensor) -> Tensor:
        with tuned(inputs.device):
            if self._compiled is not None:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the compiler
                        return self._compiled.checked_logits(inputs)
                except OutputError:  # what the compiler cannot do, the copy does
                    self._compiled = None
            return self.copied.checked_logits(inputs)


def block_size(numbers: int) -> int:
    """How many inputs of this many numbers a GPU is given at once.

    >>> block_size(3 * 224 * 224), block_size(3 * 32 * 32)
    (328, 8192)
    """
    return max(GRAPHED + 1, min(8192, BLOCK_NUMBERS // numbers // 8 * 8))


def _half(module: nn.Module) -> nn.Module:
    return rewritten(module).requires_grad_(False).half().to(memory_format=torch.channels_last)
