"""Classifiers from strings: `kind:name?option=value`, what a string says, and who may run code by it."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from patchcleanser.classifiers.classifier import CallableClassifier, Classifier
from patchcleanser.classifiers.fingerprints import MOVED, own_types
from patchcleanser.classifiers.preprocessing import SPEC_OPTIONS, Preprocessing, unknown_option
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import ClassifierError, InputError, PatchCleanserError, TrustError, did_you_mean

LOGGER = logging.getLogger("patchcleanser")

AnyClassifier: TypeAlias = Classifier | nn.Module | Callable[..., Any] | str
"""A Classifier, a torch module, a function from numpy arrays [N, C, H, W] to scores, or a string as "zoo:tiny"."""

WRAPPERS = ("tokens", "inpaint", "mirror", "visible", "mean")
"""Kinds whose name is the spec of another classifier, or of several."""

WEIGHTLESS = ("inpaint:", "mirror:", "visible:")
"""Prefixes that wrap one other spec and have no weights of their own."""

OWN_BUILDERS = {
    f"patchcleanser.experiments.imagenet:{function}": "1065a373f8434879c1bee5ac54bc3f6a3b305f3de323bb94c2c9897b47b9afed"
    for function in ("resnet50", "resnet50_at_32")
}
"""Functions of ours that a file may name: they take numbers only, and read nothing but a safetensors file.

Each with the hash of its first source file, which stays in fingerprints when the function moves or its imports change.
"""

WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin")
"""Suffixes of files that torch and its friends write weights into."""

CLASSES_OPTION = {"net": "classes", "python": "classes", "timm": "num_classes", "torchvision": "num_classes"}
"""The option that sets the number of classes, by kind."""


@dataclass(frozen=True)
class SpecOrigin:
    """Who wrote the spec of a classifier: the caller, or the author of a card or a manifest."""

    file: str | Path | None = None
    trust_code: bool = False

    def require_trust(self, spec: str, action: str) -> None:
        """Refuse a spec from a file that the caller did not declare trusted."""
        if self.file is not None and not self.trust_code:
            raise TrustError.of(self.file, spec, action)


def load_classifier(
    spec: str,
    *,
    device: str = "auto",
    trust_code: bool = False,
    named_by: str | Path | None = None,
    **options: Any,
) -> Classifier:
    """A classifier from a string `kind:name?option=value&…`; keyword options win.

    - ``timm:vit_tiny_patch16_224?img_size=32&patch_size=4&weights=none``
    - ``torchvision:mobilenet_v2?weights=mobilenet_v2.pth``
    - ``transformers:FOLDER_OR_HUB_NAME``
    - ``onnx:model.onnx?mean=0.49,0.48,0.45&std=0.25,0.24,0.26&resize=256&crop=224``
    - ``python:my_package.models:make`` or ``python:models.py:make`` calls make() and wraps what it returns
    - ``tokens:SPEC``: the ViT of another spec, without the tokens that masks hide
    - ``inpaint:SPEC``: the network of another spec, with hidden pixels filled in from visible ones
    - ``mirror:SPEC``: the mean of another's logits for an image and for its mirror image
    - ``visible:SPEC``: the mean of the local logits that see no hidden pixel, of a network such as net:bagnet;
      or the head of net:split on the features that see none
    - ``mean:SPEC,SPEC``: the mean of several networks' logits
    - ``zoo:tiny``, ``trained:FOLDER`` (written by train or harden), ``net:resnet`` (untrained);
      ``trained:FOLDER?classes=10`` with a new last layer, to be trained

    Every kind takes ``mean``, ``std``, ``resize`` (the short side, or ``256x320``), ``crop`` and ``interpolation``.
    They replace these parts of the classifier's own preprocessing; an ONNX file and a bare module have none.

    A spec that you write may run code (``python:``). A spec that a file names may not, however deep it is nested:
    not that of a card in ``trained:FOLDER``, and not this one if it was read from the file `named_by`. Such a spec is a
    TrustError unless `trust_code` says that the files are trusted.
    """
    try:
        classifier = load_spec(spec, device, options, SpecOrigin(named_by, trust_code))
    except RecursionError as error:
        raise InputError(f"{spec[:40]!r}… is nested too deeply; name the classifier itself") from error
    classifier.spec = None if options else spec
    return classifier


def load_spec(spec: str, device: str, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    """A classifier from a string of this origin."""
    if not isinstance(spec, str):
        raise InputError(
            f"load_classifier takes a string such as 'zoo:tiny', got {type(spec).__name__}; defenses take modules and "
            "functions as they are: DoubleMasking(module, '2%')"
        )
    kind, _, rest = spec.partition(":")
    kinds = (*KINDS, *WRAPPERS)
    if kind not in kinds or not rest:
        own_words = None if kind in kinds else _words_for_file(spec)
        hint = own_words or f"write one of {', '.join(f'{k}:…' for k in kinds)}"
        hint += "" if kind in kinds or own_words else _suggestion(spec)
        raise InputError(f"cannot read classifier {spec!r}; {hint}")
    if kind in WRAPPERS:
        return _wrapped(kind, rest, device, options, origin)
    name, _, query = rest.partition("?")
    settings = parse_options(query) | options
    changes = {} if kind == "python" else take_preprocessing(settings)
    try:
        classifier = KINDS[kind](name, pick_device(device), settings, origin)
    except TypeError as error:
        unknown = unknown_option(error, _own_options(kind, name, origin))
        if unknown is None:
            raise
        raise InputError(f"{kind}:{name} {unknown}") from error
    if changes:
        classifier.preprocessing = classifier.preprocessing.with_options(changes)
    if kind == "onnx" and classifier.preprocessing.mean is None:
        text = "onnx:%s names no mean and std, so it sees pixels from 0 to 1; unless it normalises, add ?mean=…&std=…"
        LOGGER.warning(text, name)
    return classifier


def take_preprocessing(options: dict[str, Any], own: Container[str] = ()) -> dict[str, Any]:
    """Take the options of preprocessing out of a spec's options; those in `own` mean something else there."""
    return {name: options.pop(name) for name in SPEC_OPTIONS if name in options and name not in own}


def _own_options(kind: str, name: str, origin: SpecOrigin) -> Iterable[str]:
    """The options of a kind besides those of preprocessing."""
    if kind == "python":
        return inspect.signature(_import_builder(name, origin)).parameters
    return ("classes",) if kind == "onnx" else ()


def _words_for_file(spec: str) -> str | None:
    """How to name a file that holds weights or code, if the spec is one; a weight file holds no network."""
    file = spec.partition("?")[0]
    kind, colon, rest = file.partition(":")
    path = Path(rest if colon and kind.isalpha() and len(kind) > 1 else file)
    if path.suffix == ".py":
        return f"name the function in it that returns the network: python:{path}:FUNCTION"
    if path.suffix not in WEIGHT_FILES:
        return None
    return (
        f"a weight file holds no network: write timm:NAME?weights={path} or torchvision:NAME?weights={path}, or "
        f"python:FILE.py:FUNCTION for a function that builds the network and loads {path.name}"
    )


def _suggestion(spec: str) -> str:
    """The end of a sentence about a spec that cannot be read: the one that was probably meant, if any is near."""
    import timm

    from patchcleanser.classifiers.trained import zoo_folders

    kind, colon, _ = spec.partition(":")
    if colon:
        return did_you_mean(kind, (*KINDS, *WRAPPERS))
    path = Path(spec)
    kinds = {
        "onnx": path.suffix == ".onnx",
        "trained": (path / "card.json").is_file(),
        "transformers": (path / "config.json").is_file(),
        "zoo": spec in zoo_folders(),
        "timm": timm.is_model(spec.partition("?")[0].partition(".")[0]),
    }
    return next((f"; did you mean {kind}:{spec}?" for kind, fits in kinds.items() if fits), "")


def as_classifier(model: AnyClassifier) -> Classifier:
    """A Classifier from a Classifier, a spec string, a torch module or any function."""
    if isinstance(model, Classifier):
        return model
    if isinstance(model, str):
        return load_classifier(model)
    if isinstance(model, nn.Module):
        return TorchClassifier(model)
    if callable(model) and not isinstance(model, type):
        return CallableClassifier(model)
    if isinstance(model, Mapping):
        raise InputError(
            f"a classifier is a network, got its weights ({type(model).__name__}); load them into a module first: "
            "module.load_state_dict(weights)"
        )
    got = f"the class {model.__name__}; make an instance" if isinstance(model, type) else type(model).__name__
    raise InputError(f"a classifier is a Classifier, torch module, function or string, got {got}")


def pick_device(device: str) -> torch.device:
    """The torch device: "auto" is cuda, else mps, else cpu; one that does not work here is refused."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        reason = "no such device" if "Expected one of" in reason else reason
        raise InputError(f"device {device!r} cannot be used here ({reason}); write auto, cpu, cuda or mps") from error
    return chosen


def _timm(name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers.timm import TimmClassifier

    if "cache_dir" in options:
        origin.require_trust(f"timm:{name}?cache_dir={options['cache_dir']}", "says where downloads are put")
    return TimmClassifier(name, device=device, **options)


def _torchvision(name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers.torchvision import TorchvisionClassifier

    return TorchvisionClassifier(name, device=device, **options)


def _transformers(name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers.transformers import TransformersClassifier

    if not Path(name).is_dir():
        origin.require_trust(f"transformers:{name}", "is no folder here and would be fetched from the hub")
    return TransformersClassifier(name, device=device, **options)


def _onnx(name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers.onnx import OnnxClassifier

    default = {"providers": ["CPUExecutionProvider"]} if device.type == "cpu" else {}
    return OnnxClassifier(name, **(default | options))


def _python(name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    build = _import_builder(name, origin)
    try:
        changes = take_preprocessing(options, own=inspect.signature(build).parameters)
        model = build(**options)
    except PatchCleanserError:
        raise
    except Exception as error:  # it is the user's own code
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise  # load_spec reports it with the names of the options
        raise ClassifierError(f"python:{name} failed: {type(error).__name__}: {error}") from error
    if model is None:
        raise ClassifierError(f"python:{name} returned None; it must return the classifier, such as a torch module")
    if isinstance(model, nn.Module):
        model = TorchClassifier(model.to(device), Preprocessing() if changes else None)
    classifier = as_classifier(model)
    if changes:
        classifier.preprocessing = classifier.preprocessing.with_options(changes)
    classifier.code = OWN_BUILDERS.get(name) or _code_of(build, classifier)
    return classifier


def _code_of(build: Callable[..., Any], classifier: Classifier) -> str:
    """A hash of the files that a function of the user's, his classifier and its layers are written in; of one, its own.

    What these files import is hashed only if a layer, or a parent of one, is written there.
    """
    digests: set[str] = set()
    owners: list[Any] = [build, *own_types(classifier, getattr(classifier, "module", None))]
    for owner in owners:
        with suppress(TypeError, OSError):  # it was not written in a file
            source = inspect.getsourcefile(owner)
            digests |= {hashlib.sha256(Path(source).read_bytes()).hexdigest()} if source else set()
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _import_builder(name: str, origin: SpecOrigin) -> Callable[..., Any]:
    """The function that `module:function` or `FILE.py:function` names."""
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise InputError(f"write python:module:function or python:FILE.py:function, got python:{name}")
    file = Path(module).expanduser().absolute() if module.endswith(".py") else None
    if name not in OWN_BUILDERS:
        origin.require_trust(f"python:{name}", "runs code of its author")
        if file and not file.is_file():
            raise ClassifierError(f"cannot import python:{name}: no file at {module}")
        folder = str(file.parent if file else Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as `python FILE` and `python -m` do, so that a user's own modules are found
    try:
        imported = importlib.import_module(file.stem if file else MOVED.get(module, module))
    except Exception as error:  # it is the user's own code
        raise ClassifierError(f"cannot import python:{name}: {type(error).__name__}: {error}") from error
    if file and not file.samefile(imported.__file__ or os.devnull):
        raise ClassifierError(f"cannot import python:{name}: another module is called {file.stem}; rename the file")
    if not hasattr(imported, function):
        near = did_you_mean(function, vars(imported))
        raise ClassifierError(f"cannot import python:{name}: {module} has no {function}{near}")
    build: Callable[..., Any] = getattr(imported, function)
    return build


def _own(kind: str, name: str, device: torch.device, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers import trained

    if kind == "net":
        return trained.network_classifier(name, device, options)
    folder, weights = (trained.zoo_folder(name), trained.zoo_weights(name)) if kind == "zoo" else (Path(name), None)
    return trained.trained_classifier(folder, device, options, weights=weights, trust_code=origin.trust_code)


def _wrapped(kind: str, specs: str, device: str, options: dict[str, Any], origin: SpecOrigin) -> Classifier:
    from patchcleanser.classifiers import wrappers

    if kind == "mean":
        return wrappers.mean_of([load_spec(spec, device, options, origin) for spec in members(f"mean:{specs}")])
    wrap = {
        "tokens": wrappers.TokenDroppingClassifier,
        "inpaint": wrappers.inpainting,
        "mirror": wrappers.mirrored,
        "visible": wrappers.visible_only,
    }
    return wrap[kind](load_spec(specs, device, options, origin))


KINDS: dict[str, Callable[[str, torch.device, dict[str, Any], SpecOrigin], Classifier]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "onnx": _onnx,
    "python": _python,
    **{kind: partial(_own, kind) for kind in ("net", "trained", "zoo")},
}


def parse_options(query: str) -> dict[str, Any]:
    """`a=1&b=x` as a dictionary. Not decoded like a web form, since + and % occur in file names."""
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return {key: text if key == "weights" else _parse_value(text) for key, _, text in pairs}


def _parse_value(text: str) -> Any:
    """Numbers and booleans from a query string; anything else stays text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def innermost(spec: str) -> str:
    """The spec that is left without the wrappers inpaint:, mirror: and visible:.

    >>> innermost("mirror:inpaint:zoo:tiny")
    'zoo:tiny'
    """
    prefix = next((prefix for prefix in WEIGHTLESS if spec.startswith(prefix)), None)
    return spec if prefix is None else innermost(spec.removeprefix(prefix))


def members(spec: str) -> list[str]:
    """The specs of an ensemble's members; of any other spec, the innermost one.

    >>> members("mirror:mean:zoo:tiny,mirror:zoo:cifar10-resnet")
    ['zoo:tiny', 'mirror:zoo:cifar10-resnet']
    """
    inner = innermost(spec)
    if not inner.startswith("mean:"):
        return [inner]
    # A comma inside an option (mean=0.5,0.4,0.3) is not followed by a kind.
    return [part.strip() for part in re.split(r",(?=\s*(?:[a-z]+:|$))", inner.removeprefix("mean:"))]


def names_code(spec: str) -> bool:
    """Whether a card with this spec can be loaded only with trust_code.

    >>> names_code("mirror:python:my_models:make?classes=10"), names_code("mirror:net:tiny")
    (True, False)
    """
    parts = (part.partition("?")[0].partition(":") for part in members(spec))
    return any(kind == "python" and name not in OWN_BUILDERS for kind, _, name in parts)


def with_classes(spec: str, classes: int) -> str | None:
    """The spec of a network with another number of classes, or None for kinds that have no such option.

    >>> with_classes("net:resnet?classes=300&wider=2", 10)
    'net:resnet?wider=2&classes=10'
    """
    option = CLASSES_OPTION.get(innermost(spec).partition(":")[0])
    if option is None:
        return None
    name, _, query = spec.partition("?")
    pairs = [pair for pair in query.split("&") if pair and pair.partition("=")[0] != option]
    return f"{name}?{'&'.join([*pairs, f'{option}={classes}'])}"
