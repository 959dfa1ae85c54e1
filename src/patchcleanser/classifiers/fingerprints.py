"""Hashes of everything that decides the labels of a torch module, equal in every process."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

MOVED = {
    "patchcleanser.classifiers.bagnet": "patchcleanser.networks.bagnet",
    "patchcleanser.classifiers.inpaint": "patchcleanser.networks.inpainting",
    "patchcleanser.classifiers.interval": "patchcleanser.networks.interval",
    "patchcleanser.classifiers.mean": "patchcleanser.networks.ensemble",
    "patchcleanser.classifiers.mirror": "patchcleanser.networks.flip_ensemble",
    "patchcleanser.classifiers.networks": "patchcleanser.networks.builders",
    "patchcleanser.classifiers.tokens": "patchcleanser.networks.token_dropping",
    "patchcleanser.experiments.imagenet": "patchcleanser.paper.resnet50",
}
"""Modules of ours that moved: the first name, which fingerprints and `python:` specs keep using, and today's name.

Without it, a move would turn every stored run and card into another model's.
"""

_FIRST_NAMES = {today: first for first, today in MOVED.items()}

_PLAIN = (type(None), int, float, complex, str, bytes, range, slice, torch.dtype, torch.layout, torch.memory_format)

_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module: its mode, its hooks, and weights and children, which are hashed by themselves."""

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
"""Attributes that say where a model came from and how it was loaded or compiled, not what it computes."""

_LIBRARIES = {"builtins", "torch", "torchvision", "timm", "transformers", "numpy", "patchcleanser"}
"""Code of these packages is hashed by its name; manifests record their versions."""

_RECORDER = "transformers.utils.output_capturing"
"""Its hooks appear with the first call that requests hidden states, and change no output."""

_FILLED_CACHES: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""For each layer, its attributes with "cache" in their names that were not empty when the layer was first inspected."""


@dataclass
class Traversal:
    """The state of one traversal of everything that a module holds."""

    describe_tensor: Callable[[Tensor], str]
    hashes: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Objects by address, referenced so that no address is used twice, with the hash of each."""
    packages: frozenset[str] = frozenset()
    """Top-level modules whose functions and classes are hashed by their code, not by their names."""


def module_digest(module: nn.Module) -> str:
    """A hash of weights, buffers, the order of layers and every plain setting of every layer.

    Settings are hashed although `repr` may not show them: ViTs with 2 and with 4 heads can have the
    same weights. Code is hashed by its name, except forward hooks and methods replaced on a layer: these
    are hashed by their bytecode and by what they hold. No memory address gets into the hash.
    """
    return _hash_model(module, Traversal(_tensor_digest))


def module_sketch(module: nn.Module) -> str:
    """A faster hash for this process only: of weights it uses the address, the version and sums."""
    return _hash_model(module, Traversal(tensor_sketch))


def weights_sketch(module: nn.Module) -> list[str]:
    """Of weights and buffers alone: a network may store other things of its own while it runs."""
    return [tensor_sketch(tensor) for tensor in (*module.parameters(), *module.buffers())]


def note_caches(layers: Iterable[nn.Module]) -> None:
    """Record which caches of these layers are not empty, the first time each layer is inspected.

    A forward pass may fill a cache, and the model is still the same: a cache that was empty at first is never hashed.
    One that was not empty is hashed, since only its name tells it from a setting (`scale_cache = 2.0`).
    """
    for layer in layers:
        if layer not in _FILLED_CACHES:
            filled = (name for name, value in vars(layer).items() if "cache" in name and not _is_empty(value))
            _FILLED_CACHES[layer] = frozenset(filled)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (Mapping, list, tuple, set, frozenset)) and not value)


def _hash_model(module: nn.Module, walk: Traversal) -> str:
    """A hash of a module and of the hooks that torch runs around every module."""
    text = _describe(module, walk)
    hooks = _describe_hooks(vars(nn.modules.module), "_global_", walk)
    return hashlib.sha256(f"{text} {hooks}".encode()).hexdigest() if hooks else text


def _describe(value: Any, walk: Traversal) -> str:
    if isinstance(value, (np.generic, np.ndarray)):  # first, since np.float64 is a float whose repr numpy 2 changed
        return _describe(value.tolist(), walk)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return walk.describe_tensor(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_describe(item, walk) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_describe(item, walk) for item in value))}}}"
    if isinstance(value, Mapping):
        items = sorted((_describe(key, walk), _describe(item, walk)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if hasattr(value, "__qualname__"):  # functions, methods and classes
        if walk.packages and isinstance(value, (FunctionType, MethodType, type)):
            if isinstance(value, MethodType):
                return f"{_describe(value.__func__, walk)} of {_describe(value.__self__, walk)}"
            return _describe_once(value, walk, _describe_code)
        return _qualified_name(value)
    return _describe_once(value, walk, _describe_object)


def _qualified_name(value: Any) -> str:
    module = str(getattr(value, "__module__", None))
    return f"{_FIRST_NAMES.get(module, module)}.{value.__qualname__}"


def _describe_once(value: Any, walk: Traversal, describe: Callable[[Any, Traversal], str]) -> str:
    """The hash of an object's description; computed once, since layers of a transformer share one config."""
    if id(value) not in walk.hashes:
        walk.hashes[id(value)] = value, "itself"  # for objects that refer back to this one
        walk.hashes[id(value)] = value, hashlib.sha256(describe(value, walk).encode()).hexdigest()
    return walk.hashes[id(value)][1]


def _describe_object(value: Any, walk: Traversal) -> str:
    text = f"{_describe(type(value), walk)} {_describe(_contents(value), walk)}"
    if isinstance(value, nn.Module):
        text += _replaced_methods(value, walk) + _describe_hooks(vars(value), "_", walk)
    return text


def _contents(value: Any) -> Any:
    if isinstance(value, torch.jit.ScriptModule):
        return _script(value)
    if isinstance(value, nn.Module):
        plain = {k: v for k, v in vars(value).items() if k not in _INTERNAL | _VOLATILE and _is_hashed(value, k)}
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


def _is_hashed(module: nn.Module, name: str) -> bool:
    """Whether an attribute is hashed; a cache that its library fills follows from the rest."""
    if "cache" not in name:
        return True
    note_caches([module])
    return name in _FILLED_CACHES[module] and not any(_fills(kind, name) for kind in type(module).__mro__)


def _fills(kind: type, name: str) -> bool:
    """Whether a library's class uses this attribute, as timm's LeViT uses attention_bias_cache."""
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return _root(kind) in _LIBRARIES and any(name in function.__code__.co_names for function in functions)


def _root(value: Any) -> str:
    """The top-level module that a function, class or object comes from; a decorator does not change it."""
    names = value.__globals__.get("__name__") if isinstance(value, FunctionType) else getattr(value, "__module__", None)
    return str(names).partition(".")[0]


def own_types(*objects: Any) -> set[type]:
    """The classes of objects, and of the layers of those that are modules, with their parents; no library's."""
    libraries = _LIBRARIES | sys.stdlib_module_names
    parts = [part for value in objects for part in (layers(value) if isinstance(value, nn.Module) else [value])]
    return {kind for part in parts for kind in type(part).__mro__ if _root(kind) not in libraries}


def _replaced_methods(module: nn.Module, walk: Traversal) -> str:
    """Methods replaced on this layer alone, as by `module.forward = …`."""
    text = ""
    for name, value in sorted(vars(module).items()):
        if name not in _INTERNAL and callable(value) and callable(getattr(type(module), name, None)):
            of_another = isinstance(value, MethodType) and value.__self__ is not module
            if of_another or _packages(value):
                text += f" {name}: {_describe_callable(value, walk)}"
    return text


def _describe_hooks(names: Mapping[str, Any], prefix: str, walk: Traversal) -> str:
    """The forward hooks of a layer, or of all layers, in their order."""
    text = ""
    for kind in ("forward_pre_hooks", "forward_hooks"):
        with_kwargs = names.get(f"{prefix}{kind}_with_kwargs") or {}
        for key, hook in (names.get(f"{prefix}{kind}") or {}).items():
            if getattr(hook, "__module__", None) == _RECORDER:
                continue
            text += f" {kind} {key in with_kwargs}: {_describe_callable(hook, walk)}"
    return text


def _describe_callable(value: Any, walk: Traversal) -> str:
    """A hook or a replaced method: the code of its packages, and what it holds."""
    walk = replace(walk, packages=_packages(value))
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    # The object that a library's method is bound to, or the settings of torch's own hooks (old-style weight norm).
    held = inner.__self__ if isinstance(inner, MethodType) else getattr(inner, "__dict__", None)
    return f"{_describe(value, walk)} {_describe(held, walk)}"


def _packages(value: Any) -> frozenset[str]:
    """The top-level modules of the code behind a function, through partials, methods and decorators; no libraries."""
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


def _describe_code(value: Any, walk: Traversal) -> str:
    """A function or class by what it does; a library's by its name and by what it closes over."""
    if _root(value) not in walk.packages:
        parts: Any = _cells(value)
    elif isinstance(value, type):
        parts = _class_contents(value)
    else:
        parts = _function_contents(value, walk)
    return f"{_qualified_name(value)} {_describe(parts, walk)}"


def _function_contents(function: FunctionType, walk: Traversal) -> Any:
    """Bytecode, and the values that it closes over, takes as defaults or reads as globals."""
    bytecode, names = _bytecode(function.__code__)
    reached = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    hashed = {name: value for name, value in reached.items() if _is_data(value) or _root(value) in walk.packages}
    return bytecode, _cells(function), function.__defaults__, function.__kwdefaults__, hashed


def _bytecode(code: CodeType) -> tuple[Any, set[str]]:
    """Instructions and constants, and the names that they use, with those of functions inside."""
    inner = [_bytecode(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    names = set(code.co_names).union(*(names for _, names in inner))
    return (code.co_code, constants, code.co_names, code.co_varnames, [part for part, _ in inner]), names


def _class_contents(kind: type) -> Any:
    """The functions and plain values of a class, and its parents."""
    functions = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    values = {name: value for name, value in vars(kind).items() if isinstance(value, _PLAIN) and name[:2] != "__"}
    return functions, values, kind.__bases__


def _is_data(value: Any) -> bool:
    """Whether a global is a value, not a module, a logger or another part of the program."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    return isinstance(value, (*_PLAIN, Tensor, np.generic, np.ndarray, nn.Module))


def _script(module: torch.jit.ScriptModule) -> Any:
    """What decides a TorchScript module: settings are in its code, in constants, or attributes that the code names."""
    code, constants = module.code_with_constants if module._c._has_method("forward") else ("", None)
    named = {name: module._c.getattr(name) for name in re.findall(r"\.(\w+)", code) if module._c.hasattr(name)}
    # Each load of the same file mangles the names of types anew.
    code = re.sub(r"___torch_mangle_\d+\.", "", code)
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return code, getattr(constants, "const_mapping", None), named, tensors, list(module.named_children())


def _tensor_digest(tensor: Tensor) -> str:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    content = plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def tensor_sketch(tensor: Tensor) -> str:
    """The type, shape, address and version of a tensor, and sums of its values."""
    version = 0 if tensor.is_inference() else tensor._version
    text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.data_ptr()} {version}"
    if not tensor.is_floating_point():
        return text
    values = tensor.detach().float().flatten()
    order = torch.linspace(0.5, 1.5, len(values), device=values.device)  # the same values elsewhere are other weights
    return f"{text} {torch.stack([values.sum(), values.norm(), (values * order).sum()]).tolist()}"


def layers(module: nn.Module) -> list[nn.Module]:
    """What `modules()` gives, in the same order and less time, since it makes no names: this runs for every batch."""
    visited: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        layer = stack.pop()
        if layer is not None and id(layer) not in visited:
            visited[id(layer)] = layer
            stack.extend(reversed(list(layer._modules.values())))
    return list(visited.values())
