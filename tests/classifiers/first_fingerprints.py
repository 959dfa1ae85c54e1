"""The digest as it was when the first runs were stored, kept as it was: what has no hooks must go on having it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.fingerprints import _INTERNAL, _PLAIN, _VOLATILE

Hashes = dict[int, tuple[Any, str]]


def first_digest(module: nn.Module) -> str:
    return _described(module, {})


def _described(value: Any, hashes: Hashes) -> str:
    if isinstance(value, (np.generic, np.ndarray)):
        return _described(value.tolist(), hashes)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(item, hashes) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_described(item, hashes) for item in value))}}}"
    if isinstance(value, Mapping):
        items = sorted((_described(key, hashes), _described(item, hashes)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    if id(value) not in hashes:
        hashes[id(value)] = value, "itself"
        text = f"{_described(type(value), hashes)} {_described(_contents(value), hashes)}"
        hashes[id(value)] = value, hashlib.sha256(text.encode()).hexdigest()
    return hashes[id(value)][1]


def _contents(value: Any) -> Any:
    if isinstance(value, nn.Module):
        plain = {k: v for k, v in vars(value).items() if k not in _INTERNAL | _VOLATILE and "cache" not in k}
        stored: dict[str, Any] = {}
        value._save_to_state_dict(stored, "", True)
        return plain, stored, value._buffers, list(value._modules.items())
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if callable(getattr(value, "to_dict", None)):
        return {k: v for k, v in value.to_dict().items() if k not in _VOLATILE | {"dtype", "torch_dtype"}}
    return None if type(value).__module__.split(".")[0] == "torch" else getattr(value, "__dict__", None)
