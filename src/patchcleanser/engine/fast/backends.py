"""A way to compute logits that is faster than float32 in torch, and what every such way must notice."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.fingerprints import glance, layers, module_sketch, weights_sketch
from patchcleanser.engine.precision import HOPELESS
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier


class Way(ABC):
    """A way to compute logits."""

    resolution: float
    """Differences between logits below this share of their size mean nothing."""

    rounds: torch.dtype | None = None
    """What it rounds its inputs to before anything else: then masked copies may be made of rounded images."""

    expected = 0
    """About how many labels are still to come, as far as anybody said."""

    chunks = 1
    """How many chunks it likes to be given at once: more, if it cuts them itself."""

    blocks = False
    """Whether large batches are computed by other kernels than small ones: both are to be compared."""

    finer: Way | None = None
    """One between this and float32, for labels that are doubtful here."""

    bearable = HOPELESS
    """The share of doubtful labels up to which it pays."""

    clean_only = False
    """Whether it is for images that are certified, and not for those that somebody may have attacked."""

    pays: bool | None = None
    """Of such a finer one: whether it was seen to be faster than float32 on this GPU; None: nobody looked."""

    def fewest(self, numbers: int) -> int:
        """The fewest inputs of so many numbers at a time that it is for."""
        return 1

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Prepared inputs [N, C, h, w] → float32 logits [N, classes]; UnusableError if this way is none here."""

    @contextmanager
    def whole_blocks(self) -> Iterator[None]:
        """Small batches are filled up, so that they go by the kernels of large ones."""
        yield

    def forget(self) -> None:  # noqa: B027
        """Drop what was made; it is made again when it is needed."""

    def shrink(self) -> None:  # noqa: B027
        """Give memory back; just the same is made again when it is needed."""

    def renew(self) -> None:  # noqa: B027
        """Forget what may have become old; called whenever the way is compared with the exact one."""

    @property
    def old(self) -> bool:
        """Whether the network is another than the one it was compared with, as far as can be seen at a glance."""
        return False


class UnusableError(Exception):
    """This way does not work for this network."""


class BusyError(UnusableError):
    """It does not work just now."""


class Derived(Way):
    """A way made from the network, or compared with it, and so only good for the network as it was then.

    Changed weights and hooks are noticed at once, and nothing is answered until the way is compared with the network
    again. Other settings, and weights that were written to behind torch's back (`weight.data`), are noticed when clean
    images are certified.
    """

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier
        self._seen: list[tuple[int, int]] | None = None
        self._sketch = ""
        self._weights: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Places in memory are those of this process, and so is what pays, and what was made."""
        return {**vars(self), "_seen": None, "pays": None}

    def renew(self) -> None:
        """Make it again if anything about the network is another."""
        sketch, seen = module_sketch(self.classifier.module), _places(self.classifier.module)
        if (sketch, seen) != (self._sketch, self._seen):
            self._sketch, self._seen, self.pays = sketch, seen, None
            self._weights = weights_sketch(self.classifier.module)
            self.forget()

    @property
    def old(self) -> bool:
        """Whether any weight is another than when it was compared."""
        return weights_sketch(self.classifier.module) != self._weights

    def _follow(self) -> None:
        """Refuse if weights are others: which labels are doubtful was learnt with the old ones."""
        seen = _places(self.classifier.ready_module)
        if self._seen is None:
            self._seen = seen
        if self._seen != seen:
            self.forget()
            raise UnusableError(f"{type(self.classifier.module).__name__} changed since it was compared")


class Halved(Derived):
    """Half precision by autocast: the network's own code, so whatever it does is done."""

    def __init__(self, classifier: TorchClassifier, half: torch.dtype) -> None:
        super().__init__(classifier)
        self.half, self.resolution = half, torch.finfo(half).eps

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the module under autocast."""
        self._follow()
        try:
            with torch.autocast(self.classifier.device.type, dtype=self.half):
                return self.classifier.checked_logits(inputs)
        except OutputError as error:  # quantised layers take float32 only
            raise UnusableError(f"{type(self.classifier.module).__name__} does not work in {self.half}") from error


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


def _places(module: nn.Module) -> list[tuple[int, int]]:
    """Which layers there are, where weights are and how often they were written to, and who hooked into the network.

    Of inference tensors torch does not count that: their numbers are looked at.
    """
    places: list[tuple[int, int]] = []
    for part in layers(module):
        places.append((id(part), len(part._modules)))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                unwatched = tensor.is_inference()
                places.append((tensor.data_ptr(), hash(glance(tensor)) if unwatched else tensor._version))
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            places.append((id(hook), 0))
    return places
