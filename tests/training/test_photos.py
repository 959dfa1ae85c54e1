"""Photos of any size come back as they are, cropped where they are asked to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.data.base import Subset
from patchcleanser.data.load import load_dataset
from patchcleanser.training.photos import Photos

SIDE, SIZES = 64, [(64, 64), (100, 40), (30, 20), (16, 16), (9, 12), (3, 5)]
WHOLE = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


class Various(Subset):
    """Photos of several sizes, smooth enough to survive resizing."""

    def image(self, index: int) -> Tensor:
        coarse = functional.avg_pool2d(super().image(index)[None], 16)
        return functional.interpolate(coarse, size=SIZES[index], mode="bilinear", align_corners=False)[0]


@pytest.fixture(scope="module")
def various() -> Various:
    return Various(load_dataset("sample"), np.arange(len(SIZES)))


def test_small_photos_take_little_room_and_come_back_whole(various: Various) -> None:
    photos = Photos(various, np.arange(len(SIZES)), SIDE, torch.device("cpu"))
    assert photos.sizes.tolist() == [list(size) for size in SIZES]
    assert sorted(photos._squares) == [8, 16, 32, 64]
    crops = photos.crops(np.arange(len(SIZES)), WHOLE.expand(len(SIZES), -1, -1), (48, 48))
    for crop, number in zip(crops, range(len(SIZES)), strict=True):
        want = functional.interpolate(various.image(number)[None], size=(48, 48), mode="bilinear", antialias=True)[0]
        assert (crop - want).abs().mean() < 0.02, SIZES[number]


def test_a_crop_does_not_depend_on_its_company(various: Various) -> None:
    photos = Photos(various, np.arange(len(SIZES)), SIDE, torch.device("cpu"))
    numbers = np.array([5, 0, 3, 0, 2, 1])
    draw = torch.Generator().manual_seed(0)
    boxes = WHOLE * (0.2 + 0.6 * torch.rand(len(numbers), 2, 1, generator=draw))
    together = photos.crops(numbers, boxes, (24, 32))
    assert together.shape == (6, 3, 24, 32)
    for k, number in enumerate(numbers):
        alone = photos.crops(np.array([number]), boxes[k : k + 1], (24, 32))[0]
        assert torch.allclose(together[k], alone, atol=1e-6)
    assert not torch.allclose(together[1], together[3], atol=1e-2)  # the same photo, cropped elsewhere
