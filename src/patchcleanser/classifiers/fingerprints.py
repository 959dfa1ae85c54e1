"""What decides the labels of a torch module, as a hash that every process computes alike."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.specs import MOVED

_FIRST_NAMES = {today: first for first, today in MOVED.items()}
"""A module that moves keeps its first name here, or every stored run would be another model's."""

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
    "_output_capturing_hooks_installed",
}
"""Where a model came from and how it was loaded or compiled: the same model can come another way."""

_LIBRARIES = {"builtins", "torch", "torchvision", "timm", "transformers", "numpy", "patchcleanser"}
"""Their code counts by its name; a manifest keeps the versions of these packages."""

_RECORDER = "transformers.utils.output_capturing"
"""Its hooks come with the first call that asks for hidden states, and change no output."""

_FILLED_CACHES: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Of each layer, the attributes with "cache" in their names that held something when it was first looked at."""


@dataclass
class Walk:
    """A walk over everything a module holds."""

    tensor: Callable[[Tensor], str]
    """What is said of a tensor."""
    seen: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Objects by address, kept alive so that no address is used twice, and what was said of each."""
    packages: frozenset[str] = frozenset()
    """Top-level modules whose functions and classes count by their code, not by their names."""


def module_digest(module: nn.Module) -> str:
    """A hash of weights, buffers, the order of layers and every plain setting of every layer.

    Settings count although `repr` may not show them: ViTs with 2 and with 4 heads can have the
    same weights. Code counts by its name only, except that of forward hooks and of methods replaced on a layer: these
    count by their bytecode and by what they hold. No memory address gets into the hash.
    """
    return _model(module, Walk(_tensor))


def module_sketch(module: nn.Module) -> str:
    """The same at a glance, for this process only: of weights their place, their version, and sums of them."""
    return _model(module, Walk(glance))


def weights_sketch(module: nn.Module) -> list[str]:
    """Of weights and buffers alone: a network may keep other things of its own while it answers."""
    return [glance(tensor) for tensor in (*module.parameters(), *module.buffers())]


def note_caches(layers: Iterable[nn.Module]) -> None:
    """Remember which caches of these layers hold something, the first time each layer is seen.

    A forward pass may fill a cache, and the model is still the same: a cache that was empty at first never counts.
    One that held something counts, since nothing but its name tells it from a setting (`scale_cache = 2.0`).
    """
    for layer in layers:
        if layer not in _FILLED_CACHES:
            filled = (name for name, value in vars(layer).items() if "cache" in name and not _is_empty(value))
            _FILLED_CACHES[layer] = frozenset(filled)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (Mapping, list, tuple, set, frozenset)) and not value)


def _model(module: nn.Module, walk: Walk) -> str:
    """A module, and the hooks that torch runs around every module."""
    text = _described(module, walk)
    hooks = _hooks(vars(nn.modules.module), "_global_", walk)
    return hashlib.sha256(f"{text} {hooks}".encode()).hexdigest() if hooks else text


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
        if walk.packages and isinstance(value, (FunctionType, MethodType, type)):
            return _code(value, walk)
        return _name(value)
    return _object(value, walk)


def _name(value: Any) -> str:
    """The module and name of a function, method or class."""
    module = str(getattr(value, "__module__", None))
    return f"{_FIRST_NAMES.get(module, module)}.{value.__qualname__}"


def _object(value: Any, walk: Walk) -> str:
    """Each object once, however many share it: the layers of a transformer share one config."""
    if id(value) not in walk.seen:
        walk.seen[id(value)] = value, "itself"  # what an object says of itself while it is being described
        text = f"{_described(type(value), walk)} {_described(_contents(value), walk)}"
        if isinstance(value, nn.Module):
            text += _replaced(value, walk) + _hooks(vars(value), "_", walk)
        walk.seen[id(value)] = value, hashlib.sha256(text.encode()).hexdigest()
    return walk.seen[id(value)][1]


def _contents(value: Any) -> Any:
    if isinstance(value, torch.jit.ScriptModule):
        return _script(value)
    if isinstance(value, nn.Module):
        plain = {k: v for k, v in vars(value).items() if k not in _INTERNAL | _VOLATILE and _counts(value, k)}
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


def _counts(module: nn.Module, name: str) -> bool:
    """Whether an attribute is part of what a layer is; a cache that its library fills follows from the rest."""
    if "cache" not in name:
        return True
    note_caches([module])
    return name in _FILLED_CACHES[module] and not any(_fills(kind, name) for kind in type(module).__mro__)


def _fills(kind: type, name: str) -> bool:
    """Whether a library's class uses this attribute, as timm's LeViT does attention_bias_cache."""
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return _root(kind) in _LIBRARIES and any(name in function.__code__.co_names for function in functions)


def _root(value: Any) -> str:
    """The top-level module that a function, class or object comes from, whatever a decorator says of it."""
    names = value.__globals__.get("__name__") if isinstance(value, FunctionType) else getattr(value, "__module__", None)
    return str(names).partition(".")[0]


def _replaced(module: nn.Module, walk: Walk) -> str:
    """Methods that were replaced on this layer alone, as `module.forward = …` does."""
    text = ""
    for name, value in sorted(vars(module).items()):
        if name not in _INTERNAL and callable(value) and callable(getattr(type(module), name, None)):
            of_another = isinstance(value, MethodType) and value.__self__ is not module
            if of_another or _packages(value):
                text += f" {name}: {_called(value, walk)}"
    return text


def _hooks(names: Mapping[str, Any], prefix: str, walk: Walk) -> str:
    """The forward hooks of a layer, or of all layers, in their order."""
    text = ""
    for kind in ("forward_pre_hooks", "forward_hooks"):
        with_kwargs = names.get(f"{prefix}{kind}_with_kwargs") or {}
        for key, hook in (names.get(f"{prefix}{kind}") or {}).items():
            if getattr(hook, "__module__", None) == _RECORDER:
                continue
            text += f" {kind} {key in with_kwargs}: {_called(hook, walk)}"
    return text


def _called(value: Any, walk: Walk) -> str:
    """A hook or a replaced method: the code of its packages, and what it holds."""
    walk = replace(walk, packages=_packages(value))
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    # What a library's method is bound to counts, and so do the settings of torch's own hooks (old-style weight norm).
    held = inner.__self__ if isinstance(inner, MethodType) else getattr(inner, "__dict__", None)
    return f"{_described(value, walk)} {_described(held, walk)}"


def _packages(value: Any) -> frozenset[str]:
    """Where the code behind a function comes from, through partials, methods and decorators, but for libraries."""
    if isinstance(value, functools.partial):
        return _packages(value.func)
    if isinstance(value, MethodType):
        return _packages(value.__func__)
    own = frozenset({_root(value)}) - _LIBRARIES
    inner = [item for item in _cells(value) if isinstance(item, (functools.partial, MethodType, FunctionType))]
    return own.union(*(_packages(item) for item in inner if item is not value))


def _cells(value: Any) -> list[Any]:
    """The values that a function closes over."""
    contents = []
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # a cell that is empty as yet
            contents.append(cell.cell_contents)
    return contents


def _code(value: Any, walk: Walk) -> str:
    """A function, a method or a class by what it does; a library's by its name and by what it closes over."""
    if isinstance(value, MethodType):
        return f"{_described(value.__func__, walk)} of {_described(value.__self__, walk)}"
    if id(value) not in walk.seen:
        walk.seen[id(value)] = value, "itself"
        if _root(value) not in walk.packages:
            parts: Any = _cells(value)
        elif isinstance(value, type):
            parts = _methods(value)
        else:
            parts = _function(value, walk)
        text = f"{_name(value)} {_described(parts, walk)}"
        walk.seen[id(value)] = value, hashlib.sha256(text.encode()).hexdigest()
    return walk.seen[id(value)][1]


def _function(function: FunctionType, walk: Walk) -> Any:
    """Bytecode, and the values that it closes over, takes by default or reaches as globals."""
    bytecode, names = _bytecode(function.__code__)
    reached = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    known = {name: value for name, value in reached.items() if _is_data(value) or _root(value) in walk.packages}
    return bytecode, _cells(function), function.__defaults__, function.__kwdefaults__, known


def _bytecode(code: CodeType) -> tuple[Any, set[str]]:
    """Instructions and constants, and the names that they use, with those of functions inside."""
    inner = [_bytecode(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    names = set(code.co_names).union(*(names for _, names in inner))
    return (code.co_code, constants, code.co_names, code.co_varnames, [part for part, _ in inner]), names


def _methods(kind: type) -> Any:
    """The functions and plain values of a class, and its parents."""
    functions = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    values = {name: value for name, value in vars(kind).items() if isinstance(value, _PLAIN) and name[:2] != "__"}
    return functions, values, kind.__bases__


def _is_data(value: Any) -> bool:
    """Whether a global is a value, and no module, logger or other thing of the program."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    return isinstance(value, (*_PLAIN, Tensor, np.generic, np.ndarray, nn.Module))


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


def layers(module: nn.Module) -> list[nn.Module]:
    """What `modules()` gives, each layer before its own, in less time: that makes their names, too.

    With every batch it is looked at whether a network is still what it was; one prediction is one batch.
    """
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            waiting.extend(reversed(list(one._modules.values())))
    return list(found.values())
