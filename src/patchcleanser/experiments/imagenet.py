"""The ImageNet ResNet-50 that the experiments start from; its weights lie with the other models."""

from __future__ import annotations

import json
from pathlib import Path

import torchvision
from safetensors import safe_open
from torch import nn

from patchcleanser.classifiers.load import pick_device
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.classifiers.weights import load_weights
from patchcleanser.data.imagenet import imagenet_classes
from patchcleanser.errors import ClassifierError
from patchcleanser.experiments.models import models_folder


def resnet50(classes: int = 1000, size: int = 224) -> TorchClassifier:
    """ResNet-50 as first published (strides in the 1×1 convolutions), which these weights were trained with.

    Another number of classes gets a last layer of its own, to be trained. `size` is the side of its input.
    """
    path = models_folder() / "resnet50_v1_imagenet.safetensors"
    if not path.is_file():
        raise ClassifierError(
            f"no {path.name} in {path.parent}; put it there, or name its folder with PATCHCLEANSER_MODELS"
        )
    module = torchvision.models.resnet50(weights=None)
    for layer in (module.layer2, module.layer3, module.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    load_weights(module, path)
    if classes != 1000:
        module.fc = nn.Linear(module.fc.in_features, classes)
    classifier = TorchClassifier(module.eval().to(pick_device("auto")), file_preprocessing(path, size), classes=classes)
    classifier.names = imagenet_classes()[1] if classes == 1000 else None
    return classifier


def file_preprocessing(path: Path, size: int = 224) -> Preprocessing:
    """The mean and standard deviation that the file itself names; 224 px are cut from 256, other sizes likewise."""
    with safe_open(path, "pt") as file:
        mean, std = (tuple(json.loads(file.metadata()[key])) for key in ("mean", "std"))
    return Preprocessing(size * 8 // 7, (size, size), "bicubic", mean, std)
