"""Photos of any size come back as they are, cropped where they are asked to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from patchcleanser.data import codec
from patchcleanser.data.catalog import load_dataset
from patchcleanser.data.dataset import Subset
from patchcleanser.errors import DataError
from patchcleanser.training import photo_cache
from patchcleanser.training.photo_cache import PhotoCache

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
    photos = PhotoCache(various, SIDE, torch.device("cpu"))
    assert photos.sizes.tolist() == [list(size) for size in SIZES]
    assert [square.shape[-1] for square in photos.squares] == [64, 64, 32, 16, 16, 8]
    crops = photos.crops(np.arange(len(SIZES)), WHOLE.expand(len(SIZES), -1, -1), (48, 48))
    for crop, number in zip(crops, range(len(SIZES)), strict=True):
        want = functional.interpolate(various.image(number)[None], size=(48, 48), mode="bilinear", antialias=True)[0]
        assert (crop - want).abs().mean() < 0.02, SIZES[number]


def test_photos_of_several_sizes_are_copied_to_a_device_in_one_go(
    various: Various, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photo_cache, "BLOCK", 4)
    squares = PhotoCache(various, SIDE, torch.device("cpu")).squares
    copies = photo_cache._to_device(squares, torch.device("cpu"))
    assert all(torch.equal(copied, square) for copied, square in zip(copies, squares, strict=True))


def test_a_crop_does_not_depend_on_its_company(various: Various) -> None:
    photos = PhotoCache(various, SIDE, torch.device("cpu"))
    numbers = np.array([5, 0, 3, 0, 2, 1])
    draw = torch.Generator().manual_seed(0)
    boxes = WHOLE * (0.2 + 0.6 * torch.rand(len(numbers), 2, 1, generator=draw))
    together = photos.crops(numbers, boxes, (24, 32))
    assert together.shape == (6, 3, 24, 32)
    for k, number in enumerate(numbers):
        alone = photos.crops(np.array([number]), boxes[k : k + 1], (24, 32))[0]
        assert torch.allclose(together[k], alone, atol=1e-6)
    assert not torch.allclose(together[1], together[3], atol=1e-2)  # the same photo, cropped elsewhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for number in range(30):
        Image.fromarray(draw.integers(0, 256, (20, 20 + number % 3, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    return tmp_path


def test_threads_read_the_same_photos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "TIMED", 4)
    monkeypatch.setattr(codec, "BLOCK", 11)
    caches = []
    for seconds in (1e9, -1.0):  # never slow, always slow
        monkeypatch.setattr(codec, "SLOW_SECONDS", seconds)
        caches.append(PhotoCache(load_dataset(f"folder:{folder}"), 32, torch.device("cpu")))
    here, there = caches
    assert torch.equal(here.sizes, there.sizes)
    assert all(torch.equal(a, b) for a, b in zip(here.squares, there.squares, strict=True))


@pytest.mark.parametrize("seconds", [1e9, -1.0])
def test_a_photo_that_cannot_be_read_is_named_whoever_reads_it(
    folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "SLOW_SECONDS", seconds)
    monkeypatch.setattr(codec, "TIMED", 2)
    (folder / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3\.png"):
        PhotoCache(load_dataset(f"folder:{folder}"), 32, torch.device("cpu"))
