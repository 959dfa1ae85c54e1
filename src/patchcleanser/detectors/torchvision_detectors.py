"""torchvision's detectors by name, or a module of one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from patchcleanser.classifiers.fingerprints import module_digest
from patchcleanser.classifiers.hub import require_host
from patchcleanser.classifiers.torch import load_weights, refuse_train_mode
from patchcleanser.core.detections import Detections
from patchcleanser.errors import ClassifierError, OutputError, did_you_mean


class ModuleDetector:
    """A module in torchvision's layout: a list of images in; for each a dict of `boxes`, `labels` and `scores` out."""

    def __init__(self, module: nn.Module, classes: tuple[str, ...]) -> None:
        refuse_train_mode(module)
        tensor = next(iter(module.parameters()), None)
        self.module, self.classes = module, classes
        self.device = torch.device("cpu") if tensor is None else tensor.device

    @property
    def fingerprint(self) -> str:
        """A hash of weights, structure and class names."""
        return hashlib.sha256(f"{module_digest(self.module)}\n{self.classes}".encode()).hexdigest()

    def __call__(self, image: Tensor) -> Detections:
        refuse_train_mode(self.module)
        with torch.inference_mode():
            (output, *_) = self.module([image.to(self.device)])
        names = ("boxes", "labels", "scores")
        if not isinstance(output, dict) or not all(isinstance(output.get(name), Tensor) for name in names):
            raise OutputError(
                f"a detector returns a dict of boxes, labels and scores for each image, got {output!r:.80}"
            )
        return Detections(*(output[name].cpu().numpy() for name in names))


class TorchvisionDetector(ModuleDetector):
    """A detector of torchvision by name, with weights from the hub ("hub"), random ("none"), or a file's."""

    def __init__(self, name: str, *, weights: str = "hub", device: torch.device | str = "cpu", **options: Any) -> None:
        names = models.list_models(module=models.detection)
        if name not in names:
            raise ClassifierError(
                f"torchvision has no detector {name!r}; there are {', '.join(names)}{did_you_mean(name, names)}"
            )
        recipe = models.get_model_weights(name).DEFAULT
        if weights == "hub" and not (Path(torch.hub.get_dir()) / "checkpoints" / Path(recipe.url).name).is_file():
            instead = "give a file with weights=PATH, or weights=none for random ones"
            require_host(recipe.url, f"no weights for torchvision:{name}", instead)
        chosen = recipe if weights == "hub" else None
        module = models.get_model(name, weights=chosen, weights_backbone=None, **options).eval().to(device)
        if weights not in ("hub", "none"):
            load_weights(module, weights)
        categories = tuple(recipe.meta["categories"])
        super().__init__(module, categories if "num_classes" not in options else _numbers(options["num_classes"]))


def _numbers(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))
