"""A network in two: first layers that look at small windows, and the rest, cut where most work can be shared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchcleanser.classifiers.base import logits_in
from patchcleanser.classifiers.fields import PIXELS, NotLocalError, fields_of
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
    names = first_layers(network, example) if is_plain(network) else []
    whole = _work(network, example)
    fields = PIXELS
    found: list[tuple[float, int, Layout]] = []
    outputs, work = example.clone(), 0.0  # layers may work in place
    for number, name in enumerate(names, 1):
        layer = network.get_submodule(name)
        fields = fields_of(layer, fields)
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
        first, rest = _cut_after(network, names[:number])
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


class _Call(NamedTuple):
    """One layer at work: the calls that began before it ended are its own, up to `end`."""

    name: str
    given: Tensor
    result: list[Tensor]
    end: list[int]


def first_layers(network: nn.Module, example: Tensor) -> list[str]:
    """Names of the layers, from the first on, of which each is given just what the one before it gives, all local.

    Found by watching them at work; the network is hooked meanwhile. What is done between layers, or with their results
    elsewhere, is not seen: whoever leaves them out must look whether the rest does the same without them.
    """
    calls = _watched(network, example)
    names: list[str] = []
    fields = PIXELS
    here, at = example, 0
    while at < len(calls):
        call = calls[at]
        layer = network.get_submodule(call.name)
        at += 1  # to its own parts, if it has any
        if call.given is not here or not call.result or type(layer).forward is nn.Sequential.forward:
            continue
        try:
            fields = fields_of(layer, fields)
        except NotLocalError:
            continue
        if sum(other.name == call.name for other in calls) > 1:
            break
        names.append(call.name)
        here, at = call.result[0], call.end[0]
    return names


def _watched(network: nn.Module, example: Tensor) -> list[_Call]:
    """Which layers were called with one tensor, in the order in which they began."""
    calls: list[_Call] = []
    open_calls: list[_Call] = []

    def begin(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        fit = len(given) == 1 and not options and isinstance(given[0], Tensor)
        call = _Call(name, given[0] if fit else torch.empty(0), [], [])
        calls.append(call)
        open_calls.append(call)

    def end(result: Any) -> None:
        call = open_calls.pop()
        if isinstance(result, Tensor):
            call.result.append(result)
        call.end.append(len(calls))

    hooks = []
    try:
        for name, layer in network.named_modules():
            if name:
                before = lambda _, given, options, name=name: begin(name, given, options)  # noqa: E731
                hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(layer.register_forward_hook(lambda _, given, result: end(result)))
        network(example)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
