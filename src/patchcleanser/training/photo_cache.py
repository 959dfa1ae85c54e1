"""Photos of any size, decoded once and cropped at random many times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.geometry import Size
from patchcleanser.data.codec import map_images
from patchcleanser.data.dataset import Dataset
from patchcleanser.training.augment import uniform

HALVINGS = 3
"""Small photos are stored in squares of a half, a quarter or an eighth of the side."""

BLOCK = 1000
"""Photos that are copied to the device at a time."""


class PhotoCache:
    """Photos resized to squares of a side, or of a smaller one where they are small.

    They are stored on a CUDA device if it has room for three times as much, otherwise in memory.
    """

    def __init__(self, photos: Dataset, side: int, device: torch.device) -> None:
        self.device = device
        squares, sizes = zip(*_read(photos, side), strict=True)
        self.sizes = torch.tensor(sizes, dtype=torch.float32)
        """Height and width of each photo before resizing, [N, 2]."""
        needed = sum(square.numel() for square in squares)
        fits = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 3 * needed
        self.squares = _to_device(squares, device) if fits else list(squares)
        """Photos, uint8 [3, side, side] each."""

    def crops(self, numbers: NDArray[np.intp], boxes: Tensor, size: Size) -> Tensor:
        """Crop photos to boxes [N, 2, 3] (affine maps of the square from -1 to 1); float [N, 3, *size] in [0, 1]."""
        grid = functional.affine_grid(boxes, [len(numbers), 3, *size], align_corners=False)
        crops = torch.empty(len(numbers), 3, *size, device=self.device)
        sides = np.array([self.squares[number].shape[-1] for number in numbers])
        for side in np.unique(sides):
            positions = np.flatnonzero(sides == side)
            images = torch.stack([self.squares[number] for number in numbers[positions]]).to(self.device).float() / 255
            rows = torch.from_numpy(positions).to(self.device)
            crops[rows] = functional.grid_sample(
                images, grid[rows], mode="bilinear", padding_mode="reflection", align_corners=False
            )
        return crops

    def random_crops(
        self, numbers: NDArray[np.intp], size: Size, generator: torch.Generator, *, smallest: float
    ) -> Tensor:
        """Random crops of at least a `smallest` share of the area, flipped at random, float [N, 3, *size] in [0, 1]."""

        def draw(low: float, high: float) -> Tensor:
            return uniform(len(numbers), low, high, generator, self.device)

        # Photos are stored squeezed into squares; a crop of the right aspect unsqueezes them.
        sizes = self.sizes[torch.from_numpy(numbers)].to(self.device)
        aspect = sizes[:, 1] / sizes[:, 0]
        scale = draw(smallest, 1.0).sqrt()
        height, width = scale * aspect.clamp_max(1.0), scale * (1 / aspect).clamp_max(1.0)
        flip = torch.where(draw(0, 1) < 0.5, 1.0, -1.0)
        zero = torch.zeros_like(height)
        across = torch.stack([width * flip, zero, (1 - width) * draw(-1, 1)], 1)
        down = torch.stack([zero, height, (1 - height) * draw(-1, 1)], 1)
        return self.crops(numbers, torch.stack([across, down], 1), size)


def _read(photos: Dataset, side: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Each photo as a square, and its height and width before."""

    def read(index: int) -> tuple[Tensor, tuple[int, ...]]:
        image = photos.image(index)
        return _square(image, side), tuple(image.shape[1:])

    return list(map_images(read, len(photos)))


def _to_device(squares: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy many at a time: each copy waits for all other work of the device."""
    copies: list[Tensor] = []
    for start in range(0, len(squares), BLOCK):
        block = squares[start : start + BLOCK]
        flat = torch.cat([square.flatten() for square in block]).to(device)
        parts = torch.split(flat, [square.numel() for square in block])
        copies += [part.reshape(square.shape) for part, square in zip(parts, block, strict=True)]
    return copies


def _square(image: Tensor, side: int) -> Tensor:
    """An image [3, H, W] resized to a uint8 square of the side, or of the smallest halving of it that holds the image.

    Pillow resizes it, because torch's threads would wait for each other over images as small as these.
    """
    length = next(side >> k for k in range(HALVINGS, -1, -1) if k == 0 or max(image.shape[1:]) <= side >> k)
    picture = Image.fromarray(np.rint(255 * image.numpy().transpose(1, 2, 0)).astype(np.uint8))
    square = np.asarray(picture.resize((length, length), Image.Resampling.BILINEAR))
    return torch.from_numpy(square.transpose(2, 0, 1).copy())
