"""The ImageNet ResNet-50 of the experiments, built for specs and cards that name patchcleanser.experiments.imagenet."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torchvision
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.registry import pick_device
from patchcleanser.classifiers.torch import TorchClassifier, load_weights
from patchcleanser.classifiers.trained import CIFAR_MEAN, CIFAR_STD
from patchcleanser.data.imagenet import imagenet_classes
from patchcleanser.errors import ClassifierError
from patchcleanser.networks.wrapper import Around
from patchcleanser.paper.models import models_folder


def resnet50(classes: int = 1000, size: int = 224) -> TorchClassifier:
    """ResNet-50 as first published, with its strides in the 1×1 convolutions: these weights were trained with it.

    Another number of classes gets a last layer that is still to be trained. `size` is the side of the input in px.
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


class Enlarged(Around):
    """A network that enlarges and normalises another network's inputs itself, so that the two can be ensembled."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, size: int, given: Preprocessing, wanted: Preprocessing) -> None:
        super().__init__(network)
        self.size = size
        (mean, std), (own, spread) = ((torch.tensor(p.mean), torch.tensor(p.std)) for p in (given, wanted))
        self.register_buffer("scale", (std / spread)[:, None, None], persistent=False)
        self.register_buffer("shift", ((mean - own) / spread)[:, None, None], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [N, 3, H, W], normalised as `given`, to the network's output for inputs of its own kind."""
        larger = functional.interpolate(inputs, size=(self.size, self.size), mode="bicubic")
        output: Tensor = self.network(larger * self.scale + self.shift)
        return output


def resnet50_at_32(classes: int = 10, size: int = 128) -> TorchClassifier:
    """The same for inputs of CIFAR-10's networks (32×32 px), which it enlarges to `size` itself, behind the masks.

    Training so masks the 32×32 image too, and mask edges are as soft as at inference.
    """
    plain = resnet50(classes, size)
    preprocessing = Preprocessing((32, 32), None, "bicubic", CIFAR_MEAN, CIFAR_STD)
    module = Enlarged(plain.module, size, preprocessing, plain.preprocessing).eval().to(plain.device)
    return TorchClassifier(module, preprocessing, classes=classes)


def file_preprocessing(path: Path, size: int = 224) -> Preprocessing:
    """The mean and standard deviation that the file's metadata names; 224 px are cropped from 256, others likewise."""
    with safe_open(path, "pt") as file:
        mean, std = (tuple(json.loads(file.metadata()[key])) for key in ("mean", "std"))
    return Preprocessing(size * 8 // 7, (size, size), "bicubic", mean, std)
