"""Photos of any size, decoded once, to be cropped at random again and again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from patchcleanser.core.geometry import Size
from patchcleanser.data.dataset import Dataset

SMALLER = 3
"""Photos that fit into squares of a half, a quarter or an eighth of the side are kept in such."""

SLAB = 1000
"""Photos that are read, and put where they stay, at once."""

TRIED = 20
LONG = 0.001
"""So many photos of a slab are read first; if one takes so many seconds, threads read the others. Over small ones,
which hardly leave Python, threads wait for each other: of 64 px one takes 0.4 ms, and 0.8 with four threads."""


class Photos:
    """Photos squeezed into squares of a side, or of less where they are small.

    They lie on a CUDA device with room for several times as much, otherwise in memory.
    """

    def __init__(self, photos: Dataset, indices: NDArray[np.intp], side: int, device: torch.device) -> None:
        self.device = device
        read = _read(photos, indices, side)
        self.sizes = torch.tensor([one.size for one in read], dtype=torch.float32)
        """Height and width of each before it was squeezed, [N, 2]."""
        found = [one.square for one in read]
        del read
        self._side = np.array([square.shape[-1] for square in found])
        self._place = np.zeros(len(found), np.intp)
        self._squares: dict[int, Tensor] = {}
        needed = sum(square.numel() for square in found)
        roomy = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 3 * needed
        for own in np.unique(self._side).tolist():
            mine = np.flatnonzero(self._side == own)
            stack = torch.empty(len(mine), 3, own, own, dtype=torch.uint8, device=device if roomy else "cpu")
            # Many at a time: copies of single photos would each wait for whatever else the device does.
            for start in range(0, len(mine), SLAB):
                slab = mine[start : start + SLAB].tolist()
                stack[start : start + SLAB] = torch.stack([found[number] for number in slab])
                for number in slab:
                    found[number] = torch.empty(0)  # or there would be two of each
            self._squares[own], self._place[mine] = stack, np.arange(len(mine))

    def crops(self, numbers: NDArray[np.intp], boxes: Tensor, size: Size) -> Tensor:
        """What lies in boxes [N, 2, 3] (affine maps of the square from -1 to 1) of photos, float [N, 3, *size]."""
        grid = functional.affine_grid(boxes, [len(numbers), 3, *size], align_corners=False)
        crops = torch.empty(len(numbers), 3, *size, device=self.device)
        for own, squares in self._squares.items():
            mine = np.flatnonzero(self._side[numbers] == own)
            if len(mine):
                images = squares[torch.from_numpy(self._place[numbers[mine]])].to(self.device).float() / 255
                rows = torch.from_numpy(mine).to(self.device)
                crops[rows] = functional.grid_sample(
                    images, grid[rows], mode="bilinear", padding_mode="reflection", align_corners=False
                )
        return crops


class _Photo(NamedTuple):
    """A photo as a square of uint8 [3, side, side], and its height and width before."""

    square: Tensor
    size: tuple[int, ...]


def _read(photos: Dataset, indices: NDArray[np.intp], side: int) -> list[_Photo]:
    def one(index: np.intp) -> _Photo:
        image = photos.image(int(index))
        return _Photo(_squeezed(image, side), tuple(image.shape[1:]))

    read: list[_Photo] = []
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(indices), SLAB):  # photos of one source lie together
            slab = indices[start : start + SLAB]
            started = time.monotonic()
            read += map(one, slab[:TRIED])
            long = time.monotonic() - started > LONG * TRIED
            read += (pool.map if long else map)(one, slab[TRIED:])
    return read


def _squeezed(image: Tensor, side: int) -> Tensor:
    """An image [3, H, W] as a square of uint8: of the side, or of the least part of it that it fits into.

    Not by torch, whose threads would wait for each other over pictures as small as these.
    """
    own = next(side >> k for k in range(SMALLER, -1, -1) if k == 0 or max(image.shape[1:]) <= side >> k)
    picture = Image.fromarray(np.rint(255 * image.numpy().transpose(1, 2, 0)).astype(np.uint8))
    square = np.asarray(picture.resize((own, own), Image.Resampling.BILINEAR))
    return torch.from_numpy(square.transpose(2, 0, 1).copy())
