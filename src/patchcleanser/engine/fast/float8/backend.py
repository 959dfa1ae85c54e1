"""Linear layers in eight bits, faster than in half precision: for labels that have no other near them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.engine.fast.backends import DerivedBackend, UnusableError, block_size, own_copy, pad_to_blocks
from patchcleanser.engine.fast.float8.layers import (
    SHORT,
    EightLinear,
    Short,
    apart,
    has_kernels,
    is_fused,
    shortened,
    unfuse,
)
from patchcleanser.engine.fast.float8.rounding import Seen
from patchcleanser.engine.fast.half import Graph, HalfPrecisionBackend, guarded, halved, rounded_to_half

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

FEWEST_FEATURES = 256
MOSTLY = 0.6
"""Smaller layers take no time worth saving, and such layers must do this share of the work."""

PREPARING = 20.0
SAVED = 0.2
"""Seconds that preparing takes, and the share of the time it saves, before that is seen (on an H200: 15 s, 43%)."""


class Float8Backend(DerivedBackend):
    """A half-precision copy of the network whose linear layers have eight bits, for whole blocks of clean images.

    That is enough for most labels: of well-trained transformers 2 to 8 in 100 are doubtful, and go by the
    half-precision copy. Attacked images may hold numbers of any size, and never go this way.
    """

    resolution = torch.finfo(SHORT).eps / 8
    trusted_inputs_only = True

    def __init__(self, classifier: TorchClassifier, half: HalfPrecisionBackend) -> None:
        super().__init__(classifier)
        self.half = half
        self.input_dtype = rounded_to_half(classifier)
        self._copy: Callable[[Tensor], Tensor] | None = None
        """Answers a block."""
        self._layers: dict[str, Short] | None = None
        self._fused = False
        """Layers in eight bits, by name, and whether kernels of our own are used: else it is not what was compared."""
        self._refused = ""
        self._declined = 0
        """So many labels were not worth preparing it."""

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process; layers go along, on the CPU."""
        layers = None if self._layers is None else {n: s._replace(eight=s.eight.cpu()) for n, s in self._layers.items()}
        return {**super().__getstate__(), "_copy": None, "_layers": layers}

    def release(self) -> None:
        """Drop the copy, and what was seen for it."""
        self._copy, self._layers, self._refused, self._declined = None, None, "", 0

    def shrink(self) -> None:
        """Drop the copy, and keep what was seen for it."""
        self._copy = None

    def min_batch(self, input_numel: int) -> int:
        """Whole blocks: the copy is compiled for batches of one size."""
        return block_size(input_numel)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy; the last block is filled up by its own images."""
        self._check_unchanged()
        if self._refused:
            raise UnusableError(self._refused)
        size = block_size(inputs[0].numel())
        blocks = torch.split(pad_to_blocks(inputs, size), size)
        try:
            answers = self._made(blocks[0])
            done = [answers(block) for block in blocks]
        except _DeclinedError:
            raise
        except UnusableError as error:
            self._copy, self._refused = None, str(error)
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._copy, self._refused = None, "there is no room for eight bits"
        else:
            self.expected -= len(inputs)
            return torch.cat(done)[: len(inputs)]
        if inputs.is_cuda:
            torch.cuda.empty_cache()
        raise UnusableError(self._refused)

    def _made(self, block: Tensor) -> Callable[[Tensor], Tensor]:
        """The copy's answers; UnusableError if it is not worth preparing for what is to come, or saves nothing."""
        if self._copy is None:
            known = self._layers is not None  # and compared: the same is made again
            if not known and block.is_cuda and self.expected <= self._declined:
                raise _DeclinedError("preparing eight bits takes longer than they save")
            block = block.clone()  # a network may write into what it is given
            seen: dict[str, Seen] = {}

            def looked_at(module: nn.Module) -> nn.Module:
                module = apart(halved(module))
                seen.update({} if known else seen_inputs(module, block.half()))
                return module

            copied = own_copy(self.classifier, looked_at)
            copied.dtype = torch.float16
            half = self._seconds_of_half(block) if block.is_cuda and not known else math.inf
            if math.isfinite(half) and self.expected / len(block) * half * SAVED < PREPARING:
                self._declined = self.expected
                raise _DeclinedError("preparing eight bits takes longer than they save")
            fused = self._fused if known else has_kernels(block.device)
            if fused and not has_kernels(block.device):
                raise UnusableError("it was compared with kernels that are not for this device")
            if self._layers is None:
                self._layers = {n: Short.of(cast("nn.Linear", copied.module.get_submodule(n)), seen[n]) for n in seen}
                seen.clear()
            copied.module = shortened(copied.module, self._layers, fused=fused)
            answers = _on_a_gpu(copied, block, known) if block.is_cuda else partial(_asked, copied)
            self._fused = is_fused(copied.module)
            if math.isfinite(half):
                # Where more labels are doubtful than it saves, half precision alone, compiled, is faster.
                self.max_uncertain_share = 0.9 - _seconds(lambda: answers(block), block.device) / half
            if block.is_cuda and self.max_uncertain_share <= 0:
                raise UnusableError("eight bits are no faster than half precision here")
            self._copy = answers
        return self._copy

    def _seconds_of_half(self, block: Tensor) -> float:
        """Of a block in half precision, not compiled: whether that pays is seen when it is known what goes by it."""
        self.half.refresh()
        expected, self.half.expected = self.half.expected, 0
        try:
            return _seconds(lambda: self.half.logits(block), block.device)
        finally:
            self.half.expected = expected
            self.half.release()


class _DeclinedError(UnusableError):
    """Not for so few labels."""


def _asked(copied: TorchClassifier, block: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        return guarded(copied.checked_logits, block)


def _on_a_gpu(copied: TorchClassifier, block: Tensor, known: bool) -> Callable[[Tensor], Tensor]:
    """The copy's answers to blocks like this one: compiled, and played back, since Python would not keep up.

    Where kernels of our own fail, and it is not `known` to have been compared with them, it does without.
    """
    for part in _repeated(copied.module):
        part.compile(dynamic=False)
    asked, shape = partial(_asked, copied), block.shape
    try:
        asked(block)
    except UnusableError:
        if known or not is_fused(copied.module):
            raise
        unfuse(copied.module)
        asked(block)
    with suppress(UnusableError, RuntimeError):  # a network that waits for its own numbers cannot be recorded
        graph = guarded(partial(Graph, copied), block)
        return lambda given: graph(given) if given.shape == shape else asked(given)
    return asked


def seen_inputs(module: nn.Module, examples: Tensor) -> dict[str, Seen]:
    """What the inputs of large linear layers are like, by the layers' names.

    ValueError if most of the module's work is done elsewhere.
    """
    layers = {name: part for name, part in module.named_modules() if type(part) is nn.Linear and _worth_it(part)}
    work: list[int] = []
    with FlopCounterMode(display=False) as counter:
        _watched(module, layers, examples.clone(), lambda n, x: work.append(2 * x.numel() * layers[n].out_features))
    if sum(work) < MOSTLY * counter.get_total_flops() or not work:
        raise ValueError("its linear layers do too little of the work")
    seen: dict[str, Seen] = {}
    _watched(module, layers, examples, lambda name, inputs: seen.update({name: Seen.of(inputs)}))
    return {name: one for name, one in seen.items() if math.isfinite(one.size)}


def _watched(
    module: nn.Module, layers: Mapping[str, nn.Module], examples: Tensor, tell: Callable[[str, Tensor], object]
) -> None:
    """Ask a network, and tell the inputs of some of its layers."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: tell(name, given[0]) and None)
        for name, layer in layers.items()
    ]
    try:
        module(examples)
    finally:
        for hook in hooks:
            hook.remove()


def _worth_it(layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    return all(size >= FEWEST_FEATURES and size % 16 == 0 for size in sizes)


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Parts to be compiled by themselves: those that come again and again are compiled once; otherwise the whole."""
    for part in module.modules():
        children = list(part.children()) if isinstance(part, (nn.Sequential, nn.ModuleList)) else []
        same = [child for child in children if type(child) is type(children[0])]
        if len(same) > 2 and any(isinstance(inner, EightLinear) for inner in same[0].modules()):
            return same
    return [module]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the fastest of three calls on a GPU, after two that make kernels."""
    best = math.inf
    for turn in range(5):
        torch.cuda.synchronize(device)
        started = time.monotonic()
        work()
        torch.cuda.synchronize(device)
        best = min(best, time.monotonic() - started) if turn > 1 else best
    return best
