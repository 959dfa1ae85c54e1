"""Tiny classifiers whose worst patch is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Preprocessing, TorchClassifier
from patchcleanser.data.dataset import ArrayDataset


class Colour(nn.Module):
    """Logits are the mean of each colour channel, enlarged: red, green or blue."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * images.mean((2, 3))


class Corner(nn.Module):
    """Sees only the top left 4×4 pixels: class 0 if they are dark."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, images: Tensor) -> Tensor:
        light = self.scale * images[:, :, :4, :4].mean((1, 2, 3))
        return torch.stack([self.scale / 2 - light, light], dim=1)


@pytest.fixture
def colour() -> TorchClassifier:
    return TorchClassifier(Colour().eval())


@pytest.fixture
def corner() -> TorchClassifier:
    return TorchClassifier(Corner().eval())


@pytest.fixture
def linear() -> TorchClassifier:
    """A random linear classifier of 8×8 images with 5 classes."""
    torch.manual_seed(0)
    return TorchClassifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).eval())


@pytest.fixture
def curved() -> TorchClassifier:
    """A random small network, with resizing and normalising before it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(8 * 4 * 4, 5))
    prepared = Preprocessing(resize=(11, 11), interpolation="bilinear", mean=(0.5,) * 3, std=(0.2,) * 3)
    return TorchClassifier(net.eval(), prepared)


@pytest.fixture
def pictures() -> ArrayDataset:
    """Ten pictures with colour spots: some certified, some not."""
    chance = np.random.default_rng(3)
    images = chance.integers(90, 110, (10, 12, 12, 3)).astype(np.uint8)
    labels = np.arange(10, dtype=np.int64) % 3
    for n, label in enumerate(labels):
        if n % 2:  # right only because of one spot
            images[n, 2:5, 2:5, label] += 120
            images[n, :, :, (label + 1) % 3] += 4
        else:
            images[n, :, :, label] += 60
    return ArrayDataset("spots", images, labels, ("red", "green", "blue"))
