"""How far layers look: each output of a network's first layers sees a small window of pixels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import BatchNormAct2d, DropPath, LayerNorm2d
from torch import fx, nn
from torch.nn import functional

from patchcleanser.classifiers.settings import others_wait


class NotLocalError(Exception):
    """What comes out of a layer depends on more than a window of pixels, or nobody knows on what."""


class Field(NamedTuple):
    """Along one axis, output u sees the pixels from step * u + low to step * u + high, and no others.

    >>> stem = Field().through(kernel=7, stride=2, padding=3)
    >>> stem, stem.through(kernel=3, stride=2, padding=1)
    (Field(step=2, low=-3, high=3), Field(step=4, low=-5, high=5))
    """

    step: int = 1
    low: int = 0
    high: int = 0

    def through(self, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Field:
        """What is seen through one more layer that slides a window."""
        ahead = dilation * (kernel - 1) - padding
        return Field(self.step * stride, self.low - self.step * padding, self.high + self.step * ahead)

    def joined(self, other: Field) -> Field:
        """What a sum of two outputs sees."""
        if self.step != other.step:
            raise NotLocalError(f"outputs {self.step} and {other.step} px apart are put together")
        return Field(self.step, min(self.low, other.low), max(self.high, other.high))

    def touched(self, start: int, stop: int, outputs: int) -> tuple[int, int]:
        """The outputs, from one to before another, that see one of the pixels start … stop - 1.

        >>> Field(step=4, low=-5, high=5).touched(start=8, stop=12, outputs=56)
        (1, 5)
        """
        first, last = -(-(start - self.high) // self.step), (stop - 1 - self.low) // self.step
        return min(max(0, first), outputs), max(0, min(outputs, last + 1))

    def crop(self, first: int, stop: int, side: int) -> tuple[int, int]:
        """Pixels from which the outputs first … stop - 1 come out as they do from all pixels of a side.

        A crop begins at a multiple of `step`, where outputs of every layer begin. All that these outputs see lies in
        it, or beyond the image's border, to which the crop then reaches. So on the way to them no layer looks over an
        edge of the crop that is none of the image's. Lengths are few, so that many crops can be computed at once.

        >>> Field(step=4, low=-5, high=5).crop(first=10, stop=14, side=224)
        (32, 64)
        """
        start = max(0, self.step * first + self.low) // self.step * self.step
        end = min(side, self.step * (stop - 1) + self.high + 1)
        length = -(-(end - start) // QUANTUM) * QUANTUM
        if start + length <= side:
            return start, start + length
        return max(0, side - length) // self.step * self.step, side


QUANTUM = 32
"""Crops are multiples of this many pixels long."""

Fields = tuple[Field, Field]
"""Down and across."""

PIXELS: Fields = (Field(), Field())
"""Each pixel sees itself."""

POINTWISE: tuple[type[nn.Module], ...] = (
    nn.BatchNorm2d,
    LayerNorm2d,
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    DropPath,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
)
"""Layers that, in eval mode, look at one place at a time."""

FUNCTIONS: tuple[Any, ...] = (
    operator.add,
    operator.iadd,
    operator.mul,
    torch.add,
    torch.mul,
    torch.relu,
    torch.sigmoid,
    functional.relu,
    functional.relu6,
    functional.gelu,
    functional.silu,
    functional.hardswish,
)
IN_PLACE = (operator.iadd, "add_", "mul_")
METHODS = ("add", "add_", "mul", "mul_", "relu", "relu_", "sigmoid", "contiguous")
"""Of one place at a time, likewise, between layers."""


def _conv(layer: nn.Conv2d, fields: Fields) -> Fields:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise NotLocalError(f"padding {layer.padding_mode} {layer.padding}")
    return _slid(fields, layer.kernel_size, layer.stride, layer.padding, layer.dilation)


def _max_pool(layer: nn.MaxPool2d, fields: Fields) -> Fields:
    if layer.return_indices:
        raise NotLocalError("places of the largest")
    return _slid(fields, layer.kernel_size, layer.stride, layer.padding, layer.dilation)


def _mean_pool(layer: nn.AvgPool2d, fields: Fields) -> Fields:
    return _slid(fields, layer.kernel_size, layer.stride, layer.padding, 1)


def _pad(layer: nn.ConstantPad2d, fields: Fields) -> Fields:
    left, _, top, _ = layer.padding
    if min(layer.padding) < 0:
        raise NotLocalError("pixels are cut off")
    return _slid(fields, 1, 1, (top, left), 1)


def _norm_act(layer: BatchNormAct2d, fields: Fields) -> Fields:
    return fields_of(layer.act, fields_of(layer.drop, fields))


LOOKING: dict[type[nn.Module], Callable[[Any, Fields], Fields]] = {
    nn.Conv2d: _conv,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _mean_pool,
    nn.ConstantPad2d: _pad,
    nn.ZeroPad2d: _pad,
    BatchNormAct2d: _norm_act,
}
"""What is seen through a layer, if fields are seen before it."""


def _slid(fields: Fields, *numbers: Any) -> Fields:
    """Through a layer with these kernels, strides, paddings and dilations, each one number or two."""
    down, across = zip(*(n if isinstance(n, tuple) else (n, n) for n in numbers), strict=True)
    return fields[0].through(*down), fields[1].through(*across)


class _Tracer(fx.Tracer):
    """Follows the code of blocks, and takes whatever has no parts of its own for one step."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in (*POINTWISE, *LOOKING) or next(m.children(), None) is None


def fields_of(module: nn.Module, fields: Fields = PIXELS) -> Fields:
    """What the outputs of a layer or block see, if its inputs see `fields`; NotLocalError if that is no window.

    Layers are known by their exact class, and the code of blocks of layers is followed: what is not known is not local.

    >>> fields_of(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, (1, 5))))
    (Field(step=2, low=-1, high=1), Field(step=2, low=-1, high=9))
    """
    if type(module) in POINTWISE:
        return fields
    if type(module) in LOOKING:
        return LOOKING[type(module)](module, fields)
    if next(module.children(), None) is None:
        raise NotLocalError(type(module).__name__)
    try:
        with others_wait():
            graph = _Tracer().trace(module)
    except Exception as error:  # code that asks what is in an image, or does what cannot be followed
        raise NotLocalError(f"{type(module).__name__} cannot be followed: {error}") from error
    return _followed(module, graph, fields)


def _followed(module: nn.Module, graph: fx.Graph, fields: Fields) -> Fields:
    seen: dict[fx.Node, Fields] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if seen:
                raise NotLocalError("more than one input")
            seen[node] = fields
            continue
        if node.op == "output":
            break
        inside = [seen[given] for given in node.all_input_nodes]
        if not inside or not _known(module, node):
            raise NotLocalError(f"{node.op} {node.target}")
        before = inside[0]
        for other in inside[1:]:
            before = before[0].joined(other[0]), before[1].joined(other[1])
        seen[node] = fields_of(module.get_submodule(str(node.target)), before) if node.op == "call_module" else before
    result = node.args[0]
    if not isinstance(result, fx.Node):
        raise NotLocalError("more than one output")
    return seen[result]


def _known(module: nn.Module, node: fx.Node) -> bool:
    """Whether a step is a layer, to be looked at, or works on one place at a time; others may hide anything."""
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs
    plain = all(isinstance(given, (fx.Node, int, float, bool)) for given in (*node.args, *node.kwargs.values()))
    known = (node.op == "call_function" and node.target in FUNCTIONS) or (
        node.op == "call_method" and node.target in METHODS
    )
    return plain and known and "out" not in node.kwargs and _written_alone(module, node)


def _written_alone(module: nn.Module, node: fx.Node) -> bool:
    """Whether nobody else reads what a step writes into: such a one would see more than its own step says."""
    if node.target not in IN_PLACE or len(node.all_input_nodes) < 2:
        return True
    written = node.args[0]
    while isinstance(written, fx.Node) and written.op == "call_module" and len(written.users) == 1:
        if type(module.get_submodule(str(written.target))) in (*LOOKING, nn.BatchNorm2d):
            return True  # numbers of its own; other layers may give back the very ones that they are given
        written = written.args[0]
    return False
