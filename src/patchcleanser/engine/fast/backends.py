"""Backend: a faster way to logits than float32 in torch. Which there are for a network, and what runs them on pairs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import is_out_of_memory, padded_batch_size
from patchcleanser.classifiers.fingerprints import layers, module_sketch, tensor_sketch, weights_sketch
from patchcleanser.engine.exact import COPY_BYTES, ExactEngine, default_chunk, out_of_memory
from patchcleanser.engine.masking import PairBatch
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

SMALL_BATCH = 64
"""Batches up to this size are latency-bound on a GPU."""

BLOCK_NUMEL = 50_000_000
"""Numbers in a block of inputs for a GPU: 320 images at 224×224. With twice as many a ViT-B takes 7% longer."""


class UnusableError(Exception):
    """The backend does not work for this network."""


class Backend(ABC):
    """A faster way to nearly the same logits as float32 gives.

    It is built from the network, and only good for the network as it was then. Changed weights and hooks are noticed at
    once, and it is unusable until it is calibrated again. Other settings, and weights written through `weight.data`,
    are noticed when clean images are certified.
    """

    resolution: float
    """The smallest relative difference of logits that means anything."""

    trusted_inputs_only = False
    """Whether it is never used for images that an attacker may have touched."""

    max_uncertain_share = 0.5
    """The share of uncertain labels above which computing all of them by the next stage is cheaper."""

    input_dtype: torch.dtype | None = None
    """What it rounds inputs to before anything else: masked copies may then be made of rounded images."""

    chunks = 1
    """How many chunks it is given at once: more than one if it cuts them itself."""

    expected = 0
    """About how many labels are still to come, if that is known."""

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier
        self._built: Any = None
        """What was built from the network; it belongs to this process."""
        self._addresses: list[tuple[int, int]] | None = None
        self._sketch = ""
        self._weights: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": None, "_addresses": None}

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] → float32 logits [N, classes]; UnusableError if it does not work here."""

    def min_batch(self, input_numel: int) -> int:
        """The smallest batch that it takes, of inputs with so many numbers."""
        return 1

    def large_batch(self, input_numel: int) -> int | None:
        """The batch size from which other kernels compute the logits, if any: then both kinds are calibrated."""
        return None

    def release(self) -> None:
        """Drop what was built; it is built again when it is needed."""
        self._built = None

    def shrink(self) -> None:  # noqa: B027
        """Release memory of what can be rebuilt with the same bits."""

    def refresh(self) -> None:
        """Drop what was built if anything about the network changed; called before each calibration."""
        sketch, addresses = module_sketch(self.classifier.module), _addresses(self.classifier.module)
        if (sketch, addresses) != (self._sketch, self._addresses):
            self._sketch, self._addresses = sketch, addresses
            self._weights = weights_sketch(self.classifier.module)
            self.release()

    @property
    def stale(self) -> bool:
        """Whether any weight is another than at calibration, as far as a quick look shows."""
        return weights_sketch(self.classifier.module) != self._weights

    def _check_unchanged(self) -> None:
        """Refuse if weights changed: which labels are uncertain was learnt with the old ones."""
        addresses = _addresses(self.classifier.ready_module)
        if self._addresses is None:
            self._addresses = addresses
        if self._addresses != addresses:
            self.release()
            raise UnusableError(f"{type(self.classifier.module).__name__} changed since it was calibrated")


class AutocastBackend(Backend):
    """Half precision by autocast: the network's own code runs."""

    def __init__(self, classifier: TorchClassifier, half: torch.dtype) -> None:
        super().__init__(classifier)
        self.half, self.resolution = half, torch.finfo(half).eps

    def logits(self, inputs: Tensor) -> Tensor:
        self._check_unchanged()
        try:
            with torch.autocast(self.classifier.device.type, dtype=self.half):
                return self.classifier.checked_logits(inputs)
        except OutputError as error:  # quantised layers take float32 only
            raise UnusableError(f"{type(self.classifier.module).__name__} does not work in {self.half}") from error


def half_type(device: torch.device) -> torch.dtype | None:
    """The half precision this device is faster with, if any.

    float16 on CUDA: as fast as bfloat16 there and eight times as fine, so far fewer labels are uncertain; what
    overflows is computed again. bfloat16 on CPUs that have instructions for it.
    """
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return torch.bfloat16 if supported and supported() else None
    return torch.float16 if device.type == "cuda" else None


def candidates_for(classifier: TorchClassifier) -> list[list[Backend]]:
    """The cascades for a network on its device, the fastest first; none changes the network.

    The first backend of a cascade computes labels, and each further one those that are uncertain before it.
    """
    if classifier.dtype != torch.float32:
        return []
    candidates: list[list[Backend]] = []
    half = half_type(classifier.device)
    if half is not None and classifier.device.type == "cuda":
        from patchcleanser.engine.fast.float8.backend import Float8Backend
        from patchcleanser.engine.fast.half import HalfPrecisionBackend

        capability = torch.cuda.get_device_capability(classifier.device)
        half_copy = HalfPrecisionBackend(classifier)
        if capability >= (8, 9) and classifier.steady:
            candidates.append([Float8Backend(classifier, half_copy), half_copy])
        candidates.append([half_copy])
    if half is not None:
        candidates.append([AutocastBackend(classifier, half)])
    exportable = classifier.steady and classifier.device.type == "cpu"
    if exportable and all(find_spec(name) for name in ("onnxruntime", "onnxscript")):
        from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend

        candidates.append([OnnxRuntimeBackend(classifier)])
    return candidates


class BackendRunner:
    """Computes logits of pairs by a backend, in chunks that fit into memory."""

    def __init__(self, exact: ExactEngine) -> None:
        self.exact, self.chunk = exact, exact.chunk
        self.fixed_chunk = exact.chunk is not None
        """Whether the user set the chunk, or memory ran out: then no backend is given several chunks at once."""
        self.sizes: set[tuple[int, ...]] | None = None
        """Heights and widths of inputs that backends were compared for; others are computed exactly. None: any."""

    def chunk_size(self, pairs: PairBatch, start: int = 0, chunks: int = 1) -> int:
        """How many pairs from `start` on fit into so many chunks."""
        pixels, device = pairs.image(start).pixels, self.exact.classifier.device
        if self.chunk is None:
            numel = self.exact.input_numel(pixels)
            self.chunk, block = default_chunk(device, numel), block_size(numel)
            if device.type == "cuda" and self.chunk >= block:
                self.chunk -= self.chunk % block
        size = self.chunk * chunks
        return size if self.exact.grid == "input" else max(1, min(size, COPY_BYTES // (4 * pixels.numel())))

    def split(self, pairs: PairBatch, chunks: int = 1) -> Iterator[PairBatch]:
        """Cut pairs into parts of so many chunks."""
        start = 0
        while start < len(pairs):
            yield (part := pairs.part(start, start + self.chunk_size(pairs, start, chunks)))
            start += len(part)

    def logits(self, pairs: PairBatch, backend: Backend) -> Tensor:
        """Logits by a backend; if memory runs out, of halves, and of smaller chunks from then on."""
        try:
            return self.forward(pairs, backend)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(pairs) == 1:
                raise out_of_memory(pairs, self.exact.classifier) from error
        self.exact.empty_caches()
        half = len(pairs) // 2
        self.fixed_chunk, self.chunk = True, max(1, min(self.chunk or half, half))
        return torch.cat([self.logits(part, backend) for part in (pairs.part(0, half), pairs.part(half, len(pairs)))])

    def forward(self, pairs: PairBatch, backend: Backend, *, pad_to: int | None = None) -> Tensor:
        """Logits in as few calls as image sizes allow; `pad_to` pads each call to whole blocks."""
        rows: list[Tensor] = []
        inputs: list[Tensor] = []

        def flush() -> None:
            if inputs:
                batch = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
                padded = batch if pad_to is None else pad_to_blocks(batch, pad_to)
                rows.append(backend.logits(padded)[: len(batch)])
                inputs.clear()

        shapes = [tuple(pairs.images[i].pixels.shape) for i in pairs.which]
        bounds = [0, *(n for n in range(1, len(shapes)) if shapes[n] != shapes[n - 1]), len(shapes)]
        for start, stop in pairwise(bounds):
            part = pairs.part(start, stop)
            size = tuple(self.exact.input_shape(part.image().pixels)[-2:])
            if self.sizes is not None and size not in self.sizes:
                flush()
                rows.append(self.exact.logits(part))
                continue
            batch = self.exact.masked_inputs(part, backend.input_dtype)
            if inputs and inputs[-1].shape[1:] != batch.shape[1:]:
                flush()
            inputs.append(batch)
        flush()
        return torch.cat(rows) if len(rows) > 1 else rows[0]


def block_size(input_numel: int) -> int:
    """How many inputs of so many numbers a GPU is given at once: a batch size that needs no padding.

    >>> block_size(3 * 224 * 224), block_size(3 * 32 * 32)
    (320, 8192)
    """
    most = max(SMALL_BATCH + 8, min(8192, BLOCK_NUMEL // input_numel))
    return next(size for size in range(most, 0, -1) if padded_batch_size(size) == size)


def pad_to_blocks(inputs: Tensor, block: int) -> Tensor:
    """Whole blocks of inputs; the last one is padded with the same inputs again."""
    rows = torch.arange(-(-len(inputs) // block) * block, device=inputs.device) % len(inputs)
    return inputs[rows] if len(rows) > len(inputs) else inputs


def own_copy(classifier: TorchClassifier, change: Callable[[nn.Module], nn.Module]) -> TorchClassifier:
    """The classifier around a changed copy of its network."""
    changed = copy.copy(classifier)
    try:
        module = copy.deepcopy(classifier.module)
        if _parts(module) & _parts(classifier.module):
            raise ValueError("its copy shares parts with it")
        changed.module = change(module)
    except Exception as error:  # a network may hold what cannot be copied or changed, or there is no memory for it
        raise UnusableError(f"{type(classifier.module).__name__} cannot be copied: {error}") from error
    return changed


def _parts(module: nn.Module) -> set[int]:
    """Layers, parameters and buffers, by address."""
    return {id(part) for parts in (module.modules(), module.parameters(), module.buffers()) for part in parts}


def _addresses(module: nn.Module) -> list[tuple[int, int]]:
    """Addresses of layers, of weights with their write counts, and of hooks.

    Torch counts no writes to inference tensors, so a hash of their values stands for the count.
    """
    addresses: list[tuple[int, int]] = []
    for part in layers(module):
        addresses.append((id(part), len(part._modules)))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                version = hash(tensor_sketch(tensor)) if tensor.is_inference() else tensor._version
                addresses.append((tensor.data_ptr(), version))
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            addresses.append((id(hook), 0))
    return addresses
