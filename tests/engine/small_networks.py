"""Networks that take no time, images for them, and all labels of images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, TorchClassifier, load_dataset
from patchcleanser.engine.fast.float8.backend import measure_input_rms
from patchcleanser.engine.fast.float8.layers import Float8Weight


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.scale = nn.Conv2d(3, 8, 3, 2, groups=1), nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3))) * self.scale  # type: ignore[no-any-return]


def noise(number: int) -> Tensor:
    return torch.rand(number, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def photos(number: int) -> Tensor:
    sample = load_dataset("sample")
    return torch.stack([sample.image(i) for i in range(number)])


def labels_of(defense: DoubleMasking, images: Tensor) -> np.ndarray:
    """Every label of every image [N, unions]."""
    return np.stack([e.table.labels for e in defense.examine(images, [0] * len(images), maps=True)])


def make_classifier() -> TorchClassifier:
    """A network that takes no time; some of its labels have small margins."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()]
    head = nn.Linear(288, 10)
    nn.init.normal_(head.weight, std=1.0)
    module = nn.Sequential(nn.BatchNorm2d(3, affine=False), *layers, head)
    module.train()(photos(100))  # what is usual
    return TorchClassifier(module.eval(), classes=10)


def float8_weights(module: nn.Module, inputs: Tensor) -> dict[str, Float8Weight]:
    """FP8 weights of a network's large linear layers, calibrated with some inputs."""
    rms = measure_input_rms(module, inputs)
    return {name: Float8Weight.of(module.get_submodule(name), rms[name]) for name in rms}  # type: ignore[arg-type]
