"""Strict float32. Torch's precision settings are global, so threads have to agree on them: that is done here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

WAIT_SECONDS = 60.0
"""How long to wait for other threads; then they are disturbed, which is an error there, never a wrong label."""


class Setting(NamedTuple):
    """A setting of torch, and the value it should have for a while."""

    owner: Any
    name: str
    value: Any
    priority: int = 0
    """Of two values for one setting, the one of higher priority counts."""


@cache
def strict_settings() -> tuple[Setting, ...]:
    """What makes float32 strict: no TF32, and the same kernels each time."""
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
    """Which threads compute in strict float32, which settings are overridden, and the program's own values."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.strict: set[object] = set()
        """One token for each use of strict float32, in whichever thread."""
        self.exclusive: int | None = None
        """The thread that has the settings to itself, if one does."""
        self.queue: set[object] = set()
        """One token for each thread that waits for exclusive use: nobody enters strict float32 before it."""
        self.depth = threading.local()
        """How often this thread is inside strict float32."""
        self.overrides: dict[object, tuple[Setting, ...]] = {}
        self.originals: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def apply(self) -> None:
        """Set what is wanted now, and restore the rest, in whichever order threads come and go."""
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


_shared = _SharedSettings()


def _restore(owner: Any, name: str, value: Any) -> None:
    """Restore a setting; one that followed a wider setting (reading gives the wider value) follows it again."""
    if name == "fp32_precision":
        setattr(owner, name, "none")
        if getattr(owner, name) == value:
            return
    setattr(owner, name, value)


@contextmanager
def strict_float32(device: torch.device) -> Iterator[None]:
    """Float32 without TF32 or autocast; the program's settings are restored when the last thread leaves."""
    token, depth = object(), getattr(_shared.depth, "count", 0)
    try:
        with _shared.changed:
            _shared.changed.wait_for(lambda: depth or is_exclusive() or not (_shared.exclusive or _shared.queue))
            _shared.strict.add(token)
            if len(_shared.strict) == 1:
                _shared.apply()
        _shared.depth.count = depth + 1
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _shared.depth.count = depth
        with _shared.changed:
            _shared.strict.discard(token)
            if not _shared.strict:
                _shared.apply()
                _shared.changed.notify_all()


@contextmanager
def pause_other_threads() -> Iterator[bool]:
    """Keep other threads out of strict float32; gives whether that succeeded in time.

    False at once if this thread is in strict float32, or pauses the others already. Tracing a network's code (torch.fx,
    torch.export) changes how layers are called, for all threads.
    """
    token, granted = object(), False
    try:
        with _shared.changed:
            if not is_exclusive() and not getattr(_shared.depth, "count", 0):
                _shared.queue.add(token)
                granted = _shared.changed.wait_for(
                    lambda: not _shared.strict and _shared.exclusive is None, WAIT_SECONDS
                )
                _shared.exclusive = threading.get_ident() if granted else _shared.exclusive
                _shared.queue.discard(token)
                _shared.changed.notify_all()
        yield granted
    finally:
        with _shared.changed:
            _shared.queue.discard(token)
            _shared.exclusive = None if granted and is_exclusive() else _shared.exclusive
            _shared.changed.notify_all()


def is_exclusive() -> bool:
    """Whether this thread pauses the others."""
    return _shared.exclusive == threading.get_ident()


@contextmanager
def override(*settings: Setting) -> Iterator[None]:
    """Give settings of torch other values for a while."""
    token = object()
    try:
        with _shared.changed:
            _shared.overrides[token] = settings
            _shared.apply()
        yield
    finally:
        with _shared.changed:
            _shared.overrides.pop(token, None)
            _shared.apply()


@contextmanager
def cudnn_benchmark(device: torch.device) -> Iterator[None]:
    """Let cuDNN choose kernels by timing them, unless a thread is in strict float32; for batches of one shape."""
    with override(Setting(torch.backends.cudnn, "benchmark", True)) if device.type == "cuda" else nullcontext():
        yield
