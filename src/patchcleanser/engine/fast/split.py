"""Nearly float32, faster: each product of matrices as three products of shorter numbers, on a GPU's matrix units.

A float32 number has 24 bits, and a GPU's fast products (TF32) look at 11 of them. So a number is cut into its first
11 bits and the rest, exactly; of the four products of pieces the one of the two rests is too small to matter.
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
from patchcleanser.engine.fast.backends import BusyError, DerivedBackend, UnusableError, own_copy
from patchcleanser.engine.fast.fused_layers import FlatPatchEmbed, Rule, replaced, standardised
from patchcleanser.engine.float32 import exclusive_float32, is_exclusive, override, strict_settings
from patchcleanser.errors import OutputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.torch import TorchClassifier

FIRST_BITS = -(1 << 13)
"""Keeps sign, exponent and the 10 stored bits that TF32 has, of float32's 23."""


class TripleTf32Backend(DerivedBackend):
    """A copy of the network whose linear layers and convolutions work on pieces; all else is plain float32."""

    resolution = 8 * torch.finfo(torch.float32).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier)
        self._copy: TorchClassifier | None = None
        self._too_large = False

    def __getstate__(self) -> dict[str, Any]:
        """What was made belongs to this process."""
        return {**super().__getstate__(), "_copy": None}

    def release(self) -> None:
        """Drop the copy; that there was no room for one is remembered."""
        self._copy = None

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the copy; UnusableError while another thread computes in float32, which must not be disturbed.

        Likewise if there is no room for it: the exact way needs less, and small chunks would slow down all others.
        """
        self._check_unchanged()
        if self._too_large:
            raise UnusableError("there is no room for a network in pieces")
        with exclusive_float32(inputs.device) as granted:
            if not granted:
                raise BusyError("another thread computes in float32")
            if self._copy is None:
                self._copy = own_copy(self.classifier, _split)
            try:
                return self._copy.checked_logits(inputs)
            except OutputError as error:
                raise UnusableError(f"{type(self.classifier.module).__name__} does not work in pieces") from error
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._copy, self._too_large = None, True
        torch.cuda.empty_cache()
        raise UnusableError("there is no room for a network in pieces")


@contextmanager
def in_tf32() -> Iterator[None]:
    """TF32 products, which look at the first eleven bits of each number, inside `exclusive_float32`.

    The settings are the program's: what other threads compute meanwhile, outside this package, is short too.
    """
    if not is_exclusive():
        raise RuntimeError("in_tf32 outside exclusive_float32 would change what other threads compute")
    cudnn = torch.backends.cudnn  # torch wants both its kinds of layers alike
    owners = (torch.backends.cuda.matmul, cudnn, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    short = [
        setting._replace(value="tf32" if setting.value == "ieee" else True, priority=2)
        for setting in strict_settings()
        if setting.owner in owners and setting.name in ("fp32_precision", "allow_tf32")
    ]
    with override(*short):
        yield


def pieces(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first 11 bits of float32 numbers and the rest, which add up to them.

    >>> first, rest = pieces(torch.tensor([1 + 2**-10 + 2**-20]))
    >>> first.item() == 1 + 2**-10, rest.item() == 2**-20
    (True, True)
    """
    first = (numbers.view(torch.int32) & FIRST_BITS).view(torch.float32)
    return first, numbers - first


def side_by_side(numbers: Tensor, *, swapped: bool = False) -> Tensor:
    """The first pieces, rests and first pieces of [N, C, …] as [N, 3 C, …]; of what these are to meet, the rests first.

    A product of both is the three products that matter, the small ones first, added up where they are computed.
    """
    first, rest = pieces(numbers)
    return torch.cat([rest, first, first] if swapped else [first, rest, first], dim=1)


class SplitLinear(nn.Module):
    """A linear layer in three products."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        flat, weights = inputs.reshape(-1, inputs.shape[-1]), self.layer.weight
        with in_tf32():
            outputs = side_by_side(flat) @ side_by_side(weights, swapped=True).t()
        outputs = outputs if self.layer.bias is None else outputs.add_(self.layer.bias)
        return outputs.view(*inputs.shape[:-1], -1)


class SplitConv(nn.Module):
    """A convolution in three."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    @staticmethod
    def of(layer: nn.Conv2d) -> SplitConv | None:
        """None where a GPU has no fast product: channels on their own, and images that are padded with something."""
        return SplitConv(layer) if layer.groups == 1 and layer.padding_mode == "zeros" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, in, H, W] → [N, out, h, w]."""
        where: tuple[Any, ...] = (self.layer.stride, self.layer.padding, self.layer.dilation)
        with in_tf32():
            weights = side_by_side(self.layer.weight, swapped=True)
            return functional.conv2d(side_by_side(inputs), weights, self.layer.bias, *where)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: SplitLinear,
    nn.Conv2d: SplitConv.of,
    StdConv2d: lambda conv: SplitConv.of(standardised(conv)),
    PatchEmbed: FlatPatchEmbed.of,
}
"""Whoever reads a replaced layer's weights gets an error, never other numbers."""


def _split(module: nn.Module) -> nn.Module:
    split = replaced(module, RULES).eval().requires_grad_(False)
    if not any(isinstance(part, (SplitLinear, SplitConv)) for part in split.modules()):
        raise ValueError("it has no layer whose products could be split")
    return split
