"""What decides the labels of a torch module, as a hash that every process computes alike."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (type(None), int, float, complex, str, bytes, range, slice, torch.dtype, torch.layout, torch.memory_format)

_INTERNAL = frozenset(vars(nn.Module()))
"""What any module has: its mode, its hooks, and the weights and children that are hashed by themselves."""

_VOLATILE = {
    "pretrained_cfg",
    "default_cfg",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "architectures",
    "_is_hf_initialized",
    "_use_kernels",
    "_weight_conversions",
    "_torchdynamo_wrapper_id",
}
"""Where a model came from and how it was loaded or compiled: the same model can come another way."""


@dataclass
class Walk:
    """A walk over everything a module holds."""

    tensor: Callable[[Tensor], str]
    """What is said of a tensor."""
    seen: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Objects by address, kept alive so that no address is used twice, and what was said of each."""


def module_digest(module: nn.Module) -> str:
    """A hash of weights, buffers, the order of layers and every plain setting of every layer.

    Settings count although `repr` may not show them: ViTs with 2 and with 4 heads can have the
    same weights. Code counts by its name only, and no memory address gets into the hash.
    """
    return _described(module, Walk(_tensor))


def module_sketch(module: nn.Module) -> str:
    """The same at a glance, for this process only: of weights their place, their version, and sums of them."""
    return _described(module, Walk(glance))


def weights_sketch(module: nn.Module) -> list[str]:
    """Of weights and buffers alone: a network may keep other things of its own while it answers."""
    return [glance(tensor) for tensor in (*module.parameters(), *module.buffers())]


def _described(value: Any, walk: Walk) -> str:
    if isinstance(value, (np.generic, np.ndarray)):  # first, since np.float64 is a float whose repr numpy 2 changed
        return _described(value.tolist(), walk)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return walk.tensor(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(item, walk) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_described(item, walk) for item in value))}}}"
    if isinstance(value, Mapping):
        items = sorted((_described(key, walk), _described(item, walk)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if hasattr(value, "__qualname__"):  # functions, methods and classes
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    return _object(value, walk)


def _object(value: Any, walk: Walk) -> str:
    """Each object once, however many share it: the layers of a transformer share one config."""
    if id(value) not in walk.seen:
        walk.seen[id(value)] = value, "itself"  # what an object says of itself while it is being described
        text = f"{_described(type(value), walk)} {_described(_contents(value), walk)}"
        walk.seen[id(value)] = value, hashlib.sha256(text.encode()).hexdigest()
    return walk.seen[id(value)][1]


def _contents(value: Any) -> Any:
    if isinstance(value, torch.jit.ScriptModule):
        return _script(value)
    if isinstance(value, nn.Module):
        # A cache (LeViT's attention_bias_cache) is filled by the first forward pass and follows from the rest.
        plain = {k: v for k, v in vars(value).items() if k not in _INTERNAL | _VOLATILE and "cache" not in k}
        stored: dict[str, Any] = {}  # the weights, also those of quantised layers, which are no parameters
        value._save_to_state_dict(stored, "", True)
        # Children in their order, since a Sequential runs them in it.
        return plain, stored, value._buffers, list(value._modules.items())
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if callable(getattr(value, "to_dict", None)):  # a transformers config; its dtype is that of the weights
        return {k: v for k, v in value.to_dict().items() if k not in _VOLATILE | {"dtype", "torch_dtype"}}
    # Torch's own objects (graphs, compilers, devices) hold addresses, and nothing that is a setting of the model.
    return None if type(value).__module__.split(".")[0] == "torch" else getattr(value, "__dict__", None)


def _script(module: torch.jit.ScriptModule) -> Any:
    """TorchScript keeps settings in its code, in constants, or as attributes that the code names."""
    code, constants = module.code_with_constants if module._c._has_method("forward") else ("", None)
    named = {name: module._c.getattr(name) for name in re.findall(r"\.(\w+)", code) if module._c.hasattr(name)}
    # Each load of the same file mangles the names of types anew.
    code = re.sub(r"___torch_mangle_\d+\.", "", code)
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return code, getattr(constants, "const_mapping", None), named, tensors, list(module.named_children())


def _tensor(tensor: Tensor) -> str:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    content = plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def glance(tensor: Tensor) -> str:
    """What a tensor is, where, and sums of its numbers."""
    where = (
        f"{tensor.dtype} {tuple(tensor.shape)} {tensor.data_ptr()} {0 if tensor.is_inference() else tensor._version}"
    )
    if not tensor.is_floating_point():
        return where
    plain = tensor.detach().float().flatten()
    order = torch.linspace(0.5, 1.5, len(plain), device=plain.device)  # the same numbers elsewhere are other weights
    return f"{where} {torch.stack([plain.sum(), plain.norm(), (plain * order).sum()]).tolist()}"
