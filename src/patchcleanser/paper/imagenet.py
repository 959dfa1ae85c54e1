"""The ImageNet ResNet-50 that the experiments start from; its weights lie with the other models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torchvision
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.load import pick_device
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.classifiers.trained import CIFAR_MEAN, CIFAR_STD
from patchcleanser.classifiers.weights import load_weights
from patchcleanser.data.imagenet import imagenet_classes
from patchcleanser.errors import ClassifierError
from patchcleanser.networks.wrapper import Around
from patchcleanser.paper.models import models_folder


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


class Enlarged(Around):
    """A network that is given images as others see them and enlarges them itself: it can be asked beside those."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, size: int, seen: Preprocessing, wanted: Preprocessing) -> None:
        super().__init__(network)
        self.size = size
        (mean, std), (own, spread) = ((torch.tensor(p.mean), torch.tensor(p.std)) for p in (seen, wanted))
        self.register_buffer("scale", (std / spread)[:, None, None], persistent=False)
        self.register_buffer("shift", ((mean - own) / spread)[:, None, None], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, 3, H, W] as `seen` normalises → the network's output for images of its own size and colours."""
        larger = functional.interpolate(inputs, size=(self.size, self.size), mode="bicubic")
        output: Tensor = self.network(larger * self.scale + self.shift)
        return output


def resnet50_at_32(classes: int = 10, size: int = 128) -> TorchClassifier:
    """The same for 32×32 images as CIFAR-10's networks see them, which it enlarges to `size` itself, behind the masks.

    A mask is so put on the image itself in training too, and its edges are as soft as they are in use.
    """
    plain = resnet50(classes, size)
    seen = Preprocessing((32, 32), None, "bicubic", CIFAR_MEAN, CIFAR_STD)
    module = Enlarged(plain.module, size, seen, plain.preprocessing).eval().to(plain.device)
    return TorchClassifier(module, seen, classes=classes)


def file_preprocessing(path: Path, size: int = 224) -> Preprocessing:
    """The mean and standard deviation that the file itself names; 224 px are cut from 256, other sizes likewise."""
    with safe_open(path, "pt") as file:
        mean, std = (tuple(json.loads(file.metadata()[key])) for key in ("mean", "std"))
    return Preprocessing(size * 8 // 7, (size, size), "bicubic", mean, std)
