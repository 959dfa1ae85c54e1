"""torchvision models by name."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torchvision import models

from patchcleanser.classifiers.hub import require_host
from patchcleanser.classifiers.preprocessing import Preprocessing, unknown_option
from patchcleanser.classifiers.torch import TorchClassifier, load_weights
from patchcleanser.errors import ClassifierError, did_you_mean


class TorchvisionClassifier(TorchClassifier):
    """A torchvision classification model with its published preprocessing.

    `weights` is "hub" (torchvision's default weights, downloaded), the name of one of its
    weight sets (IMAGENET1K_V1), "none", or a .safetensors/.pth file. The preprocessing and the
    names of classes are those of the weight set, and of IMAGENET1K_V1 for files.
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
        architectures = models.list_models(module=models)
        if name not in architectures:
            raise ClassifierError(
                f"torchvision has no classification model {name!r}; see torchvision.models.list_models()"
                f"{did_you_mean(name, architectures)}"
            )
        _check_options(name, options)
        instead = "give a file with weights=PATH, or weights=none for random ones"
        sets = models.get_model_weights(name)
        chosen = sets.DEFAULT if weights == "hub" else sets.__members__.get(weights)
        if chosen and not (Path(torch.hub.get_dir()) / "checkpoints" / Path(chosen.url).name).is_file():
            require_host(chosen.url, f"no weights for torchvision:{name}", instead)
        try:
            with redirect_stdout(sys.stderr):  # a download is announced, and standard output is for results
                module = models.get_model(name, weights=chosen, **options)
        except (TypeError, ValueError) as error:
            raise ClassifierError(f"torchvision cannot build {name!r} with {options}: {error}") from error
        except OSError as error:
            raise ClassifierError(f"no weights for torchvision:{name} ({error}); {instead}") from error
        module = module.eval().to(device)
        if chosen is None and weights != "none":
            load_weights(module, weights)
        recipe = chosen or sets.__members__.get("IMAGENET1K_V1") or sets.DEFAULT
        categories = tuple(recipe.meta["categories"])
        classes = options.get("num_classes", len(categories))
        super().__init__(module, preprocessing or _preprocessing(recipe.transforms(), size), classes=classes)
        self.name = name
        # A file is taken to have the weight set's classes, as for the preprocessing, unless it has another number.
        self.names = None if "num_classes" in options else categories


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse an option that the network does not have, before weights are looked for."""
    if not options.keys() - {"num_classes"}:
        return
    try:
        models.get_model(name, weights=None, **options)
    except (TypeError, ValueError) as error:
        hint = unknown_option(error, ("num_classes", "weights", "size"))
        if hint is not None:
            raise ClassifierError(f"torchvision:{name} {hint}") from error


def _preprocessing(preset: Any, size: int | None) -> Preprocessing:
    mean, std = tuple(preset.mean), tuple(preset.std)
    if size is not None:
        return Preprocessing((size, size), None, preset.interpolation.value, mean, std)
    crop = preset.crop_size[0]
    return Preprocessing(preset.resize_size[0], (crop, crop), preset.interpolation.value, mean, std)
