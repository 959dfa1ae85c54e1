"""FP8 linear layers, faster than half precision: for labels whose margin is large."""

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
from patchcleanser.engine.fast.backends import Backend, UnusableError, block_size, own_copy, pad_to_blocks
from patchcleanser.engine.fast.float8.layers import (
    FLOAT8,
    Float8Linear,
    Float8Weight,
    disable_triton,
    has_triton_kernels,
    split_mlps,
    to_float8,
    uses_triton,
)
from patchcleanser.engine.fast.half import Graph, HalfPrecisionBackend, run_half, to_half

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

MIN_FEATURES = 256
MIN_FLOP_SHARE = 0.6
"""Smaller linear layers take no time worth saving, and large ones must do this share of the work."""

PREPARE_SECONDS = 20.0
SAVED_SHARE = 0.2
"""How long preparing takes, and the share of the time it is assumed to save (on an H200: 15 s, 43%)."""


class Float8Backend(Backend):
    """A half-precision copy of the network with FP8 linear layers, for whole blocks of clean images.

    That is enough for most labels: of well-trained transformers 2 to 8 in 100 are uncertain, and go to the
    half-precision copy. Attacked images may hold numbers of any size, and never come here.
    """

    resolution = torch.finfo(FLOAT8).eps / 8
    trusted_inputs_only = True

    def __init__(self, classifier: TorchClassifier, half: HalfPrecisionBackend) -> None:
        super().__init__(classifier)
        self.half = half
        self.input_dtype = half.input_dtype
        self._built: Callable[[Tensor], Tensor] | None = None
        """Computes the logits of a block."""
        self._float8_weights: dict[str, Float8Weight] | None = None
        self._triton = False
        """FP8 weights by layer, and whether Triton kernels are used: as compared, so a copy is rebuilt just so."""
        self._refused = ""
        self._declined = 0
        """For how many labels preparing did not pay."""

    def __getstate__(self) -> dict[str, Any]:
        """FP8 weights go along, on the CPU."""
        weights = self._float8_weights and {
            n: w._replace(weight=w.weight.cpu()) for n, w in self._float8_weights.items()
        }
        return {**super().__getstate__(), "_float8_weights": weights}

    def release(self) -> None:
        self._built, self._float8_weights, self._refused, self._declined = None, None, "", 0

    def shrink(self) -> None:
        self._built = None

    def min_batch(self, input_numel: int) -> int:
        return block_size(input_numel)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy, which is compiled for one batch size: the last block is padded with its own images."""
        self._check_unchanged()
        if self._refused:
            raise UnusableError(self._refused)
        size = block_size(inputs[0].numel())
        blocks = torch.split(pad_to_blocks(inputs, size), size)
        try:
            forward = self._build(blocks[0])
            logits = [forward(block) for block in blocks]
        except _DeclinedError:
            raise
        except UnusableError as error:
            self._built, self._refused = None, str(error)
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._built, self._refused = None, "there is no memory for FP8"
        else:
            self.expected -= len(inputs)
            return torch.cat(logits)[: len(inputs)]
        if inputs.is_cuda:
            torch.cuda.empty_cache()
        raise UnusableError(self._refused)

    def _build(self, block: Tensor) -> Callable[[Tensor], Tensor]:
        """The copy's forward pass; UnusableError if preparing it does not pay for the labels to come."""
        if self._built is None:
            calibrated = self._float8_weights is not None  # then the same copy is built again
            if not calibrated and block.is_cuda and self.expected <= self._declined:
                raise _DeclinedError("preparing FP8 takes longer than it saves")
            block = block.clone()  # a network may write into its inputs
            input_rms: dict[str, float] = {}

            def prepare(module: nn.Module) -> nn.Module:
                module = split_mlps(to_half(module))
                input_rms.update({} if calibrated else measure_input_rms(module, block.half()))
                return module

            classifier = own_copy(self.classifier, prepare)
            classifier.dtype = torch.float16
            half = self._seconds_of_half(block) if block.is_cuda and not calibrated else math.inf
            if math.isfinite(half) and self.expected / len(block) * half * SAVED_SHARE < PREPARE_SECONDS:
                self._declined = self.expected
                raise _DeclinedError("preparing FP8 takes longer than it saves")
            triton = self._triton if calibrated else has_triton_kernels(block.device)
            if triton and not has_triton_kernels(block.device):
                raise UnusableError("it was compared with Triton kernels that are not for this device")
            if self._float8_weights is None:
                layers = {name: cast("nn.Linear", classifier.module.get_submodule(name)) for name in input_rms}
                self._float8_weights = {name: Float8Weight.of(layers[name], input_rms[name]) for name in layers}
            classifier.module = to_float8(classifier.module, self._float8_weights, triton=triton)
            if block.is_cuda:
                forward = _compile_and_record(classifier, block, calibrated)
            else:
                forward = partial(_forward, classifier)
            self._triton = uses_triton(classifier.module)
            if math.isfinite(half):
                # If more labels are uncertain than it saves, half precision alone, compiled, is faster.
                self.max_uncertain_share = 0.9 - _seconds(lambda: forward(block), block.device) / half
            if block.is_cuda and self.max_uncertain_share <= 0:
                raise UnusableError("FP8 is no faster than half precision here")
            self._built = forward
        return self._built

    def _seconds_of_half(self, block: Tensor) -> float:
        """Seconds of a block in half precision, not compiled: how many labels it gets is not known yet."""
        self.half.refresh()
        expected, self.half.expected = self.half.expected, 0
        try:
            return _seconds(lambda: self.half.logits(block), block.device)
        finally:
            self.half.expected = expected
            self.half.release()


class _DeclinedError(UnusableError):
    """Preparing does not pay for so few labels."""


def _forward(classifier: TorchClassifier, block: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        return run_half(classifier.checked_logits, block)


def _compile_and_record(classifier: TorchClassifier, block: Tensor, calibrated: bool) -> Callable[[Tensor], Tensor]:
    """The copy's forward pass for blocks like this one: compiled, and a CUDA graph, since Python would not keep up.

    Where Triton kernels fail, torch's are used, unless it was `calibrated` with them.
    """
    for part in _compiled_parts(classifier.module):
        part.compile(dynamic=False)
    forward, shape = partial(_forward, classifier), block.shape
    try:
        forward(block)
    except UnusableError:
        if calibrated or not uses_triton(classifier.module):
            raise
        disable_triton(classifier.module)
        forward(block)
    with suppress(UnusableError, RuntimeError):  # a network that branches on its own numbers cannot be recorded
        graph = run_half(partial(Graph, classifier), block)
        return lambda inputs: graph(inputs) if inputs.shape == shape else forward(inputs)
    return forward


def measure_input_rms(module: nn.Module, examples: Tensor) -> dict[str, float]:
    """The root mean squares of the inputs of large linear layers, by the layers' names.

    ValueError if other layers do most of the module's work.
    """
    layers = {name: part for name, part in module.named_modules() if type(part) is nn.Linear and _is_large(part)}
    work: list[int] = []
    with FlopCounterMode(display=False) as counter:
        _hooked(module, layers, examples.clone(), lambda n, x: work.append(2 * x.numel() * layers[n].out_features))
    if sum(work) < MIN_FLOP_SHARE * counter.get_total_flops() or not work:
        raise ValueError("its linear layers do too little of the work")
    input_rms: dict[str, float] = {}
    _hooked(module, layers, examples, lambda name, x: input_rms.update({name: float(x.float().square().mean().sqrt())}))
    return {name: rms for name, rms in input_rms.items() if math.isfinite(rms)}


def _hooked(
    module: nn.Module, layers: Mapping[str, nn.Module], examples: Tensor, on_input: Callable[[str, Tensor], object]
) -> None:
    """Run a network, and call `on_input` with the inputs of some of its layers."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: on_input(name, inputs[0]) and None)
        for name, layer in layers.items()
    ]
    try:
        module(examples)
    finally:
        for hook in hooks:
            hook.remove()


def _is_large(layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    return all(size >= MIN_FEATURES and size % 16 == 0 for size in sizes)


def _compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Parts to compile by themselves: repeated blocks, which are then compiled once; otherwise the whole module."""
    for part in module.modules():
        children = list(part.children()) if isinstance(part, (nn.Sequential, nn.ModuleList)) else []
        same = [child for child in children if type(child) is type(children[0])]
        if len(same) > 2 and any(isinstance(inner, Float8Linear) for inner in same[0].modules()):
            return same
    return [module]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of three calls on a GPU, after two that build kernels."""
    best = math.inf
    for turn in range(5):
        torch.cuda.synchronize(device)
        started = time.monotonic()
        work()
        torch.cuda.synchronize(device)
        best = min(best, time.monotonic() - started) if turn > 1 else best
    return best
