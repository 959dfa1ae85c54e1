"""Pairs of an image and a union of masks to logits, in chunks that fit a device's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.base import Classifier, is_out_of_memory
from patchcleanser.core.tables import UNMASKED, Indices, LabelTable
from patchcleanser.core.threats import Grid
from patchcleanser.engine.fast.backends import Way
from patchcleanser.engine.fast.half import block_size
from patchcleanser.engine.float32 import plain_float32
from patchcleanser.engine.masking import boxes_of, copies, covered, require_kept, sent, told
from patchcleanser.errors import OutOfMemoryError

CPU_ELEMENTS = 1_600_000
"""Input numbers per chunk on a CPU: 10 images at 224×224, 512 at 32×32. Larger chunks leave the caches:
MobileNetV2 takes a third less time in chunks of 8 to 16 than in chunks of 32."""

CUDA_BYTES_PER_NUMBER = 160
"""Memory a network is assumed to need per input number (ViT-B needs about 40)."""

CUDA_ELEMENTS = 9_640_000
"""Input numbers per exact batch on a GPU: 64 images at 224×224. Never by free memory: the shape decides rounding."""

EXACT_ROWS = {"cuda": 512, "cpu": 64}
"""The most rows of an exact batch; on a CPU more are hardly faster, and few labels are filled up to a whole batch."""

COPY_BYTES = 256_000_000
"""The most memory spent on masked copies of large source images at a time."""


@dataclass(eq=False)
class Subject:
    """One image on the grid its threat speaks of, on the device, with the labels known so far."""

    pixels: Tensor
    table: LabelTable


class Piece(NamedTuple):
    """What one forward pass works on: pairs of a subject and a union."""

    subjects: list[Subject]
    which: NDArray[np.intp]
    unions: Indices

    def __len__(self) -> int:
        return len(self.unions)

    def part(self, start: int, stop: int) -> Piece:
        """Pairs from one number to another."""
        return Piece(self.subjects, self.which[start:stop], self.unions[start:stop])

    def pick(self, chosen: NDArray[np.intp]) -> Piece:
        """The pairs with these numbers."""
        return Piece(self.subjects, self.which[chosen], self.unions[chosen])

    @staticmethod
    def joined(pieces: Sequence[Piece]) -> Piece:
        """Pieces of the same subjects as one."""
        which, unions = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("which", "unions"))
        return Piece(pieces[0].subjects, which, unions)


class Batches:
    """A classifier's logits of images under masks, whichever way they are computed.

    On the source grid an image is masked as it came and each masked copy is resized; on the
    input grid it is prepared once and masked afterwards.
    """

    def __init__(self, classifier: Classifier, *, grid: Grid, chunk: int | None = None) -> None:
        self.classifier, self.grid, self.chunk = classifier, grid, chunk
        self.most_rows = chunk
        """The limit that was given for a batch, or that memory set."""
        self.shrunk = False
        """Whether memory ran out since `fill_in` last looked: then labels of two batch shapes would meet."""
        self.padding = 0
        """Rows of exact batches that were only there to fill them."""
        self.roomy = chunk is None
        """Whether a way may be given several chunks at once: nobody set their size, and memory never ran out."""
        self.sizes: set[tuple[int, ...]] | None = None
        """Heights and widths of the inputs that a way was compared for; others are not trusted to it. None: any."""
        self._known = torch.Size(), torch.Size()
        """The shape of the last image, and of its input."""

    def place(self, image: Tensor) -> Tensor:
        """One checked image [C, H, W] on the device, prepared if the threat lives on the input grid."""
        pixels = image.to(self.classifier.device, non_blocking=image.is_pinned())
        if self.grid == "source":
            return pixels
        with torch.inference_mode(), plain_float32(self.classifier.device):
            return self.classifier.prepare(pixels[None])[0]

    def ask(self, subject: Subject) -> None:
        """Classify one image as it is, and keep nothing of it: then it is known how many classes there are."""
        with torch.inference_mode():
            self._logits(Piece([subject], np.zeros(1, dtype=np.intp), np.array([UNMASKED])))

    def _input(self, pixels: Tensor) -> torch.Size:
        """The shape [C, h, w] of the network's input for an image."""
        if self.grid == "input":
            return pixels.shape
        known, shape = self._known
        if known != pixels.shape:  # asked for every piece, and most images are of one size
            with torch.inference_mode():
                shape = self.classifier.prepare(pixels[None]).shape[1:]
            self._known = pixels.shape, shape
        return shape

    def _numbers(self, pixels: Tensor) -> int:
        """How many numbers the network is given for an image."""
        channels, height, width = self._input(pixels)
        return (channels + self.classifier.mask_aware) * height * width

    def _size(self, piece: Piece, start: int, chunks: int) -> int:
        pixels = piece.subjects[piece.which[start]].pixels
        if self.chunk is None:
            self.chunk = default_chunk(self.classifier.device, self._numbers(pixels))
        size = self.chunk * chunks
        if self.grid == "source":
            return int(max(1, min(size, COPY_BYTES // (4 * pixels.numel()))))
        return size

    def _logits(self, piece: Piece, way: Way | None = None) -> Tensor:
        """Logits of one piece, exact ones or by a faster way.

        If memory runs out, of its halves, and of smaller chunks from then on.
        """
        if way is None:
            return self._exact(piece)
        try:
            return self._forward(piece, way)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(piece) == 1:
                raise self._too_large(piece) from error
        self._make_room()
        if self.classifier.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(piece) // 2
        self.roomy = False
        self.chunk = max(1, min(self.chunk or half, half))
        halves = piece.part(0, half), piece.part(half, len(piece))
        return torch.cat([self._logits(part, way) for part in halves])

    def _too_large(self, piece: Piece) -> OutOfMemoryError:
        shape = tuple(piece.subjects[piece.which[0]].pixels.shape)
        return OutOfMemoryError(
            f"not even one image of {shape} fits into the memory of {self.classifier.device}; "
            "use a smaller model or another device"
        )

    def _exact(self, piece: Piece) -> Tensor:
        """Exact logits: each pair is computed in a batch of a fixed shape, at the row that belongs to its union.

        *A label is a function of the weights, the image and the union.* Kernels round differently for other batch
        shapes, and at times for other rows of one batch, but which numbers they add in which order does not depend on
        the numbers. Here the shape follows from the kind of device, the size of the image, the number of masks and the
        limit `chunk`, and the row from the union. So the same masked image gets the same bits whatever else is in
        the batch, in `certify` as in `predict`. This rests on the same software, kind of device, number of threads and
        `chunk`, on kernels without random order, and on a network that does not mix images of a batch.

        The unmasked image takes any free row: no certificate rests on its label.
        """
        try:
            parts = [
                (members, self._classify(self._masked(batch), None)[sent(rows, self.classifier.device)])
                for batch, members, rows in self._packed(piece)
            ]
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            largest = max(self.batch_rows(piece.subjects[s]) for s in np.unique(piece.which))
            if largest == 1:
                raise self._too_large(piece) from error
            self.most_rows, self.shrunk = largest // 2, True
        else:
            order = np.argsort(np.concatenate([members for members, _ in parts]))
            logits = torch.cat([part for _, part in parts])
            return logits[sent(order, logits.device)]
        self._make_room()
        if self.classifier.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._exact(piece)

    def batch_rows(self, subject: Subject) -> int:
        """How many rows each exact batch has for an image of this size: as many as masks, a part or a multiple.

        Where shapes inside the network depend on the images of a batch, that is one row.
        """
        if not self.classifier.steady:
            return 1
        masks, pixels, device = len(subject.table.mask_set), subject.pixels, self.classifier.device.type
        most = (CUDA_ELEMENTS if device == "cuda" else CPU_ELEMENTS) // self._numbers(pixels)
        most = min(most, EXACT_ROWS["cuda" if device == "cuda" else "cpu"], self.most_rows or most)
        if self.grid == "source":
            most = min(most, COPY_BYTES // (4 * pixels.numel()))
        if most < masks:
            return -(-masks // -(-masks // max(1, most)))
        return masks * (most // masks) if device == "cuda" else masks

    def labels_at_once(self, subject: Subject) -> int:
        """About how many labels keep the device busy: whole exact batches."""
        rows, chunk = self.batch_rows(subject), self.chunk
        return rows * max(1, (chunk or default_chunk(self.classifier.device, self._numbers(subject.pixels))) // rows)

    def _packed(self, piece: Piece) -> Iterator[tuple[Piece, Indices, NDArray[np.intp]]]:
        """The batches of a piece: filled up, which pairs each is for, and at which rows they are."""
        for alike in _by_masks(piece):
            subject = piece.subjects[piece.which[alike[0]]]
            size, masks = self.batch_rows(subject), len(subject.table.mask_set)
            unions = piece.unions[alike]
            rows = subject.table.mask_set.unions.lanes[unions] % size
            rows = np.where(unions == UNMASKED, -1, rows + masks * (unions % max(1, size // masks)))
            for members, at in pack(rows, size):
                filled = np.full(size, alike[members[0]])
                filled[at] = alike[members]
                self.padding += size - len(members)
                yield piece.pick(filled), alike[members], at

    def _make_room(self) -> None:
        """Give back what memory can be done without."""

    def _forward(self, piece: Piece, way: Way) -> Tensor:
        runs: list[Tensor] = []
        inputs: list[Tensor] = []
        shapes = [tuple(piece.subjects[s].pixels.shape) for s in piece.which]
        bounds = [0, *(i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]), len(shapes)]
        for start, stop in pairwise(bounds):
            part = piece.part(start, stop)
            if not self._compared(self._input(part.subjects[part.which[0]].pixels)):
                runs += [self._classify(torch.cat(inputs), way)] if inputs else []
                inputs = []
                runs.append(self._exact(part))
                continue
            batch = self._masked(part, way)
            if inputs and inputs[-1].shape[1:] != batch.shape[1:]:
                runs.append(self._classify(torch.cat(inputs), way))
                inputs = []
            inputs.append(batch)
        if inputs:
            runs.append(self._classify(torch.cat(inputs) if len(inputs) > 1 else inputs[0], way))
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def _classify(self, inputs: Tensor, way: Way | None) -> Tensor:
        if way is not None:
            return way.logits(inputs)
        with plain_float32(self.classifier.device):
            return self.classifier.checked_logits(inputs)

    def _compared(self, shape: torch.Size) -> bool:
        """Whether the way was compared for such inputs: what is doubtful for one size need not be for another."""
        return self.sizes is None or tuple(shape[-2:]) in self.sizes

    def _masked(self, piece: Piece, way: Way | None = None) -> Tensor:
        """Prepared inputs of pairs whose images all have one size, for a way or the exact labels."""
        used, local = np.unique(piece.which, return_inverse=True)
        subjects = [piece.subjects[s] for s in used]
        device = self.classifier.device
        source = self.grid == "source"
        short = None if way is None or source else way.rounds
        images = copies([s.pixels for s in subjects], local, rounded=short)
        boxes = boxes_of([(s.table, piece.unions[local == k]) for k, s in enumerate(subjects)])
        boxes = boxes[np.argsort(np.argsort(local, kind="stable"))]  # from image by image to the order of the pairs
        preprocessing, channels = self.classifier.preprocessing, images.shape[1]
        size = (images.shape[2], images.shape[3])
        images = covered(
            images, boxes, preprocessing.source_fill(channels) if source else preprocessing.input_fill(channels)
        )
        if source:
            with plain_float32(device):
                images = self.classifier.prepare(images)
        if not self.classifier.mask_aware:
            return images
        if source:
            require_kept(preprocessing, size)
        return told(images, covered(images.new_zeros(len(images), 1, *size), boxes, (1.0,))[:, 0])


def _by_masks(piece: Piece) -> list[NDArray[np.intp]]:
    """The numbers of the pairs whose images have one size and one set of masks, for each of these."""
    kinds = {s: (piece.subjects[s].pixels.shape, id(piece.subjects[s].table.mask_set)) for s in np.unique(piece.which)}
    if len(set(kinds.values())) == 1:
        return [np.arange(len(piece))]
    groups: dict[object, list[int]] = {}
    for number, s in enumerate(piece.which):
        groups.setdefault(kinds[s], []).append(number)
    return [np.array(numbers) for numbers in groups.values()]


def pack(rows: NDArray[np.intp], size: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Put pairs into as few batches of a size as can be, each at its row, or at any free one (-1): members and rows.

    >>> [(members.tolist(), at.tolist()) for members, at in pack(np.array([0, 2, 0, -1]), 3)]
    [([0, 3, 1], [0, 1, 2]), ([2], [0])]
    """
    anywhere = rows < 0
    loads = np.bincount(rows[~anywhere], minlength=size)
    batches = max(int(loads.max()), -(-len(rows) // size))
    free = np.repeat(np.arange(size), batches - loads)
    rows = rows.copy()
    rows[anywhere] = free[: anywhere.sum()]
    order = np.argsort(rows, kind="stable")
    batch = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
    for number in range(batches):
        members = order[batch == number]
        if len(members):
            yield members, rows[members]


def default_chunk(device: torch.device, numbers: int) -> int:
    """How many inputs of this many numbers to classify at once, to begin with."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        most = max(1, min(8192, free // 2 // (numbers * CUDA_BYTES_PER_NUMBER)))
        return int(most if most < (block := block_size(numbers)) else most // block * block)
    return max(1, min(512, CPU_ELEMENTS // numbers))
