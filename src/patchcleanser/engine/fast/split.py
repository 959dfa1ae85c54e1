"""3xTF32: each float32 matrix product as three TF32 products, on a GPU's matrix units.

A float32 number has 24 significant bits, and TF32 products read 11 of them. So a number is split exactly into a high
part (its first 11 bits) and a low part (the rest). Of the four products of parts, low × low is too small to matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import PatchEmbed, StdConv2d
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.engine.fast.backends import Backend, BusyError, UnusableError, own_copy
from patchcleanser.engine.fast.fused_layers import FlatPatchEmbed, Rule, replace_layers, standardised
from patchcleanser.engine.float32 import exclusive_float32, is_exclusive, override, strict_settings
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

HIGH_BITS = -(1 << 13)
"""Keeps sign, exponent and the 10 stored bits that TF32 has, of float32's 23."""


class TripleTf32Backend(Backend):
    """A copy of the network whose linear layers and convolutions are 3xTF32; all else is plain float32."""

    resolution = 8 * torch.finfo(torch.float32).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self._built: TorchClassifier | None = None
        self._too_large = False
        """Whether there was no memory for the copy; `release` does not forget that."""

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy; BusyError while another thread computes in float32, which must not be disturbed.

        UnusableError if memory runs out: the exact engine needs less, and smaller chunks would slow all backends down.
        """
        self._check_unchanged()
        if self._too_large:
            raise UnusableError("there is no memory for 3xTF32")
        with exclusive_float32(inputs.device) as granted:
            if not granted:
                raise BusyError("another thread computes in float32")
            if self._built is None:
                self._built = own_copy(self.classifier, _split_layers)
            try:
                return self._built.checked_logits(inputs)
            except OutputError as error:
                raise UnusableError(f"{type(self.classifier.module).__name__} does not work in 3xTF32") from error
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._built, self._too_large = None, True
        torch.cuda.empty_cache()
        raise UnusableError("there is no memory for 3xTF32")


@contextmanager
def in_tf32() -> Iterator[None]:
    """TF32 products, inside `exclusive_float32`.

    The settings are the program's: other threads that compute meanwhile, outside this package, get TF32 too.
    """
    if not is_exclusive():
        raise RuntimeError("in_tf32 outside exclusive_float32 would change what other threads compute")
    cudnn = torch.backends.cudnn  # torch wants both its kinds of layers alike
    owners = (torch.backends.cuda.matmul, cudnn, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    tf32 = [
        setting._replace(value="tf32" if setting.value == "ieee" else True, priority=2)
        for setting in strict_settings()
        if setting.owner in owners and setting.name in ("fp32_precision", "allow_tf32")
    ]
    with override(*tf32):
        yield


def high_low(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first 11 bits of float32 numbers and the rest, which add up to them.

    >>> high, low = high_low(torch.tensor([1 + 2**-10 + 2**-20]))
    >>> high.item() == 1 + 2**-10, low.item() == 2**-20
    (True, True)
    """
    high = (numbers.view(torch.int32) & HIGH_BITS).view(torch.float32)
    return high, numbers - high


def split_inputs(numbers: Tensor) -> Tensor:
    """Inputs [N, C, …] as [N, 3 C, …]: high, low, high. Times `split_weights`, they sum low terms first."""
    high, low = high_low(numbers)
    return torch.cat([high, low, high], dim=1)


def split_weights(numbers: Tensor) -> Tensor:
    """Weights [out, C, …] as [out, 3 C, …]: low, high, high."""
    high, low = high_low(numbers)
    return torch.cat([low, high, high], dim=1)


class SplitLinear(nn.Module):
    """A linear layer as three products."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        flat, weights = inputs.reshape(-1, inputs.shape[-1]), self.layer.weight
        with in_tf32():
            outputs = split_inputs(flat) @ split_weights(weights).t()
        outputs = outputs if self.layer.bias is None else outputs.add_(self.layer.bias)
        return outputs.view(*inputs.shape[:-1], -1)


class SplitConv(nn.Module):
    """A convolution as three."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    @staticmethod
    def of(layer: nn.Conv2d) -> SplitConv | None:
        """None where GPUs have no fast kernel: grouped convolutions, and padding other than zeros."""
        return SplitConv(layer) if layer.groups == 1 and layer.padding_mode == "zeros" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, in, H, W] → [N, out, h, w]."""
        where: tuple[Any, ...] = (self.layer.stride, self.layer.padding, self.layer.dilation)
        with in_tf32():
            weights = split_weights(self.layer.weight)
            return functional.conv2d(split_inputs(inputs), weights, self.layer.bias, *where)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: SplitLinear,
    nn.Conv2d: SplitConv.of,
    StdConv2d: lambda conv: SplitConv.of(standardised(conv)),
    PatchEmbed: FlatPatchEmbed.of,
}
"""Code that reads a replaced layer's weights gets an error, never other numbers."""


def _split_layers(module: nn.Module) -> nn.Module:
    split = replace_layers(module, RULES).eval().requires_grad_(False)
    if not any(isinstance(part, (SplitLinear, SplitConv)) for part in split.modules()):
        raise ValueError("it has no layer whose products could be split")
    return split
