"""One string, or any model, to a Classifier."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.callable import CallableClassifier
from patchcleanser.classifiers.specs import ASKING, MOVED, OWN_BUILDERS, members, settings_in
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import ClassifierError, InputError, PatchCleanserError, TrustError


@dataclass(frozen=True)
class Origin:
    """Where the spec of a classifier was written: by the caller himself, or in a card or a manifest."""

    file: str | Path | None = None
    trust_code: bool = False

    def require_trust(self, spec: str, action: str) -> None:
        """Refuse a spec of a file that nobody said to trust."""
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
    - ``onnx:model.onnx``
    - ``python:my_package.models:make`` calls make() and wraps what it returns
    - ``tokens:SPEC``: the ViT of another spec, without the tokens that masks hide
    - ``inpaint:SPEC``: the network of another spec, with hidden pixels filled in from visible ones
    - ``mirror:SPEC``: the mean of another's answers to an image and to its mirror image
    - ``mean:SPEC,SPEC``: the mean of several networks' answers
    - ``zoo:tiny``, ``trained:FOLDER`` (written by train or harden), ``net:resnet`` (untrained);
      ``trained:FOLDER?classes=10`` with a new last layer, to be trained

    A spec that you write may run code (``python:``). A spec that a file names may not, however deep it is nested:
    not that of a card in ``trained:FOLDER``, and not this one if it was read from the file `named_by`. Such a spec is a
    TrustError unless `trust_code` says that the files are trusted.
    """
    try:
        return _load(spec, device, options, Origin(named_by, trust_code))
    except RecursionError as error:
        raise InputError(f"{spec[:40]!r}… is nested too deeply; name the classifier itself") from error


def _load(spec: str, device: str, options: dict[str, Any], origin: Origin) -> Classifier:
    kind, _, rest = spec.partition(":")
    if kind not in KINDS or not rest:
        raise InputError(f"cannot read classifier {spec!r}; write one of {', '.join(f'{k}:…' for k in KINDS)}")
    name, _, query = (rest, "", "") if kind in ASKING else rest.partition("?")  # what is asked reads its own
    settings = settings_in(query) | options
    try:
        return KINDS[kind](name, pick_device(device), settings, origin)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise InputError(f"{kind}: classifiers do not take {sorted(settings)}: {error}") from error


def as_classifier(model: Any) -> Classifier:
    """A Classifier from a Classifier, a spec string, a torch module or any function."""
    if isinstance(model, Classifier):
        return model
    if isinstance(model, str):
        return load_classifier(model)
    if isinstance(model, nn.Module):
        return TorchClassifier(model)
    if callable(model):
        return CallableClassifier(model)
    raise InputError(f"a classifier is a Classifier, torch module, function or string, got {type(model).__name__}")


def pick_device(device: str) -> torch.device:
    """The device meant: "auto" is cuda, else mps, else cpu; one that is not there is refused."""
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


def _timm(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.timm import TimmClassifier

    if "cache_dir" in options:
        origin.require_trust(f"timm:{name}?cache_dir={options['cache_dir']}", "says where downloads are put")
    return TimmClassifier(name, device=device, **options)


def _torchvision(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.torchvision import TorchvisionClassifier

    return TorchvisionClassifier(name, device=device, **options)


def _transformers(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.transformers import TransformersClassifier

    if not Path(name).is_dir():
        origin.require_trust(f"transformers:{name}", "is no folder here and would be fetched from the hub")
    return TransformersClassifier(name, device=device, **options)


def _onnx(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.onnx import OnnxClassifier

    default = {"providers": ["CPUExecutionProvider"]} if device.type == "cpu" else {}
    return OnnxClassifier(name, **(default | options))


def _python(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f"write python:module:function, got python:{name}")
    if name not in OWN_BUILDERS:
        origin.require_trust(f"python:{name}", "runs code of its author")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, so that a user's own file is found
    try:
        make = getattr(importlib.import_module(MOVED.get(module, module)), function)
    except (ImportError, AttributeError) as error:
        raise ClassifierError(f"cannot import python:{name}: {error}") from error
    try:
        model = make(**options)
    except PatchCleanserError:
        raise
    except Exception as error:  # it is the user's own code
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise  # said with the options' names by who called
        raise ClassifierError(f"python:{name} failed: {type(error).__name__}: {error}") from error
    classifier = as_classifier(model.to(device) if isinstance(model, nn.Module) else model)
    source = inspect.getsourcefile(make)
    if name in OWN_BUILDERS:
        classifier.code = OWN_BUILDERS[name]
    elif source is not None:
        classifier.code = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return classifier


def _net(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.trained import network_classifier

    return network_classifier(name, device, options)


def _trained(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.trained import trained_classifier

    if options.keys() - {"classes"}:
        raise InputError(
            f"a trained classifier is as its card says and takes no options but classes (a new last layer), got "
            f"{sorted(options)}"
        )
    inner = Origin(Path(name) / "card.json", origin.trust_code)
    return trained_classifier(Path(name), device, lambda spec, more: _load(spec, "cpu", more, inner), **options)


def _zoo(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.trained import zoo_folder

    return _trained(str(zoo_folder(name)), device, options, origin)


def _tokens(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.wrappers import TokenDroppingClassifier

    return TokenDroppingClassifier(_load(name, str(device), options, origin))  # type: ignore[arg-type]


def _inpaint(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.wrappers import inpainting

    return inpainting(_load(name, str(device), options, origin))  # type: ignore[arg-type]


def _mirror(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.wrappers import mirrored

    return mirrored(_load(name, str(device), options, origin))  # type: ignore[arg-type]


def _mean(name: str, device: torch.device, options: dict[str, Any], origin: Origin) -> Classifier:
    from patchcleanser.classifiers.wrappers import mean_of

    return mean_of([_load(member, str(device), options, origin) for member in members(f"mean:{name}")])


KINDS: dict[str, Callable[[str, torch.device, dict[str, Any], Origin], Classifier]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "onnx": _onnx,
    "python": _python,
    "net": _net,
    "trained": _trained,
    "zoo": _zoo,
    "tokens": _tokens,
    "inpaint": _inpaint,
    "mirror": _mirror,
    "mean": _mean,
}
