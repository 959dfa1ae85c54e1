"""Backend: a faster way to logits than float32 in torch; and half precision by autocast."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import padded_batch_size
from patchcleanser.classifiers.fingerprints import layers, module_sketch, tensor_sketch, weights_sketch
from patchcleanser.engine.fast.calibration import MAX_UNCERTAIN_SHARE
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier


SMALL_BATCH = 64
"""Batches up to this size are latency-bound on a GPU."""

BLOCK_NUMEL = 50_000_000
"""Numbers in a block of inputs for a GPU: 320 images at 224×224. With twice as many a ViT-B takes 7% longer."""


class Backend(ABC):
    """A faster way to nearly the same logits as float32 gives."""

    resolution: float
    """The smallest relative difference of logits that means anything."""

    trusted_inputs_only = False
    """Whether it is never used for images that an attacker may have touched."""

    max_uncertain_share = MAX_UNCERTAIN_SHARE
    """The share of uncertain labels up to which it pays."""

    input_dtype: torch.dtype | None = None
    """What it rounds inputs to before anything else: masked copies may then be made of rounded images."""

    chunks = 1
    """How many chunks it is given at once: more than one if it cuts them itself."""

    expected = 0
    """About how many labels are still to come, as far as anybody said."""

    def min_batch(self, input_numel: int) -> int:
        """The smallest batch that it takes, of inputs with so many numbers."""
        return 1

    def large_batch(self, input_numel: int) -> int | None:
        """The batch size from which other kernels compute the logits, if any: then both kinds are calibrated."""
        return None

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] → float32 logits [N, classes]; UnusableError if it does not work here."""

    def refresh(self) -> bool:
        """Drop what was made if the network changed, and say whether it did; called before each calibration."""
        return False

    @property
    def stale(self) -> bool:
        """Whether weights are others than at calibration, as far as a quick look shows."""
        return False

    def release(self) -> None:  # noqa: B027
        """Drop everything that was made; it is made again when it is needed."""

    def shrink(self) -> None:  # noqa: B027
        """Give back memory of what can be made again just the same."""


class UnusableError(Exception):
    """The backend does not work for this network."""


class BusyError(UnusableError):
    """The backend does not work just now."""


class DerivedBackend(Backend):
    """A backend made from the network, and so only good for the network as it was then.

    Changed weights and hooks are noticed at once, and nothing is answered until the backend is calibrated again. Other
    settings, and weights written through `weight.data`, are noticed when clean images are certified.
    """

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier
        self._addresses: list[tuple[int, int]] | None = None
        self._sketch = ""
        self._weights: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Addresses in memory are those of this process."""
        return {**vars(self), "_addresses": None}

    def refresh(self) -> bool:
        """Drop what was made if anything about the network changed."""
        sketch, addresses = module_sketch(self.classifier.module), _addresses(self.classifier.module)
        if (sketch, addresses) == (self._sketch, self._addresses):
            return False
        self._sketch, self._addresses = sketch, addresses
        self._weights = weights_sketch(self.classifier.module)
        self.release()
        return True

    @property
    def stale(self) -> bool:
        """Whether any weight is another than at calibration."""
        return weights_sketch(self.classifier.module) != self._weights

    def _check_unchanged(self) -> None:
        """Refuse if weights changed: which labels are uncertain was learnt with the old ones."""
        addresses = _addresses(self.classifier.ready_module)
        if self._addresses is None:
            self._addresses = addresses
        if self._addresses != addresses:
            self.release()
            raise UnusableError(f"{type(self.classifier.module).__name__} changed since it was calibrated")


class AutocastBackend(DerivedBackend):
    """Half precision by autocast: the network's own code runs."""

    def __init__(self, classifier: TorchClassifier, half: torch.dtype) -> None:
        super().__init__(classifier)
        self.half, self.resolution = half, torch.finfo(half).eps

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the module under autocast."""
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


def block_size(input_numel: int) -> int:
    """How many inputs of so many numbers a GPU is given at once: a batch size that needs no padding.

    >>> block_size(3 * 224 * 224), block_size(3 * 32 * 32)
    (320, 8192)
    """
    most = max(SMALL_BATCH + 8, min(8192, BLOCK_NUMEL // input_numel))
    return next(size for size in range(most, 0, -1) if padded_batch_size(size) == size)


def pad_to_blocks(inputs: Tensor, block: int) -> Tensor:
    """Whole blocks of inputs; the last one is padded with the same inputs again and again."""
    at = torch.arange(-(-len(inputs) // block) * block, device=inputs.device) % len(inputs)
    return inputs[at] if len(at) > len(inputs) else inputs


def own_copy(classifier: TorchClassifier, change: Callable[[nn.Module], nn.Module]) -> TorchClassifier:
    """The classifier around a changed copy of its network."""
    copied = copy.copy(classifier)
    try:
        module = copy.deepcopy(classifier.module)
        if _parts(module) & _parts(classifier.module):
            raise ValueError("its copy shares parts with it")
        copied.module = change(module)
    except Exception as error:  # a network may hold what cannot be copied or changed, or there is no room for it
        raise UnusableError(f"{type(classifier.module).__name__} cannot be copied: {error}") from error
    return copied


def _parts(module: nn.Module) -> set[int]:
    """Layers, parameters and buffers, by address."""
    return {id(part) for parts in (module.modules(), module.parameters(), module.buffers()) for part in parts}


def _addresses(module: nn.Module) -> list[tuple[int, int]]:
    """Addresses of layers, of weights with their write counts, and of hooks.

    Torch counts no writes to inference tensors, so their values are looked at.
    """
    addresses: list[tuple[int, int]] = []
    for part in layers(module):
        addresses.append((id(part), len(part._modules)))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                unwatched = tensor.is_inference()
                addresses.append((tensor.data_ptr(), hash(tensor_sketch(tensor)) if unwatched else tensor._version))
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            addresses.append((id(hook), 0))
    return addresses
