"""timm models by name."""

from __future__ import annotations

import math
from typing import Any

import timm
import torch
from torch import nn

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.classifiers.weights import load_weights
from patchcleanser.errors import ClassifierError


class TimmClassifier(TorchClassifier):
    """Builds a timm model with the preprocessing it was trained with.

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
        asked = size or options.get("img_size")
        preprocessing = preprocessing or model_preprocessing(module, asked, options.get("in_chans"))
        super().__init__(module, preprocessing, classes=module.num_classes)
        self.name = name


def _build(name: str, weights: str, options: dict[str, Any]) -> Any:
    if not timm.is_model(name.split(".")[0]):
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:5])
        raise ClassifierError(f"timm has no model {name!r}; {f'near: {near}' if near else 'see timm.list_models()'}")
    try:
        return timm.create_model(name, pretrained=weights == "hub", **options)
    except (TypeError, AttributeError) as error:
        raise ClassifierError(f"timm cannot build {name!r} with {options}: {error}") from error
    except Exception as error:  # the hub client raises a type of its own for each way to fail
        if weights != "hub":
            raise ClassifierError(f"timm cannot build {name!r} with {options}: {error}") from error
        raise ClassifierError(
            f"no weights for timm:{name} from the hub ({type(error).__name__}); give a file with "
            "weights=PATH, or weights=none for random ones"
        ) from error


def model_preprocessing(module: nn.Module, size: int | None = None, channels: int | None = None) -> Preprocessing:
    """The data configuration timm keeps of a model, as a Preprocessing."""
    config = timm.data.resolve_model_data_config(module)
    mean, std = tuple(config["mean"]), tuple(config["std"])
    if channels not in (None, len(mean)):
        # timm keeps red, green and blue whatever in_chans is; another number of channels gets their average.
        mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
    if size is not None:
        return Preprocessing((size, size), None, config["interpolation"], mean, std)
    _, height, width = config["input_size"]
    if config["crop_mode"] == "squash":
        return Preprocessing((height, width), None, config["interpolation"], mean, std)
    if config["crop_mode"] != "center" or height != width:
        raise ClassifierError(
            f"crop mode {config['crop_mode']!r} at {height}×{width} is not known; pass preprocessing="
        )
    return Preprocessing(math.floor(height / config["crop_pct"]), (height, width), config["interpolation"], mean, std)
