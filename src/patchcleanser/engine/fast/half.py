"""A half-precision copy of a network on a GPU: compiled blocks for many labels, CUDA graphs for few."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchcleanser.engine.fast.backends import (
    SMALL_BATCH,
    DerivedBackend,
    UnusableError,
    block_size,
    own_copy,
)
from patchcleanser.engine.fast.fused_layers import ChannelwiseGroupNorm, rewritten
from patchcleanser.engine.float32 import Setting, cudnn_benchmark, override
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

T = TypeVar("T")

GRAPH_AFTER = 2
GRAPHS = 8
"""Batches up to this size are recorded as CUDA graphs when their shape has come so often; so many graphs are kept."""

BLOCKS = 4
"""Kinds of blocks, one for each size of input, that are made; inputs of further sizes are computed as smaller batches
are. None makes room for another: made again, it might be compiled where it was compared uncompiled, or the reverse."""

SHAPES = 256
"""Shapes that are counted: whoever sends images of every size must not fill the memory."""

COMPILING = 40.0
SAVED = {True: 0.35, False: 0.1}
"""Seconds that compiling takes, and the share of the time it saves, with and without layers that normalise whole
images channel by channel: fusing these is most of what a compiler can do (measured on an H200: ResNets 40%, ViT 7%)."""

COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {"conv_1x1_as_mm": True}
"""Most products of a ResNet are convolutions of single pixels; as products of matrices they take less time."""

FLOAT32_SUMS = Setting(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
"""Partial sums of half-precision products are added up in float32."""

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels for attention, the quickest first; where one does not fit, the next is taken."""


class HalfPrecisionBackend(DerivedBackend):
    """A half-precision copy of the network, on a GPU, with known layers written anew for it.

    Small batches, as `predict` asks for, are recorded once as a CUDA graph and played back. Large ones are cut into
    blocks of one size; if so many labels are expected that it pays, the copy is compiled for that block.
    """

    resolution = torch.finfo(torch.float16).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self.input_dtype = rounded_to_half(classifier)
        self._copy: _Player | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process."""
        return {**super().__getstate__(), "_copy": None}

    def release(self) -> None:
        """Drop the copy and what was recorded and compiled of it."""
        self._copy = None

    def large_batch(self, input_numel: int) -> int | None:
        """Whole blocks have kernels of their own."""
        blocks = self.classifier.steady and self.classifier.device.type == "cuda"
        return block_size(input_numel) if blocks else None

    @property
    def graphs(self) -> int:
        """How many batch shapes were recorded as CUDA graphs."""
        return 0 if self._copy is None else sum(isinstance(graph, Graph) for graph in self._copy._graphs.values())

    @property
    def blocks(self) -> int:
        """For how many input sizes large batches are computed in blocks."""
        return 0 if self._copy is None else len(self._copy._blocks)

    @property
    def compiled_blocks(self) -> int:
        """How many of these are compiled."""
        return 0 if self._copy is None else sum(block.compiled for block in self._copy._blocks.values())

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy."""
        if self._copy is None:
            self._check_unchanged()
        player = self._made()
        self.expected -= len(inputs)
        block = block_size(inputs[0].numel())
        logits = guarded(lambda given: player(given, block, self.expected), inputs)
        # While a GPU is at work on it: walking over a network takes a fifth of the time of a prediction.
        self._check_unchanged()
        if self._copy is not player:  # another thread compared it with a changed network meanwhile
            raise UnusableError(f"{type(self.classifier.module).__name__} changed while it was asked")
        return logits

    def _made(self) -> _Player:
        if self._copy is None:
            copied = own_copy(self.classifier, halved)
            copied.dtype = torch.float16
            self._copy = _Player(copied, steady=self.classifier.steady)
        return self._copy


class _Player:
    """A copy at work: small batches from CUDA graphs, large ones in blocks, which may be compiled."""

    def __init__(self, copied: TorchClassifier, *, steady: bool) -> None:
        self.copied = copied
        self.blocks = steady and copied.device.type == "cuda"
        self._graphs: dict[tuple[int, ...], Graph | int] = {}
        self._blocks: dict[tuple[int, ...], _Block] = {}

    def __call__(self, inputs: Tensor, size: int, expected: int) -> Tensor:
        """Logits, in blocks of a size; so many more are expected."""
        copied = self.copied
        if not self.blocks:
            return copied.checked_logits(inputs)
        if len(inputs) <= SMALL_BATCH:
            return self._played(inputs)
        shape = (size, *inputs.shape[1:])
        if len(inputs) < size or (shape not in self._blocks and len(self._blocks) == BLOCKS):
            return copied.checked_logits(inputs)
        if shape not in self._blocks:
            self._blocks[shape] = _Block(copied, inputs[:size], expected)
        block, whole = self._blocks[shape], len(inputs) // size * size
        done = [block(inputs[at : at + size]) for at in range(0, whole, size)]
        rest = [copied.checked_logits(inputs[whole:])] if whole < len(inputs) else []
        return torch.cat([*done, *rest])

    def _played(self, inputs: Tensor) -> Tensor:
        """Logits of a small batch; once its shape has come a few times, from a CUDA graph."""
        shape = tuple(inputs.shape)
        if len(self._graphs) >= SHAPES:
            self._graphs = {kept: graph for kept, graph in self._graphs.items() if isinstance(graph, Graph)}
        state = self._graphs.setdefault(shape, 0)
        if isinstance(state, Graph):
            return state(inputs)
        if state == GRAPH_AFTER and sum(isinstance(graph, Graph) for graph in self._graphs.values()) < GRAPHS:
            with suppress(OutputError, RuntimeError):  # a network that waits for its own numbers cannot be recorded
                self._graphs[shape] = graph = Graph(self.copied, inputs)
                return graph(inputs)
        self._graphs[shape] = state + 1
        return self.copied.checked_logits(inputs)


class Graph:
    """One forward pass of one shape as a CUDA graph: a GPU plays it back without waiting for Python."""

    def __init__(self, copied: TorchClassifier, inputs: Tensor) -> None:
        self._lock = threading.Lock()
        self._copied = copied  # whose weights it reads
        self._inputs = inputs.clone()
        self._graph = torch.cuda.CUDAGraph()
        self._played: torch.cuda.Event | None = None
        # On the network's device, which need not be the current one: of another's stream the graph would stay empty.
        # And on the stream that was current, whatever becomes of the recording: older torch stays where it failed.
        with torch.cuda.device(inputs.device), torch.cuda.stream(torch.cuda.current_stream(inputs.device)):
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
        """What the network makes of inputs of that shape."""
        if inputs.shape != self._inputs.shape:  # copying would repeat them where it can
            raise ValueError(f"the graph is of inputs {tuple(self._inputs.shape)}, got {tuple(inputs.shape)}")
        with self._lock:
            stream = torch.cuda.current_stream(inputs.device)
            if self._played is not None:  # by another stream, perhaps, which is at it still
                stream.wait_event(self._played)
            self._inputs.copy_(inputs)
            self._graph.replay()
            outputs = self._outputs.clone()
            self._played = stream.record_event()
            return outputs


class _Block:
    """Forward passes of one large shape, compiled when that pays: so from the first, which labels are compared with."""

    def __init__(self, copied: TorchClassifier, inputs: Tensor, expected: int) -> None:
        self.copied = copied
        self._compiled: TorchClassifier | None = None
        self._proven = False
        given = inputs.clone()  # a network may write into what it is given
        self(given)  # makes kernels
        torch.cuda.synchronize(inputs.device)
        started = time.monotonic()
        self(given)
        torch.cuda.synchronize(inputs.device)
        seconds = time.monotonic() - started
        norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, ChannelwiseGroupNorm)
        saved = SAVED[any(isinstance(part, norms) for part in copied.module.modules())]
        if expected / len(inputs) * seconds * saved > COMPILING:
            self._compiled = copy.copy(copied)
            quick = torch.compile(copied.module, dynamic=False, options=COMPILER)
            self._compiled.module = cast("nn.Module", quick)

    @property
    def compiled(self) -> bool:
        """Whether compiling pays for it, and the compiler can."""
        return self._compiled is not None

    def __call__(self, inputs: Tensor) -> Tensor:
        with cudnn_benchmark(inputs.device):
            if self._compiled is not None:
                kept = inputs if self._proven else inputs.clone()
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the compiler
                        logits = self._compiled.checked_logits(inputs)
                except OutputError:  # what the compiler cannot do, the copy does
                    self._compiled, inputs = None, kept
                else:
                    self._proven = True
                    return logits
            return self.copied.checked_logits(inputs)


def guarded(work: Callable[[Tensor], T], inputs: Tensor) -> T:
    """What a copy makes of inputs: whatever precision the program chose around it, the copy's is its own."""
    try:
        with (
            torch.autocast(inputs.device.type, enabled=False),
            sdpa_kernel(ATTENTION, set_priority=True),
            override(FLOAT32_SUMS),
        ):
            return work(inputs)
    except OutputError as error:  # some networks do not bear another precision
        raise UnusableError(f"the network does not work in float16: {error}") from error


def rounded_to_half(classifier: TorchClassifier) -> torch.dtype | None:
    """What a copy's inputs are rounded to first; a class of somebody's own may want them as they are."""
    return torch.float16 if classifier.plain else None


def halved(module: nn.Module) -> nn.Module:
    """The module in half precision, in place, with known layers written anew."""
    return rewritten(module).requires_grad_(False).half().to(memory_format=torch.channels_last)
