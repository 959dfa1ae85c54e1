"""Settings of torch that the whole program shares: plain float32, and what else is wanted of them for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

PATIENCE = 60.0
"""Seconds to wait for other threads; then they are disturbed, which is an error there, and never a wrong label."""


class _Wish(NamedTuple):
    """A setting of torch's that somebody wants while he is at work."""

    place: Any
    name: str
    value: Any
    weight: int = 0
    """Of two wishes for one setting the weightier one counts."""


_turn = threading.Condition()
_inside: set[object] = set()
"""Who computes in plain float32, whichever thread it is."""
_alone: int | None = None
"""The thread that has these settings to itself, if one does."""
_asking: set[object] = set()
"""Who waits to have them to himself: nobody new comes in before."""
_mine = threading.local()
"""How often this thread is inside."""
_wanted: dict[object, tuple[_Wish, ...]] = {}
"""What else somebody wants."""
_before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
"""What the program had chosen for the settings that somebody wants otherwise now."""


def _settle() -> None:
    """Settings are the whole program's: they are what those who are at work want, and then what they were.

    In whichever order threads come and go, and however they are interrupted: who leaves settles again.
    """
    best: dict[tuple[int, str], _Wish] = {}
    for wishes in (*_wanted.values(), _plain() if _inside else ()):
        for wish in wishes:
            key = (id(wish.place), wish.name)
            if key not in best or best[key].weight < wish.weight:
                best[key] = wish
    for key, (place, name, value, _) in best.items():
        if key not in _before:
            _before[key] = place, name, getattr(place, name)
        setattr(place, name, value)
    for key in [key for key in _before if key not in best]:
        _put_back(*_before[key])
        del _before[key]


def _put_back(place: Any, name: str, value: Any) -> None:
    """One that followed a wider setting follows it again: reading it tells the wider one's value."""
    if name == "fp32_precision":
        setattr(place, name, "none")
        if getattr(place, name) == value:
            return
    setattr(place, name, value)


@contextmanager
def plain_float32(device: torch.device) -> Iterator[None]:
    """Float32 without TF32 or autocast, whatever the program's settings; they are put back.

    The settings are global, so they are changed when the first thread comes in and put back
    when the last one leaves.
    """
    me, within = object(), getattr(_mine, "inside", 0)
    try:
        with _turn:
            _turn.wait_for(lambda: within or _alone == threading.get_ident() or (_alone is None and not _asking))
            _inside.add(me)
            if len(_inside) == 1:
                _settle()
        _mine.inside = within + 1
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _mine.inside = within
        with _turn:
            _inside.discard(me)
            if not _inside:
                _settle()
                _turn.notify_all()


@contextmanager
def plain_float32_alone(device: torch.device) -> Iterator[bool]:
    """Plain float32 in which `in_tf32` may be used: no other thread is in it, and those that come wait.

    False if another one is there already; then nothing is changed.
    """
    global _alone
    mine = _alone == threading.get_ident()
    try:
        with _turn:
            granted = not _inside and _alone is None
            _alone = threading.get_ident() if granted else _alone
        with plain_float32(device) if granted else nullcontext():
            yield granted
    finally:
        _release(mine)


@contextmanager
def others_wait() -> Iterator[None]:
    """No other thread is in plain float32 meanwhile; a thread that is in it itself cannot ask for that, and goes on.

    Whatever follows a network's code to write it down (torch.fx, torch.export) changes how layers are called, for all.
    """
    global _alone
    me, mine = object(), _alone == threading.get_ident()
    try:
        with _turn:
            if not mine and not getattr(_mine, "inside", 0):
                _asking.add(me)
                if _turn.wait_for(lambda: not _inside and _alone is None, PATIENCE):
                    _alone = threading.get_ident()
                _asking.discard(me)
                _turn.notify_all()
        yield
    finally:
        _asking.discard(me)
        _release(mine)


def _release(mine: bool) -> None:
    """What this thread did not have to itself before, it has no longer."""
    global _alone
    with _turn:
        if not mine and _alone == threading.get_ident():
            _alone = None
        _turn.notify_all()


@contextmanager
def in_tf32() -> Iterator[None]:
    """Products that a GPU computes from the first eleven bits of each number, inside `plain_float32_alone`.

    The settings are the program's: what other threads compute meanwhile, outside this package, is short too.
    """
    if _alone != threading.get_ident():
        raise RuntimeError("in_tf32 outside plain_float32_alone would change what other threads compute")
    cudnn = torch.backends.cudnn  # torch wants both its kinds of layers alike
    rooms = (torch.backends.cuda.matmul, cudnn, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    short = [
        wish._replace(value="tf32" if wish.value == "ieee" else True, weight=2)
        for wish in _plain()
        if wish.place in rooms and wish.name in ("fp32_precision", "allow_tf32")
    ]
    with _wished(*short):
        yield


@contextmanager
def _wished(*wishes: _Wish) -> Iterator[None]:
    """Settings of torch's with other values; they are put back."""
    me = object()
    try:
        with _turn:
            _wanted[me] = wishes
            _settle()
        yield
    finally:
        with _turn:
            _wanted.pop(me, None)
            _settle()


def long_sums() -> AbstractContextManager[None]:
    """Let a GPU put sums of half-precision products together in float32."""
    return _wished(_Wish(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False))


def tuned(device: torch.device) -> AbstractContextManager[None]:
    """Let cuDNN pick its kernels by trying them, for batches of one shape; not while a thread wants plain float32."""
    return _wished(_Wish(torch.backends.cudnn, "benchmark", True)) if device.type == "cuda" else nullcontext()


@cache
def _plain() -> tuple[_Wish, ...]:
    """What makes float32 plain. Newer torch has one switch per kind of operation."""
    backends = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        kinds = [(backends.cuda, "matmul")]
        kinds += [(room, kind) for room in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn", "matmul")]
        plain = [_Wish(getattr(room, kind), "fp32_precision", "ieee", 1) for room, kind in kinds if hasattr(room, kind)]
    else:
        plain = [_Wish(room, "allow_tf32", False, 1) for room in (backends.cuda.matmul, backends.cudnn)]
    # Kernels chosen by trying them can be others next time.
    chosen = [_Wish(backends.cudnn, name, value, 1) for name, value in (("benchmark", False), ("deterministic", True))]
    return (*plain, *chosen)
