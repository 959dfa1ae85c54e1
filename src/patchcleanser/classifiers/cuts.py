"""A network in two: first layers that look at small windows, and the rest, cut where most work can be shared."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from patchcleanser.classifiers.base import logits_in
from patchcleanser.classifiers.fields import PIXELS, Fields, NotLocalError, fields_of
from patchcleanser.classifiers.layouts import Layout
from patchcleanser.classifiers.rewrites import is_plain
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.windows import Size

WRITTEN = {"cpu": 16, "cuda": 150}
"""Writing a number takes as long as so many products: layers of few channels are slower than their products say."""

PLACES = 25_000_000
"""For each union it is noted where every output is to be found; with more numbers than this nothing is shared."""

WORTH = {"cpu": 0.1, "cuda": 0.02}
"""The least share of all work that must be saved; on a CPU a network in two is exported twice."""


class Cut(NamedTuple):
    """A network in two: its first layers, and the rest of it, which takes what they give."""

    first: nn.Sequential
    rest: nn.Module
    layout: Layout


def cut(network: nn.Module, example: Tensor, masks: MaskSet) -> Cut | None:
    """The network cut where most work is saved under these masks; None if too little is, or it cannot be cut.

    The network is looked at, hooked meanwhile, and copied; it is to be the caller's own. `example` is [N, C, H, W].
    """
    layers = first_layers(network, example) if is_plain(network) else []
    whole = _work(network, example)
    found: list[tuple[float, int, Layout]] = []
    outputs, work = example.clone(), 0.0  # layers may work in place
    for number, (name, fields) in enumerate(layers, 1):
        layer = network.get_submodule(name)
        work += _work(layer, outputs)
        outputs = layer(outputs)
        if outputs.ndim != 4:
            break
        layout = Layout(fields, _size(outputs), _size(example))
        if len(masks.unions) * layout.outputs[0] * layout.outputs[1] > PLACES:
            continue
        saved = work * (1 - layout.share(masks)) - WRITTEN[example.device.type] * outputs.numel()
        found.append((saved / whole, number, layout))
    for saved, number, layout in sorted(found, key=lambda one: -one[0]):
        if saved < WORTH[example.device.type]:
            return None
        first, rest = _cut_after(network, [layer.name for layer in layers[:number]])
        if _same(network, first, rest, example) and sees_no_more(first, layout, masks, example):
            return Cut(first, rest, layout)
    return None


def _size(images: Tensor) -> Size:
    return images.shape[-2], images.shape[-1]


def _cut_after(network: nn.Module, names: Sequence[str]) -> tuple[nn.Sequential, nn.Module]:
    """Layers, and a copy of the network in which they hand on what they are given."""
    first = nn.Sequential(*(network.get_submodule(name) for name in names)).eval()
    known = {id(parameter): parameter for parameter in (*network.parameters(), *network.buffers())}
    rest = copy.deepcopy(network, known)  # the weights are the same ones
    for name in names:
        rest.set_submodule(name, nn.Identity().eval())
    return first, rest


def _same(network: nn.Module, first: nn.Module, rest: nn.Module, example: Tensor) -> bool:
    """Whether a network in two does what it does in one: something may go around its first layers."""
    whole = logits_in(network(example.clone())).float()  # layers may work in place
    try:
        parts = logits_in(rest(first(example.clone()))).float()
    except Exception:  # whatever it does with what it does not expect
        return False
    limit = 0.05 if example.dtype != torch.float32 else 1e-4
    return whole.shape == parts.shape and bool((whole - parts).abs().max() <= limit * whole.abs().max())


def sees_no_more(first: nn.Module, layout: Layout, masks: MaskSet, example: Tensor) -> bool:
    """Whether outputs that are said to see no pixel of a window see none: what is no number shows wherever it is seen.

    An independent check of `fields.py`, by the layers themselves.
    """
    for window in {window for mask in masks.masks for window in mask}:
        patch = layout.around(window)
        image = example[:1].clone()
        image[..., window.top : window.bottom, window.left : window.right] = torch.nan
        seen = first(image).isnan().any(1)[0]
        seen[patch.top : patch.bottom, patch.left : patch.right] = False
        if seen.any():
            return False
    return True


def _work(network: nn.Module, example: Tensor) -> float:
    """Products, and numbers written by layers in products' worth."""
    written = 0

    def write(layer: nn.Module, given: object, result: object) -> None:
        nonlocal written
        if isinstance(result, Tensor) and layer._parameters:
            written += result.numel()

    hooks = [layer.register_forward_hook(write) for layer in network.modules()]
    try:
        with FlopCounterMode(display=False) as counter:
            network(example.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return int(counter.get_total_flops()) / 2 + WRITTEN[example.device.type] * written


class Layer(NamedTuple):
    """One of the first layers, and what its outputs see of the image."""

    name: str
    fields: Fields


def first_layers(network: nn.Module, example: Tensor) -> list[Layer]:
    """The layers, from the first on, of which each is given just what the one before it gives, all local.

    Found by watching the network at work, hooked meanwhile. Nothing else may be done with the image, nor with what
    these layers give but for the last of them: neither between layers, in place or not, nor later, around them.
    """
    watch = _Watch(network, example)
    watch.run(example)
    return watch.layers[: watch.limit]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a network, and which layer it is in."""

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = network
        self.layers: list[Layer] = []
        self.limit = len(list(network.modules()))
        """So many of them can be left out: what comes behind them uses nothing from before."""
        self._results = [example]
        self._owners = {_storage(example): 0}
        """After how many of the layers memory was written last."""
        self._inside = 0
        self._called: Counter[str] = Counter()

    def run(self, example: Tensor) -> None:
        """One pass of the network."""
        hooks = []
        try:
            for name, layer in self.network.named_modules():
                if name:
                    hooks.append(layer.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True))
                    hooks.append(layer.register_forward_hook(partial(self._end, name)))
            with self:
                self.network(example)
        finally:
            for hook in hooks:
                hook.remove()
        repeated = [n for n, layer in enumerate(self.layers) if self._called[layer.name] > 1]
        self.limit = min([self.limit, *repeated])

    def _begin(self, name: str, layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        if given and isinstance(given[0], fx.Proxy):  # its code is followed just now
            return
        self._called[name] += 1
        if self._inside or type(layer).forward is nn.Sequential.forward:
            return
        before = self.layers[-1].fields if self.layers else PIXELS
        if len(given) == 1 and not options and given[0] is self._results[-1]:
            with suppress(NotLocalError):
                self.layers.append(Layer(name, fields_of(layer, before)))
                self._inside = len(self.layers)

    def _end(self, name: str, layer: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        if self._inside and self.layers[-1].name == name:
            self._inside = 0
            if isinstance(result, Tensor):
                self._results.append(result)  # and kept, so that its memory is nobody else's
                self._owners[_storage(result)] = len(self.layers)
            else:
                self.limit = min(self.limit, len(self.layers) - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation: if it is not the next layer's own, what it is given must not be left out."""
        for given in tree_leaves((args, kwargs)):
            owner = self._owners.get(_storage(given)) if isinstance(given, Tensor) else None
            if owner is not None and (not self._inside or owner < self._inside - 1):
                self.limit = min(self.limit, owner)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
