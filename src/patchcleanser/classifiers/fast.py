"""Faster ways to nearly the same logits of a torch module; which of their labels to trust, `precision.py` says."""

from __future__ import annotations

import copy
import io
import logging
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchcleanser.classifiers.fingerprints import module_sketch
from patchcleanser.classifiers.precision import half_type, tuned
from patchcleanser.classifiers.rewrites import ChannelwiseGroupNorm, rewritten
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

EXPORTS = 2
"""A network is exported anew for each size of input; so many are kept."""

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

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels for attention, the quickest first; where one does not fit, the next is taken."""


class Way(ABC):
    """A way to compute logits."""

    resolution: float
    """Differences between logits below this share of their size mean nothing."""

    expected = 0
    """About how many labels are still to come, as far as anybody said."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] → float32 logits [N, classes]; UnusableError if this way is none here."""

    def renew(self) -> None:  # noqa: B027
        """Forget what may have become old; called whenever the way is compared with the exact one."""


class UnusableError(Exception):
    """This way does not work for this network."""


class Derived(Way):
    """A way made from the network, or compared with it, and so only good for the network as it was then.

    Changed weights and hooks are noticed at once, and nothing is answered until the way is compared with the network
    again; other settings are noticed then.
    """

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier
        self._seen: list[tuple[int, int]] | None = None
        self._sketch = ""

    def __getstate__(self) -> dict[str, Any]:
        """Places in memory are those of this process."""
        return {**vars(self), "_seen": None}

    @abstractmethod
    def _forget(self) -> None:
        """Drop what was made."""

    def renew(self) -> None:
        """Make it again if anything about the network is another."""
        sketch, seen = module_sketch(self.classifier.module), _places(self.classifier.module)
        if (sketch, seen) != (self._sketch, self._seen):
            self._sketch, self._seen = sketch, seen
            self._forget()

    def _follow(self) -> None:
        """Refuse if weights are others: which labels are doubtful was learnt with the old ones."""
        seen = _places(self.classifier.ready_module)
        if self._seen is None:
            self._seen = seen
        if self._seen != seen:
            self._forget()
            raise UnusableError(f"{type(self.classifier.module).__name__} changed since it was compared")


class Halved(Derived):
    """Half precision by autocast: the network's own code, so whatever it does is done."""

    def __init__(self, classifier: TorchClassifier, half: torch.dtype) -> None:
        super().__init__(classifier)
        self.half, self.resolution = half, torch.finfo(half).eps

    def _forget(self) -> None:
        """Nothing was made."""

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the module under autocast."""
        self._follow()
        try:
            with torch.autocast(self.classifier.device.type, dtype=self.half):
                return self.classifier.checked_logits(inputs)
        except OutputError as error:  # quantised layers take float32 only
            raise UnusableError(f"{type(self.classifier.module).__name__} does not work in {self.half}") from error


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

    def _forget(self) -> None:
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


class Copied(Derived):
    """A half-precision copy of the network, on a GPU, with known layers written anew for it.

    Small batches, as `predict` asks for, are recorded once as a CUDA graph and played back. Large ones are cut into
    blocks of one size; if so many labels are expected that it pays, the copy is compiled for that block.
    """

    resolution = torch.finfo(torch.float16).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self._copy: TorchClassifier | None = None
        self._graphs: dict[tuple[int, ...], _Graph | int] = {}
        self._block: _Block | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process."""
        return {**super().__getstate__(), "_copy": None, "_graphs": {}, "_block": None}

    def _forget(self) -> None:
        self._copy, self._graphs, self._block = None, {}, None

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy."""
        self._follow()
        self.expected -= len(inputs)
        if self._copy is None:
            self._copy = _half_copy(self.classifier)
        try:
            # Whatever precision the program chose around it, the copy's is its own.
            with torch.autocast(inputs.device.type, enabled=False), sdpa_kernel(ATTENTION, set_priority=True):
                return self._computed(self._copy, inputs)
        except OutputError as error:  # some networks do not bear another precision
            raise UnusableError(f"{type(self.classifier.module).__name__} does not work in float16") from error

    def _computed(self, copied: TorchClassifier, inputs: Tensor) -> Tensor:
        if self.classifier.mask_aware or inputs.device.type != "cuda":
            return copied.checked_logits(inputs)
        if len(inputs) <= GRAPHED:
            return self._played(copied, inputs)
        size = block_size(inputs[0].numel())
        if len(inputs) < size:
            return copied.checked_logits(inputs)
        if self._block is None or self._block.shape != (size, *inputs.shape[1:]):
            self._block = _Block(copied, (size, *inputs.shape[1:]))
        whole = len(inputs) // size * size
        done = [self._block(inputs[at : at + size], self.expected) for at in range(0, whole, size)]
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
    """Forward passes of one large shape, compiled when that pays."""

    def __init__(self, copied: TorchClassifier, shape: tuple[int, ...]) -> None:
        self.copied, self.shape = copied, shape
        self._calls, self._seconds = 0, 0.0
        norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, ChannelwiseGroupNorm)
        self._saved = SAVED[any(isinstance(part, norms) for part in copied.module.modules())]
        self._compiled: TorchClassifier | None = None

    def __call__(self, inputs: Tensor, expected: int) -> Tensor:
        self._calls += 1
        if self._calls == 2:  # the first call makes kernels
            return self._timed(inputs)
        if self._calls == 3 and expected / len(inputs) * self._seconds * self._saved > COMPILING:
            self._compiled = copy.copy(self.copied)
            self._compiled.module = cast("nn.Module", torch.compile(self.copied.module, dynamic=False))
        with tuned(inputs.device):
            if self._compiled is not None:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of the compiler
                        return self._compiled.checked_logits(inputs)
                except OutputError:  # what the compiler cannot do, the copy does
                    self._compiled = None
            return self.copied.checked_logits(inputs)

    def _timed(self, inputs: Tensor) -> Tensor:
        torch.cuda.synchronize(inputs.device)
        started = time.monotonic()
        with tuned(inputs.device):
            logits = self.copied.checked_logits(inputs)
        torch.cuda.synchronize(inputs.device)
        self._seconds = time.monotonic() - started
        return logits


def block_size(numbers: int) -> int:
    """How many inputs of this many numbers a GPU is given at once.

    >>> block_size(3 * 224 * 224), block_size(3 * 32 * 32)
    (328, 8192)
    """
    return max(GRAPHED + 1, min(8192, BLOCK_NUMBERS // numbers // 8 * 8))


def _half_copy(classifier: TorchClassifier) -> TorchClassifier:
    """The classifier around a copy of its network in half precision."""
    copied = copy.copy(classifier)
    try:
        module = copy.deepcopy(classifier.module)
        if _parts(module) & _parts(classifier.module):
            raise ValueError("its copy shares parts with it")
        module = rewritten(module).requires_grad_(False).half()
        copied.module, copied.dtype = module.to(memory_format=torch.channels_last), torch.float16
    except Exception as error:  # a network may hold what cannot be copied or laid out so, or there is no room for it
        raise UnusableError(f"{type(classifier.module).__name__} cannot be copied: {error}") from error
    return copied


def _parts(module: nn.Module) -> set[int]:
    """Layers, parameters and buffers, by address."""
    return {id(part) for parts in (module.modules(), module.parameters(), module.buffers()) for part in parts}


def _places(module: nn.Module) -> list[tuple[int, int]]:
    """Where weights are and how often they were written to, and who hooked into the network."""
    tensors = [*module.parameters(), *module.buffers()]
    hooks = [h for part in module.modules() for h in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    places = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
    return [*places, *((id(hook), 0) for hook in hooks)]


def ways_of(classifier: TorchClassifier) -> list[Way]:
    """The ways that may pay for a network on its device, the fastest first; none changes the network."""
    if classifier.dtype != torch.float32:
        return []
    ways: list[Way] = []
    half = half_type(classifier.device)
    if half is not None and classifier.device.type == "cuda":
        ways.append(Copied(classifier))
    if half is not None:
        ways.append(Halved(classifier, half))
    exportable = not classifier.mask_aware and classifier.device.type == "cpu"
    if exportable and all(find_spec(name) for name in ("onnxruntime", "onnxscript")):
        ways.append(Exported(classifier))
    return ways


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
