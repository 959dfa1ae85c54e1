"""Linear layers in eight bits, twice as fast as in half precision: for labels that have no other near them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.copied import block_size, guarded, halved
from patchcleanser.classifiers.rewrites import FirstTokenBlock, FusedMlp, replaced
from patchcleanser.classifiers.ways import Derived, UnusableError, Way, own_copy

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

SHORT = torch.float8_e4m3fn
LARGEST = torch.finfo(SHORT).max
"""Three bits behind the point, and numbers from 2⁻⁹ to 448: what is larger is none, and its label is computed again."""

USUAL = 8.0
"""What the usual size of a layer's inputs becomes: 56 times as much can be told still, and a 4000th."""

MOST = 2.0**14
"""What numbers are multiplied by at most: half precision ends soon after."""

FEWEST_FEATURES = 256
"""Smaller layers take no time worth saving."""

PREPARING = 20.0
SAVED = 0.2
"""Seconds that preparing takes, and the share of the time it saves, before that is seen (on an H200: 10 s, 27%)."""


class Eighth(Derived):
    """A half-precision copy of the network whose linear layers have eight bits, for whole blocks of clean images.

    That is enough for most labels: of well-trained transformers 2 in 100 are doubtful, and go by the half-precision
    copy. Attacked images may hold numbers of any size, and never go this way.
    """

    resolution = torch.finfo(SHORT).eps / 2
    clean_only = True

    def __init__(self, classifier: TorchClassifier, finer: Way) -> None:
        super().__init__(classifier)
        self.finer: Way = finer
        self._copy: TorchClassifier | None = None
        self._refused = ""

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process, and so does what pays."""
        return {**super().__getstate__(), "_copy": None, "_refused": ""}

    def forget(self) -> None:
        """Drop the copy."""
        super().forget()
        self._copy, self._refused = None, ""

    def fewest(self, numbers: int) -> int:
        """Whole blocks: the copy is compiled for batches of one size."""
        return block_size(numbers)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy; the last block is filled up by its own images."""
        self._follow()
        if self._refused:
            raise UnusableError(self._refused)
        size = block_size(inputs[0].numel())
        at = torch.arange(-(-len(inputs) // size) * size, device=inputs.device) % len(inputs)
        blocks = torch.split(inputs[at] if len(at) > len(inputs) else inputs, size)
        try:
            copied = self._made(blocks[0])
            done = [self._asked(copied, block) for block in blocks]
        except UnusableError as error:
            self._copy, self._refused = None, str(error)
            raise
        self.expected -= len(inputs)
        return torch.cat(done)[: len(inputs)]

    def _made(self, block: Tensor) -> TorchClassifier:
        """The copy; UnusableError if it is not worth preparing for what is still to come, or saves nothing."""
        if self._copy is None:
            copied = own_copy(self.classifier, lambda module: eighth(halved(module), block.half()))
            copied.dtype = torch.float16
            if block.is_cuda:
                half = self._seconds_of_half(block)
                if self.expected / len(block) * half * SAVED < PREPARING:
                    raise UnusableError("preparing eight bits takes longer than they save")
                copied.module.compile(dynamic=False)
                seconds = _seconds(lambda: self._asked(copied, block))
                # Where more labels are doubtful than it saves, half precision alone is faster.
                self.bearable = 0.9 * (1 - seconds / half)
                if self.bearable <= 0:
                    raise UnusableError("eight bits are no faster than half precision here")
                self.finer.expected = int(self.bearable * self.expected)  # at most
            self._copy = copied
        return self._copy

    def _asked(self, copied: TorchClassifier, block: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            return guarded(copied.checked_logits, block)

    def _seconds_of_half(self, block: Tensor) -> float:
        """Of a block in half precision, not compiled: whether that pays is seen when it is known what goes by it."""
        expected, self.finer.expected = self.finer.expected, 0
        try:
            return _seconds(lambda: self.finer.logits(block))
        finally:
            self.finer.expected = expected
            self.finer.forget()


class EightLinear(nn.Module):
    """A linear layer whose inputs and weights have eight bits; sums are longer, and outputs as the layer's were."""

    eight: Tensor
    up: Tensor
    down: Tensor
    eight_down: Tensor

    def __init__(self, layer: nn.Linear, usual: float) -> None:
        super().__init__()
        self.bias = layer.bias
        weight = layer.weight.detach().float()
        up = _power_of_two(min(USUAL / max(usual, 1e-9), MOST))
        eight_up = _power_of_two(min(LARGEST / max(float(weight.abs().max()), 1e-9), MOST))
        self.register_buffer("eight", (weight * eight_up).to(SHORT))
        self.register_buffer("up", weight.new_tensor(up, dtype=layer.weight.dtype))
        self.register_buffer("down", weight.new_tensor(1 / up))
        self.register_buffer("eight_down", weight.new_tensor(1 / eight_up))

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        larger = inputs.reshape(-1, inputs.shape[-1]) * self.up
        # Some kernels would take the largest number for what is larger still.
        known = torch.where(larger.abs() <= LARGEST, larger, torch.nan)
        outputs: Tensor = torch._scaled_mm(
            known.to(SHORT),
            self.eight.t(),
            scale_a=self.down,
            scale_b=self.eight_down,
            bias=self.bias,
            out_dtype=inputs.dtype,
            use_fast_accum=True,
        )
        return outputs.view(*inputs.shape[:-1], -1)


class Gelu(nn.Module):
    """GELU by its tanh form, with the exponential that a GPU has an instruction for."""

    def forward(self, x: Tensor) -> Tensor:
        """[…] → […]."""
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def eighth(module: nn.Module, examples: Tensor) -> nn.Module:
    """The module with its large linear layers in eight bits, in place; how large numbers are is seen with examples."""
    module = replaced(module, {FusedMlp: lambda mlp: nn.Sequential(mlp.fc1, Gelu(), mlp.fc2)})
    usual = _usual_sizes(module, examples)

    def shortened(layer: nn.Linear) -> nn.Module | None:
        return EightLinear(layer, usual[layer]) if layer in usual else None

    # The last block of a ViT works on one token, and looks into its layers.
    module = replaced(module, {nn.Linear: shortened, FirstTokenBlock: lambda block: block})
    if not any(isinstance(part, EightLinear) for part in module.modules()):
        raise ValueError("it has no linear layers worth shortening")
    return module.eval()


def _usual_sizes(module: nn.Module, examples: Tensor) -> dict[nn.Module, float]:
    """How large the inputs of the linear layers that are worth it usually are (root of their mean square)."""
    usual: dict[nn.Module, float] = {}

    def look(layer: nn.Module, given: tuple[Any, ...]) -> None:
        usual[layer] = float(given[0].float().square().mean().sqrt())

    layers = [part for part in module.modules() if type(part) is nn.Linear and _worth_it(part)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        if layers:
            module(examples)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: size for layer, size in usual.items() if math.isfinite(size)}


def _worth_it(layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    return all(size >= FEWEST_FEATURES and size % 16 == 0 for size in sizes)


def _power_of_two(number: float) -> float:
    """The largest power of two that is no larger: multiplying by it changes no digit.

    >>> _power_of_two(9.0), _power_of_two(0.3)
    (8.0, 0.25)
    """
    return 2.0 ** math.floor(math.log2(number))


def _seconds(work: Callable[[], object]) -> float:
    """Of the fastest of three calls on a GPU, after two that make kernels."""
    best = math.inf
    for turn in range(5):
        torch.cuda.synchronize()
        started = time.monotonic()
        work()
        torch.cuda.synchronize()
        best = min(best, time.monotonic() - started) if turn > 1 else best
    return best
