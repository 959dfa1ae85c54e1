"""Strict float32: torch's precision settings are global, so all threads of the program share them here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

PATIENCE = 60.0
"""Seconds to wait for other threads; then they are disturbed, which is an error there, and never a wrong label."""


class Setting(NamedTuple):
    """A setting of torch and the value that somebody wants while at work."""

    owner: Any
    name: str
    value: Any
    priority: int = 0
    """Of two values for one setting the one of higher priority counts."""


@cache
def strict_settings() -> tuple[Setting, ...]:
    """What makes float32 strict: no TF32, and kernels that are the same each time."""
    backends = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # newer torch has one switch per kind of operation
        kinds = [(backends.cuda, "matmul")]
        kinds += [(module, kind) for module in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn", "matmul")]
        products = [Setting(getattr(m, kind), "fp32_precision", "ieee", 1) for m, kind in kinds if hasattr(m, kind)]
    else:
        products = [Setting(module, "allow_tf32", False, 1) for module in (backends.cuda.matmul, backends.cudnn)]
    kernels = (("benchmark", False), ("deterministic", True))  # kernels chosen by timing can be others next time
    return (*products, *(Setting(backends.cudnn, name, value, 1) for name, value in kernels))


class _SharedSettings:
    """Who computes in strict float32, who wants other settings, and what the program had chosen itself."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.strict: set[object] = set()
        """Everybody who is in strict float32, in whichever thread."""
        self.exclusive: int | None = None
        """The thread that has the settings to itself, if one does."""
        self.queue: set[object] = set()
        """Who waits to have them exclusively: nobody new enters before."""
        self.depth = threading.local()
        """How often this thread is inside strict float32."""
        self.overrides: dict[object, tuple[Setting, ...]] = {}
        self.originals: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def apply(self) -> None:
        """Set what those at work want, and put back the rest, in whichever order threads come and go."""
        wanted: dict[tuple[int, str], Setting] = {}
        for settings in (*self.overrides.values(), strict_settings() if self.strict else ()):
            for setting in settings:
                key = (id(setting.owner), setting.name)
                if key not in wanted or wanted[key].priority < setting.priority:
                    wanted[key] = setting
        for key, (owner, name, value, _) in wanted.items():
            if key not in self.originals:
                self.originals[key] = owner, name, getattr(owner, name)
            setattr(owner, name, value)
        for key in [key for key in self.originals if key not in wanted]:
            _restore(*self.originals.pop(key))

    def release(self, had_it: bool) -> None:
        """End this thread's exclusive use, unless it had it before."""
        with self.changed:
            if not had_it and self.exclusive == threading.get_ident():
                self.exclusive = None
            self.changed.notify_all()


_shared = _SharedSettings()


def _restore(owner: Any, name: str, value: Any) -> None:
    """Put a setting back; one that followed a wider setting (reading gives the wider value) follows it again."""
    if name == "fp32_precision":
        setattr(owner, name, "none")
        if getattr(owner, name) == value:
            return
    setattr(owner, name, value)


@contextmanager
def strict_float32(device: torch.device) -> Iterator[None]:
    """Float32 without TF32 or autocast, whatever the program's settings; they are put back.

    The settings change when the first thread enters and are put back when the last one leaves.
    """
    me, depth = object(), getattr(_shared.depth, "count", 0)
    try:
        with _shared.changed:
            _shared.changed.wait_for(
                lambda: (
                    depth
                    or _shared.exclusive == threading.get_ident()
                    or (_shared.exclusive is None and not _shared.queue)
                )
            )
            _shared.strict.add(me)
            if len(_shared.strict) == 1:
                _shared.apply()
        _shared.depth.count = depth + 1
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _shared.depth.count = depth
        with _shared.changed:
            _shared.strict.discard(me)
            if not _shared.strict:
                _shared.apply()
                _shared.changed.notify_all()


@contextmanager
def exclusive_float32(device: torch.device) -> Iterator[bool]:
    """Strict float32 that no other thread is in, and that those who come wait for; False if one is there already."""
    had_it = _shared.exclusive == threading.get_ident()
    try:
        with _shared.changed:
            granted = not _shared.strict and _shared.exclusive is None
            _shared.exclusive = threading.get_ident() if granted else _shared.exclusive
        with strict_float32(device) if granted else nullcontext():
            yield granted
    finally:
        _shared.release(had_it)


@contextmanager
def pause_other_threads() -> Iterator[None]:
    """Keep other threads out of strict float32; a thread that is in it itself cannot ask for that, and goes on.

    Whatever traces a network's code (torch.fx, torch.export) changes how layers are called, for all threads.
    """
    me, had_it = object(), _shared.exclusive == threading.get_ident()
    try:
        with _shared.changed:
            if not had_it and not getattr(_shared.depth, "count", 0):
                _shared.queue.add(me)
                if _shared.changed.wait_for(lambda: not _shared.strict and _shared.exclusive is None, PATIENCE):
                    _shared.exclusive = threading.get_ident()
                _shared.queue.discard(me)
                _shared.changed.notify_all()
        yield
    finally:
        _shared.queue.discard(me)
        _shared.release(had_it)


def is_exclusive() -> bool:
    """Whether this thread is inside `exclusive_float32`."""
    return _shared.exclusive == threading.get_ident()


@contextmanager
def override(*settings: Setting) -> Iterator[None]:
    """Settings of torch with other values; they are put back."""
    me = object()
    try:
        with _shared.changed:
            _shared.overrides[me] = settings
            _shared.apply()
        yield
    finally:
        with _shared.changed:
            _shared.overrides.pop(me, None)
            _shared.apply()


@contextmanager
def cudnn_benchmark(device: torch.device) -> Iterator[None]:
    """Let cuDNN choose kernels by timing them, for batches of one shape; not while a thread is in strict float32."""
    with override(Setting(torch.backends.cudnn, "benchmark", True)) if device.type == "cuda" else nullcontext():
        yield
