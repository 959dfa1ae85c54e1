"""Photos of any size, decoded once, to be cropped at random again and again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as Numbered

from patchcleanser.core.windows import Size
from patchcleanser.data.base import Dataset

SMALLER = 3
"""Photos that fit into squares of a half, a quarter or an eighth of the side are kept in such."""

WORTH = 2_000
"""Photos for which a process of its own is worth starting. A second decodes about a thousand small ones."""


class Photos:
    """Photos squeezed into squares of a side, or of less where they are small.

    They lie on a CUDA device with room for several times as much, otherwise in memory.
    """

    def __init__(self, photos: Dataset, indices: NDArray[np.intp], side: int, device: torch.device) -> None:
        self.device = device
        self.sizes = torch.empty(len(indices), 2)
        """Height and width of each before it was squeezed, [N, 2]."""
        found: list[Tensor] = [torch.empty(0)] * len(indices)
        for number, photo in zip(np.argsort(indices).tolist(), _read(photos, np.sort(indices), side), strict=True):
            self.sizes[number] = torch.tensor(photo.size)
            found[number] = torch.from_numpy(photo.square)
        self._side = np.array([square.shape[-1] for square in found])
        self._place = np.zeros(len(found), np.intp)
        self._squares: dict[int, Tensor] = {}
        needed = sum(square.numel() for square in found)
        roomy = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 3 * needed
        for own in np.unique(self._side).tolist():
            mine = np.flatnonzero(self._side == own)
            stack = torch.empty(len(mine), 3, own, own, dtype=torch.uint8, device=device if roomy else "cpu")
            for place, number in enumerate(mine.tolist()):
                stack[place] = found[number]
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
    """One photo as a square, and the size it had."""

    square: NDArray[np.uint8]
    size: Size


class _Squares(Numbered["_Photo | Exception"]):
    """Photos by number, as processes of their own read them; what cannot be read comes back as its error."""

    def __init__(self, photos: Dataset, indices: NDArray[np.intp], side: int) -> None:
        self.photos, self.indices, self.side = photos, indices, side

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> _Photo | Exception:
        try:
            image = self.photos.image(int(self.indices[number]))
        except Exception as error:  # raised where a user sees it
            return error
        return _Photo(_squeezed(image, self.side), (image.shape[1], image.shape[2]))


def _read(photos: Dataset, indices: NDArray[np.intp], side: int) -> Iterator[_Photo]:
    """Photos in this order, decoded by several processes if there are many, where processes are cheap to start."""
    workers = min(os.cpu_count() or 1, len(indices) // WORTH) if sys.platform == "linux" else 0
    loader: DataLoader[list[_Photo | Exception]] = DataLoader(
        _Squares(photos, indices, side),  # type: ignore[arg-type]
        batch_size=64,
        num_workers=workers,
        collate_fn=list,
        multiprocessing_context="fork" if workers else None,
    )
    for batch in loader:
        for photo in batch:
            if isinstance(photo, Exception):
                raise photo
            yield photo


def _squeezed(image: Tensor, side: int) -> NDArray[np.uint8]:
    """An image [3, H, W] as a square [3, S, S]: of the side, or of the least part of it that it fits into."""
    own = next(side >> k for k in range(SMALLER, -1, -1) if k == 0 or max(image.shape[1:]) <= side >> k)
    picture = Image.fromarray(np.rint(255 * image.numpy().transpose(1, 2, 0)).astype(np.uint8))
    square = picture.resize((own, own), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))
