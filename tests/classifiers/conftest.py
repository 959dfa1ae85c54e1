"""A small real model that knows a small real task, so that labels and certificates are worth comparing."""

import copy
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import Preprocessing

CLASSES, SIDE = 10, 32
RESNET_PREPROCESSING = Preprocessing((SIDE, SIDE), None, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""What TimmClassifier finds for test_resnet with size=32."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny batches on a shared machine: threads that wait for each other cost 100 times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def coloured_images(count: int, size: tuple[int, int], *, seed: int, clutter: float = 0.5) -> tuple[Tensor, Tensor]:
    """Images [N, 3, H, W] in [0, 1], each tinted with the colour of its class, and the classes [N].

    The more clutter, the more a mask changes: at 0.5 some images can be certified and some cannot.
    """
    random = torch.Generator().manual_seed(seed)
    colours = torch.rand(CLASSES, 3, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(CLASSES, (count,), generator=random)
    blobs = functional.interpolate(torch.rand(count, 3, 4, 4, generator=random), size=size, mode="bilinear")
    noise = 0.1 * torch.rand(count, 3, *size, generator=random)
    return ((1 - clutter) * colours[labels][:, :, None, None] + clutter * blobs + noise).clamp(0, 1), labels


@cache
def fitted_resnet() -> nn.Module:
    """timm's test_resnet in eval mode: random layers, and a head fitted to half-masked images by least squares."""
    torch.manual_seed(0)
    module = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    images, labels = coloured_images(400, (SIDE, SIDE), seed=1)
    left, top = torch.randint(SIDE // 2, (2, len(images), 1, 1, 1))
    rows, columns = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    hidden = (rows >= top) & (rows < top + SIDE // 2) & (columns >= left) & (columns < left + SIDE // 2)
    with torch.no_grad():
        inputs = RESNET_PREPROCESSING(torch.where(hidden, 0.5, images))
        features = module.forward_head(module.forward_features(inputs), pre_logits=True)
        mean, std = features.mean(dim=0), features.std(dim=0) + 1e-3
        scaled = (features - mean) / std
        targets = functional.one_hot(labels, CLASSES) * 10.0 - 1
        ridge = scaled.T @ scaled + 10 * torch.eye(scaled.shape[1])
        solved = torch.linalg.solve(ridge, scaled.T @ targets).T / std
        module.fc.weight.copy_(solved)
        module.fc.bias.copy_(-solved @ mean)
    return module


@pytest.fixture(scope="session")
def coloured() -> Callable[..., tuple[Tensor, Tensor]]:
    """The function coloured_images, for tests to call."""
    return coloured_images


@pytest.fixture(scope="session")
def preprocessing() -> Preprocessing:
    """The preprocessing of `resnet`."""
    return RESNET_PREPROCESSING


@pytest.fixture(scope="session")
def make_resnet() -> Callable[[], nn.Module]:
    """Makes fresh models, for fixtures that live longer than a test."""
    return lambda: copy.deepcopy(fitted_resnet())


@pytest.fixture
def resnet() -> nn.Module:
    """A fresh model for 10 classes, free to be changed by the test."""
    return copy.deepcopy(fitted_resnet())
