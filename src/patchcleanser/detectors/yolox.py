"""A YOLOX network in an ONNX file as a detector, run by ONNX Runtime."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torchvision.ops import batched_nms

from patchcleanser.classifiers.onnx import open_session
from patchcleanser.core.detections import Detections
from patchcleanser.data.coco_names import COCO_CLASSES
from patchcleanser.errors import ClassifierError, OutputError

STRIDES = (8, 16, 32)
"""Pixels of the input per cell of each output grid."""
PAD = 114.0
"""The value beside a picture that does not fill the input."""


class YoloxDetector:
    """A YOLOX export: input [1, 3, h, w] in BGR from 0 to 255, output [1, cells, 5 + classes] on three grids.

    Pictures are enlarged or shrunk to fit the input, at its upper left corner. The grids are decoded here. Boxes below
    `score`, and those that share more than `suppress` (IoU) with a better box of their class, are left out.
    """

    def __init__(
        self, path: str | Path, *, score: float = 0.1, suppress: float = 0.45, providers: list[str] | None = None
    ) -> None:
        self.path, self.score, self.suppress = Path(path), score, suppress
        # One thread adds numbers in one order on every machine; for one small image it is also the fastest.
        self.session, self.weights = open_session(self.path, providers, threads=1)
        self.device, self.classes = torch.device("cpu"), COCO_CLASSES
        shape = self.session.get_inputs()[0].shape
        if len(shape) != 4 or shape[1] != 3 or not all(isinstance(side, int) and side % 32 == 0 for side in shape[2:]):
            raise ClassifierError(
                f"a YOLOX network takes [1, 3, h, w] with sides divisible by 32, {path} takes {shape}"
            )
        self.size: tuple[int, int] = (shape[2], shape[3])
        self._corners, self._strides = _cells(self.size)

    @property
    def fingerprint(self) -> str:
        """A hash of the file and of the settings."""
        facts = [type(self).__name__, self.weights, self.score, self.suppress, self.classes]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __call__(self, image: Tensor) -> Detections:
        inputs, ratio = self._prepared(image)
        (output, *_) = self.session.run(None, {self.session.get_inputs()[0].name: inputs})
        cells = output[0]
        if cells.shape != (len(self._corners), 5 + len(self.classes)):
            want = f"[{len(self._corners)}, {5 + len(self.classes)}]"
            raise OutputError(f"a YOLOX network with {len(self.classes)} classes gives {want}, got {list(cells.shape)}")
        return self._decoded(cells, ratio)

    def _prepared(self, image: Tensor) -> tuple[NDArray[np.float32], float]:
        """The network's input, and by how much the picture was enlarged for it."""
        height, width = image.shape[1:]
        ratio = min(self.size[0] / height, self.size[1] / width)
        fitted = (max(1, int(height * ratio)), max(1, int(width * ratio)))
        picture = functional.interpolate(image[None].cpu().float(), size=fitted, mode="bilinear")[0]
        inputs = np.full((1, 3, *self.size), PAD, dtype=np.float32)
        inputs[0, :, : fitted[0], : fitted[1]] = picture.numpy()[::-1] * 255
        return inputs, ratio

    def _decoded(self, cells: Any, ratio: float) -> Detections:
        """Boxes in the picture's pixels, the best of each cell that reaches the score, without near duplicates."""
        scores = cells[:, 4:5] * cells[:, 5:]
        classes = scores.argmax(axis=1)
        best = scores[np.arange(len(scores)), classes]
        rows = np.flatnonzero(best >= self.score)  # NaN reaches no score
        centers = (cells[rows, :2] + self._corners[rows]) * self._strides[rows, None]
        with np.errstate(over="ignore"):
            halves = np.exp(cells[rows, 2:4]) * self._strides[rows, None] / 2
        boxes = np.concatenate([centers - halves, centers + halves], axis=1) / ratio
        chosen = batched_nms(
            torch.from_numpy(boxes), torch.from_numpy(best[rows]), torch.from_numpy(classes[rows]), self.suppress
        ).numpy()
        return Detections(boxes[chosen], classes[rows][chosen], best[rows][chosen])


def _cells(size: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The corner (x, y) of each cell on its grid, and its stride: the finest grid first, row by row."""
    corners, strides = [], []
    for stride in STRIDES:
        down, across = np.mgrid[: size[0] // stride, : size[1] // stride]
        corners.append(np.stack([across.ravel(), down.ravel()], axis=1))
        strides.append(np.full(down.size, stride))
    return np.concatenate(corners).astype(np.float32), np.concatenate(strides).astype(np.float32)
