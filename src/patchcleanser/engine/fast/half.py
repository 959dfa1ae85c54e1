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

from patchcleanser.engine.fast.backends import SMALL_BATCH, Backend, UnusableError, block_size, own_copy
from patchcleanser.engine.fast.fused_layers import ChannelwiseGroupNorm, fuse_layers
from patchcleanser.engine.float32 import Setting, cudnn_benchmark, override
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

T = TypeVar("T")

GRAPH_AFTER = 2
GRAPHS = 8
"""A small batch is recorded as a CUDA graph once its shape came this often; so many graphs are kept."""

BLOCKS = 4
"""How many input sizes get blocks; inputs of further sizes are computed as smaller batches are. None is replaced:
built again, it might be compiled although it was compared uncompiled, or the reverse."""

SHAPES = 256
"""Shapes that are counted: images of ever new sizes must not fill the memory."""

COMPILE_SECONDS = 40.0
SAVED_SHARE = {True: 0.35, False: 0.1}
"""How long compiling takes, and the share of the time it saves, with and without layers that normalise whole images
channel by channel: fusing these is most of what a compiler can do (measured on an H200: ResNets 40%, ViT 7%)."""

COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {"conv_1x1_as_mm": True}
"""Most convolutions of a ResNet are 1×1; as matrix products they take less time."""

FLOAT32_SUMS = Setting(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
"""Partial sums of half-precision products are added up in float32."""

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention kernels, the fastest first; where one does not fit, the next is taken."""


class HalfPrecisionBackend(Backend):
    """A half-precision copy of the network, on a GPU, with known layers fused.

    Small batches, as in `predict`, are recorded once as a CUDA graph and replayed. Large ones are cut into blocks of
    one size; the copy is compiled for that block if enough labels are expected.
    """

    resolution = torch.finfo(torch.float16).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self.input_dtype = torch.float16 if classifier.plain else None  # a user's subclass may want float32
        self._built: _HalfNetwork | None = None

    def large_batch(self, input_numel: int) -> int | None:
        blocks = self.classifier.steady and self.classifier.device.type == "cuda"
        return block_size(input_numel) if blocks else None

    @property
    def counts(self) -> dict[str, int]:
        """How many CUDA graphs, blocks and compiled blocks were built: one for each shape."""
        graphs, blocks = (self._built.recorded, self._built.blocks) if self._built else ({}, {})
        compiled = sum(block.compiled is not None for block in blocks.values())
        return {"graphs": len(graphs), "blocks": len(blocks), "compiled_blocks": compiled}

    def logits(self, inputs: Tensor) -> Tensor:
        if self._built is None:
            self._check_unchanged()
        network = self._build()
        self.expected -= len(inputs)
        size = block_size(inputs[0].numel())
        logits = run_half(lambda batch: network(batch, size, self.expected), inputs)
        # While the GPU computes: walking over a network takes a fifth of the time of a prediction.
        self._check_unchanged()
        if self._built is not network:  # another thread calibrated with a changed network meanwhile
            raise UnusableError(f"{type(self.classifier.module).__name__} changed during a forward pass")
        return logits

    def _build(self) -> _HalfNetwork:
        if self._built is None:
            classifier = own_copy(self.classifier, to_half)
            classifier.dtype = torch.float16
            self._built = _HalfNetwork(classifier, steady=self.classifier.steady)
        return self._built


class _HalfNetwork:
    """The copy: small batches are replayed from CUDA graphs, large ones cut into blocks, which may be compiled."""

    def __init__(self, classifier: TorchClassifier, *, steady: bool) -> None:
        self.classifier = classifier
        self.accelerated = steady and classifier.device.type == "cuda"
        self.graphs: dict[tuple[int, ...], Graph | int] = {}
        """By shape: the graph, or how often the shape came."""
        self.blocks: dict[tuple[int, ...], _Block] = {}

    def __call__(self, inputs: Tensor, size: int, expected: int) -> Tensor:
        """Logits, in blocks of `size`; about `expected` more labels are to come."""
        classifier = self.classifier
        if not self.accelerated:
            return classifier.checked_logits(inputs)
        if len(inputs) <= SMALL_BATCH:
            return self.small_batch(inputs)
        shape = (size, *inputs.shape[1:])
        if len(inputs) < size or (shape not in self.blocks and len(self.blocks) == BLOCKS):
            return classifier.checked_logits(inputs)
        if shape not in self.blocks:
            self.blocks[shape] = _Block(classifier, inputs[:size], expected)
        block, end = self.blocks[shape], len(inputs) // size * size
        logits = [block(inputs[at : at + size]) for at in range(0, end, size)]
        rest = [classifier.checked_logits(inputs[end:])] if end < len(inputs) else []
        return torch.cat([*logits, *rest])

    @property
    def recorded(self) -> dict[tuple[int, ...], Graph | int]:
        """The shapes that have a graph."""
        return {shape: graph for shape, graph in self.graphs.items() if isinstance(graph, Graph)}

    def small_batch(self, inputs: Tensor) -> Tensor:
        """Logits of a small batch; from a CUDA graph once its shape came a few times."""
        shape = tuple(inputs.shape)
        if len(self.graphs) >= SHAPES:
            self.graphs = self.recorded
        state = self.graphs.setdefault(shape, 0)
        if isinstance(state, Graph):
            return state(inputs)
        if state == GRAPH_AFTER and len(self.recorded) < GRAPHS:
            with suppress(OutputError, RuntimeError):  # a network that branches on its own numbers cannot be recorded
                self.graphs[shape] = graph = Graph(self.classifier, inputs)
                return graph(inputs)
        self.graphs[shape] = state + 1
        return self.classifier.checked_logits(inputs)


class Graph:
    """One forward pass of one shape as a CUDA graph, which a GPU replays without waiting for Python."""

    def __init__(self, classifier: TorchClassifier, inputs: Tensor) -> None:
        self._lock = threading.Lock()
        self._classifier = classifier  # keeps the weights that the graph reads
        self._inputs = inputs.clone()
        self._graph = torch.cuda.CUDAGraph()
        self._replayed: torch.cuda.Event | None = None
        # On the network's device, which need not be the current one: of another's stream the graph would stay empty.
        # And on the stream that was current, whatever becomes of the recording: older torch stays where it failed.
        with torch.cuda.device(inputs.device), torch.cuda.stream(torch.cuda.current_stream(inputs.device)):
            side = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(inputs.device))
            with torch.cuda.stream(side):
                classifier.checked_logits(self._inputs)
            torch.cuda.current_stream(inputs.device).wait_stream(side)
            # Other threads may put images on the device meanwhile.
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._outputs = classifier.checked_logits(self._inputs)
        self._outputs.fill_(torch.nan)  # what the graph does not write is computed again, never an old answer

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of inputs of that shape."""
        if inputs.shape != self._inputs.shape:  # copy_ would broadcast them where it can
            raise ValueError(f"the graph is of inputs {tuple(self._inputs.shape)}, got {tuple(inputs.shape)}")
        with self._lock:
            stream = torch.cuda.current_stream(inputs.device)
            if self._replayed is not None:  # perhaps by another stream, which may not be done
                stream.wait_event(self._replayed)
            self._inputs.copy_(inputs)
            self._graph.replay()
            outputs = self._outputs.clone()
            self._replayed = stream.record_event()
            return outputs


class _Block:
    """Forward passes of one large shape. Whether they are compiled is decided before the first, and then stays."""

    def __init__(self, classifier: TorchClassifier, inputs: Tensor, expected: int) -> None:
        self.classifier = classifier
        self.compiled: TorchClassifier | None = None
        """The compiled network, if compiling pays and the compiler can."""
        self._proven = False
        example = inputs.clone()  # a network may write into its inputs
        self(example)  # builds kernels
        torch.cuda.synchronize(inputs.device)
        started = time.monotonic()
        self(example)
        torch.cuda.synchronize(inputs.device)
        seconds = time.monotonic() - started
        norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, ChannelwiseGroupNorm)
        share = SAVED_SHARE[any(isinstance(part, norms) for part in classifier.module.modules())]
        if expected / len(inputs) * seconds * share > COMPILE_SECONDS:
            self.compiled = copy.copy(classifier)
            module = torch.compile(classifier.module, dynamic=False, options=COMPILER)
            self.compiled.module = cast("nn.Module", module)

    def __call__(self, inputs: Tensor) -> Tensor:
        with cudnn_benchmark(inputs.device):
            if self.compiled is not None:
                original = inputs if self._proven else inputs.clone()
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the compiler
                        logits = self.compiled.checked_logits(inputs)
                except OutputError:  # what cannot be compiled runs uncompiled
                    self.compiled, inputs = None, original
                else:
                    self._proven = True
                    return logits
            return self.classifier.checked_logits(inputs)


def run_half(work: Callable[[Tensor], T], inputs: Tensor) -> T:
    """Run a half-precision copy on inputs, whatever autocast and precision the program chose around it."""
    try:
        with (
            torch.autocast(inputs.device.type, enabled=False),
            sdpa_kernel(ATTENTION, set_priority=True),
            override(FLOAT32_SUMS),
        ):
            return work(inputs)
    except OutputError as error:  # some networks only work in their own precision
        raise UnusableError(f"the network does not work in float16: {error}") from error


def to_half(module: nn.Module) -> nn.Module:
    """The module in half precision, in place, with known layers fused."""
    return fuse_layers(module).requires_grad_(False).half().to(memory_format=torch.channels_last)
