"""timm models by name."""

from __future__ import annotations

import difflib
import math
from typing import Any

import timm
import torch
from torch import nn

from patchcleanser.classifiers.hub import require_hub
from patchcleanser.classifiers.preprocessing import Preprocessing, unknown_option
from patchcleanser.classifiers.torch import TorchClassifier, load_weights
from patchcleanser.errors import ClassifierError, PatchCleanserError


class TimmClassifier(TorchClassifier):
    """A timm model with the preprocessing it was trained with.

    `weights` is "hub" (downloaded by timm), "none" (random), or a .safetensors/.pth file.
    Further options go to timm.create_model: img_size=32, patch_size=4, num_classes=10.
    `size` sets the input size of networks that take any; a size or img_size that is given
    resizes to exactly that, without a crop.
    """

    def __init__(
        self,
        name: str,
        *,
        weights: str = "hub",
        size: int | None = None,
        preprocessing: Preprocessing | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        module = _build(name, weights, options).eval().to(device)
        if weights not in ("hub", "none"):
            load_weights(module, weights)
        size = size or options.get("img_size")
        preprocessing = preprocessing or timm_preprocessing(module, size, options.get("in_chans"))
        super().__init__(module, preprocessing, classes=module.num_classes)
        self.name = name


def _build(name: str, weights: str, options: dict[str, Any]) -> Any:
    _check_name(name)
    if "checkpoint_path" in options:  # timm may unpickle it, which can run code
        raise ClassifierError(f"timm:{name} takes no checkpoint_path; name the file with weights=PATH")
    if "pretrained" in options:
        raise ClassifierError(f"timm:{name} takes no pretrained; leave it out for the hub's weights, or {INSTEAD}")
    given = ", ".join(f"{key}={value}" for key, value in options.items()) or "no options"
    try:
        if weights == "hub":
            if options.keys() - {*USUAL}:
                timm.create_model(name, pretrained=False, **options)  # names its wrong options without any download
            _check_weights(name, options.get("cache_dir"))
        return timm.create_model(name, pretrained=weights == "hub", **options)
    except PatchCleanserError:
        raise
    except Exception as error:  # the hub's client and networks raise many types
        hint = unknown_option(error, USUAL)
        if hint is not None:
            raise ClassifierError(f"timm:{name} {hint}") from error
        if weights != "hub" or isinstance(error, TypeError | AttributeError):
            raise ClassifierError(f"timm cannot build {name!r} with {given}: {error}") from error
        raise ClassifierError(f"no weights for timm:{name} from the hub ({type(error).__name__}); {INSTEAD}") from error


USUAL = ("img_size", "patch_size", "num_classes", "in_chans", "global_pool", "weights", "size")
"""Options to suggest in messages; each network has more of its own."""
INSTEAD = "give a file with weights=PATH, or weights=none for random ones"
FILES = ("model.safetensors", "pytorch_model.bin")
"""Usual names of weight files on the hub."""


def _check_name(name: str) -> None:
    """Refuse a name or a tag that is not in timm's registry."""
    network, _, tag = name.partition(".")
    if not timm.is_model(network):
        models = timm.list_models()
        near = difflib.get_close_matches(network, models, 5) or timm.list_models(f"*{network.split('_')[0]}*")[:5]
        hint = f"near: {', '.join(near)}" if near else "see timm.list_models()"
        raise ClassifierError(f"timm has no model {name!r}; {hint}")
    tags = [model.partition(".")[2] for model in timm.list_models(f"{network}.*", pretrained=True)]
    if tag and tag not in tags:
        hint = f"it has {', '.join(tags)}" if tags else "it has no pretrained weights; leave out the tag"
        raise ClassifierError(f"timm has no weights {tag!r} for {network}; {hint}")


def _check_weights(name: str, cache: str | None) -> None:
    """Refuse a name without weights here or on a hub that responds."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ClassifierError(f"timm has no pretrained weights for {name}; {INSTEAD}")
    if config.hf_hub_id:  # others are fetched from elsewhere
        files = (config.hf_hub_filename, *FILES) if config.hf_hub_filename else FILES
        require_hub(config.hf_hub_id, files, f"no weights for timm:{name}", INSTEAD, cache)


def timm_preprocessing(module: nn.Module, size: int | None = None, channels: int | None = None) -> Preprocessing:
    """The Preprocessing that a timm model was trained with, from timm's own configuration of it."""
    config = timm.data.resolve_model_data_config(module)
    mean, std = tuple(config["mean"]), tuple(config["std"])
    if channels not in (None, len(mean)):
        # timm keeps red, green and blue whatever in_chans is; another number of channels gets their average.
        mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
    _, height, width = config["input_size"]
    if size is not None or config["crop_mode"] == "squash":
        resize = (height, width) if size is None else (size, size)
        return Preprocessing(resize, None, config["interpolation"], mean, std)
    if config["crop_mode"] != "center" or height != width:
        raise ClassifierError(
            f"crop mode {config['crop_mode']!r} at {height}×{width} is not known; pass preprocessing="
        )
    return Preprocessing(math.floor(height / config["crop_pct"]), (height, width), config["interpolation"], mean, std)
