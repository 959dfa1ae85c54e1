"""ExactEngine: float32 labels that are a function of the weights, the image and the union of masks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier, is_out_of_memory
from patchcleanser.core.label_table import UNMASKED, Indices
from patchcleanser.core.threats import Grid
from patchcleanser.engine import LabelEngine, RecomputeError
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.engine.masking import (
    ImageState,
    LabelRequest,
    PairBatch,
    apply_masks,
    gather_images,
    mask_boxes,
    require_unresized,
    to_device,
    visible_sums,
    with_mask_channel,
)
from patchcleanser.errors import NotAFunctionError, OutOfMemoryError, OutputError

BATCH_NUMEL = {"cuda": 1_900_000, "cpu": 1_600_000}
"""The most input numbers in one batch: 12 images of 224×224 on a GPU, 9 on a CPU. More rows are hardly faster, and few
labels are padded to a whole batch. Never set by free memory: the batch shape decides how kernels round."""

BATCH_ROWS = {"cuda": 160, "cpu": 64}
"""The most rows of a batch: more are hardly faster, and few labels are padded to a whole batch."""

COPY_BYTES = 256_000_000
"""The most memory spent on masked copies of large source images at a time."""

BATCHES_AT_ONCE = 64
"""Batches computed before their labels are written."""

CUDA_BYTES_PER_NUMBER = 160
"""Memory that a network is assumed to need for each input number (ViT-B needs about 40)."""

FIRST_PROBES, PROBE_EVERY = 4, 64
"""The first calls are probed, and then one in so many: is the classifier a function?"""

NOISE_ROWS = 64
"""The size of the batch in which a pair is probed beside masked images of noise."""

NOT_FINITE = "the classifier returned NaN or infinite logits; check its weights and preprocessing"


class ExactEngine(LabelEngine):
    """Computes labels in float32, each in a batch of a fixed shape at a row that its visible pixels decide.

    On the source grid an image is masked as it came and each masked copy is resized. On the input grid it is
    prepared once and masked afterwards.
    """

    def __init__(self, classifier: Classifier, *, grid: Grid, chunk: int | None = None) -> None:
        self.classifier, self.grid, self.chunk = classifier, grid, chunk
        self.max_rows = chunk
        """The limit on the rows of a batch that was given, or that memory set."""
        self.padding = 0
        """Rows that were only computed to fill batches."""
        self.checks = 0
        """Classifications spent on checks rather than on labels."""
        self.free_memory: Callable[[], None] | None = None
        """Called when memory ran out, to release what can be rebuilt."""
        self._shrunk = False
        self._probed = 0
        self._last_shapes = torch.Size(), torch.Size()

    @property
    def exact(self) -> ExactEngine:  # type: ignore[override]
        return self

    def with_classifier(self, classifier: Classifier) -> ExactEngine:
        engine = copy.copy(self)
        engine.classifier = classifier
        engine._last_shapes = torch.Size(), torch.Size()
        return engine

    def compute(self, requests: Sequence[LabelRequest], *, strict: bool = True, clean: bool = False) -> None:
        pairs = missing_pairs(requests)
        with torch.inference_mode():
            self.compute_pairs(pairs, strict=strict, clean=clean)
        self.finish(pairs)

    def compute_pairs(self, pairs: PairBatch, *, strict: bool, clean: bool) -> None:
        """Compute and write the labels of pairs."""
        for part in self.split(pairs):
            logits = self.logits(part)
            self.probe_sometimes(part, logits, clean=clean)
            self.write(part, logits, strict=strict)

    def split(self, pairs: PairBatch) -> Iterator[PairBatch]:
        """Cut pairs into parts that fill batches well and whose logits fit into memory."""
        start = 0
        while start < len(pairs):
            stop = start + BATCHES_AT_ONCE * self.batch_rows(pairs.image(start))
            yield pairs.part(start, stop)
            start = stop

    def finish(self, pairs: PairBatch) -> None:
        """Refuse labels of two batch shapes, and images without any finite logits."""
        if self._shrunk:
            self._shrunk = False
            raise RecomputeError("memory ran out, and batches are smaller now")
        if not all(image.table.answered for image in pairs.images):
            with torch.inference_mode():
                noise = self.logits(self.noise_like(pairs.part(0, 1)))
            if nonfinite(noise).any():  # else it was an image's pixels that left it without finite logits
                raise OutputError(NOT_FINITE)

    def logits(self, pairs: PairBatch) -> Tensor:
        """Logits [N, classes]: each pair is computed in a batch of a fixed shape, at a row of its own.

        *A label is a function of the weights, the image and the union.* Kernels round differently for other batch
        shapes, and at times for other rows of one batch, but which numbers they add in which order does not depend on
        the numbers. Here the shape follows from the kind of device, the size of the image, the number of masks and the
        limit `chunk`, and the row from the union and the visible pixels. So the same masked image gets the same bits
        whatever else is in the batch, and whatever a patch under the masks shows, in `certify` as in `predict`. This
        rests on the same software, kind of device, number of threads and `chunk`, on kernels without random order, and
        on a network that does not mix images of a batch.

        The unmasked image takes any free row: no certificate rests on its label. If memory runs out, batches are
        halved, and `finish` has every unfinished label computed again.
        """
        parts: list[tuple[NDArray[np.intp], Tensor]] = []
        try:
            for batch, members, rows in self._packed(pairs):
                parts.append((members, self._forward(batch)[to_device(rows, self.classifier.device)]))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            largest = max(self.batch_rows(pairs.images[i]) for i in np.unique(pairs.which))
            if largest == 1:
                raise out_of_memory(pairs, self.classifier) from error
            self.max_rows, self._shrunk = largest // 2, True
        else:
            order = np.argsort(np.concatenate([members for members, _ in parts]))
            logits = torch.cat([part for _, part in parts])
            return logits[to_device(order, logits.device)]
        self.empty_caches()
        return self.logits(pairs)

    def empty_caches(self) -> None:
        """Release memory after some ran out."""
        if self.free_memory is not None:
            self.free_memory()
        if self.classifier.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, pairs: PairBatch) -> Tensor:
        inputs = self.masked_inputs(pairs)
        with strict_float32(self.classifier.device):
            return self.classifier.checked_logits(inputs)

    def _packed(self, pairs: PairBatch) -> Iterator[tuple[PairBatch, Indices, NDArray[np.intp]]]:
        """Padded batches, the numbers of the pairs that each is for, and the rows of these."""
        for group in _by_mask_set(pairs):
            image = pairs.image(group[0])
            size, masks = self.batch_rows(image), len(image.table.mask_set)
            unions = pairs.unions[group]
            rows = image.table.mask_set.unions.lanes[unions] % size
            if (blocks := size // masks) > 1:  # images that ask for the same unions fill each other's batches
                rows = rows + masks * ((unions + visible_sums(pairs.pick(group))) % blocks)
            for members, member_rows in pack(np.where(unions == UNMASKED, -1, rows), size):
                padded = np.full(size, group[members[0]])
                padded[member_rows] = group[members]
                self.padding += size - len(members)
                yield pairs.pick(padded), group[members], member_rows

    def batch_rows(self, image: ImageState) -> int:
        """The rows of each batch for an image of this size: as many as masks, a part or a multiple of it.

        One row where shapes inside the network depend on the images of a batch.
        """
        if not self.classifier.steady:
            return 1
        device = "cuda" if self.classifier.device.type == "cuda" else "cpu"
        masks, pixels = len(image.table.mask_set), image.pixels
        most = BATCH_NUMEL[device] // self.input_numel(pixels)
        most = min(most, BATCH_ROWS[device], self.max_rows or most)
        if self.grid == "source":
            most = min(most, COPY_BYTES // (4 * pixels.numel()))
        if most < masks:
            return -(-masks // -(-masks // max(1, most)))
        return masks * (most // masks) if device == "cuda" else masks

    def labels_at_once(self, image: ImageState) -> int:
        """About how many labels keep the device busy: whole batches."""
        rows, numel = self.batch_rows(image), self.input_numel(image.pixels)
        return rows * max(1, (self.chunk or default_chunk(self.classifier.device, numel)) // rows)

    def masked_inputs(self, pairs: PairBatch, dtype: torch.dtype | None = None) -> Tensor:
        """Network inputs [N, C, h, w] of pairs whose images have one size; `dtype` rounds images on the input grid.

        On the source grid, masks are applied before the image is prepared. So the inputs are a function of the visible
        pixels, whatever preparing does (proofs/SourceGrid.v: masking_before_preparing_sees_visible_pixels_only).
        """
        used, which = np.unique(pairs.which, return_inverse=True)
        source, preprocessing = self.grid == "source", self.classifier.preprocessing
        inputs = gather_images([pairs.images[i].pixels for i in used], which, dtype=None if source else dtype)
        boxes = mask_boxes(pairs)
        channels, size = inputs.shape[1], (inputs.shape[2], inputs.shape[3])
        fill = preprocessing.source_fill(channels) if source else preprocessing.input_fill(channels)
        inputs = apply_masks(inputs, boxes, fill)
        if source:
            with strict_float32(self.classifier.device):
                inputs = self.classifier.prepare(inputs)
        if not self.classifier.mask_aware:
            return inputs
        if source:
            require_unresized(preprocessing, size)
        return with_mask_channel(inputs, apply_masks(inputs.new_zeros(len(inputs), 1, *size), boxes, (1.0,))[:, 0])

    def input_shape(self, pixels: Tensor) -> torch.Size:
        """The shape [C, h, w] of the network's input for an image."""
        if self.grid == "input":
            return pixels.shape
        last, shape = self._last_shapes
        if last != pixels.shape:  # needed for every batch, and most images are of one size
            with torch.inference_mode():
                shape = self.classifier.prepare(pixels[None].clone()).shape[1:]  # it may work in place
            self._last_shapes = pixels.shape, shape
        return shape

    def input_numel(self, pixels: Tensor) -> int:
        """How many numbers the network is given for an image."""
        channels, height, width = self.input_shape(pixels)
        return (channels + self.classifier.mask_aware) * height * width

    def count_classes(self, image: ImageState) -> None:
        """Classify one unmasked image, so that the classifier knows how many classes it has; no label is written."""
        with torch.inference_mode():
            self.logits(PairBatch.of([image], [np.array([UNMASKED])]))

    def write(self, pairs: PairBatch, logits: Tensor, *, strict: bool, confirmed: bool = True) -> None:
        """Write labels, margins and confidences into the tables, which count labels that are not `confirmed`."""
        finite = ~nonfinite(logits)
        if strict and not finite.all():
            raise OutputError(NOT_FINITE)
        logits = sanitize(logits)
        # A GPU's softmax may round by the row's address; Minority Reports needs the same bits in every batch.
        softmax = (logits.cpu() if confirmed else logits).softmax(dim=1)
        confidence = softmax.amax(dim=1).nan_to_num(0.0).to(logits.device)
        columns = torch.stack([logits.argmax(dim=1).float(), top2_margin(logits), confidence, finite.float()])
        labels, margins, confidences, answered = columns.cpu().numpy()  # one transfer from the device
        for i in np.unique(pairs.which):
            table, rows = pairs.images[i].table, pairs.which == i
            table.labels[pairs.unions[rows]] = labels[rows]
            table.margins[pairs.unions[rows]] = margins[rows]
            table.confidences[pairs.unions[rows]] = confidences[rows]
            table.answered |= bool(answered[rows].any())
            table.unconfirmed += 0 if confirmed else int(rows.sum())

    def probe_sometimes(self, pairs: PairBatch, logits: Tensor, *, clean: bool) -> None:
        """Probe a pair of the first calls, and of every 64th after them."""
        if self._probed < FIRST_PROBES or self._probed % PROBE_EVERY == 0:
            at = 0 if self._probed == 0 else len(pairs) // 2
            self.probe(pairs.part(at, at + 1), logits[at], clean=clean)
        self._probed += 1

    def probe(self, pair: PairBatch, logits: Tensor, *, clean: bool = True) -> None:
        """Refuse a classifier that gives a pair other logits [classes] alone, or beside noise, to the last bit.

        An image that is not `clean` may be an attacker's, and must not silence the classifier: there noise decides.
        """
        if pair.unions[0] == UNMASKED:  # it has no row of its own, so the first mask is probed instead
            pair = PairBatch(pair.images, pair.which, np.zeros_like(pair.unions))
            logits = self.logits(pair)[0]
            self.checks += 1
        spread, limit = max_spread([logits, *self._probe_logits(pair)]), 0.0
        if spread > 0 and not clean:
            noise = self.noise_like(pair)
            rows = [self.logits(noise)[0], *self._probe_logits(noise)]
            spread, limit = max_spread(rows), 1e-3 * logit_scale(rows[0])
        if spread > limit:
            raise NotAFunctionError(
                f"the same image got logits {spread:.3g} apart (limit {limit:.3g}) alone and in a batch; "
                "turn off dropout and batch statistics: a defense needs a deterministic classifier"
            )

    def _probe_logits(self, pair: PairBatch) -> list[Tensor]:
        return [self.logits(batch)[0] for batch in self.probe_batches(pair, beside_noise=self.chunk != 1)]

    def probe_batches(self, pair: PairBatch, *, beside_noise: bool) -> list[PairBatch]:
        """Batches that begin with the pair: alone, and beside noise."""
        image, noise = pair.image(), self.noise_like(pair).images[0]
        masks = np.arange(len(image.table.mask_set))[: (self.chunk or NOISE_ROWS) - 1]
        batches = [pair, PairBatch.of([image, noise], [pair.unions, masks])] if beside_noise else [pair]
        self.checks += sum(map(len, batches))
        return batches

    def noise_like(self, pair: PairBatch) -> PairBatch:
        """The same union of an image of noise, which is always the same."""
        image = pair.image()
        pixels = torch.rand(image.pixels.shape, generator=torch.Generator().manual_seed(0))
        return PairBatch.of([ImageState(pixels.to(image.pixels), image.table)], [pair.unions])


def missing_pairs(requests: Sequence[LabelRequest]) -> PairBatch:
    """The labels that tables lack. Images of one size sit together, so that most parts are one stack of images."""
    missing = [(r.image, r.image.table.missing(r.unions)) for r in requests]
    missing = sorted((m for m in missing if len(m[1])), key=lambda m: tuple(m[0].pixels.shape))
    return PairBatch.of([image for image, _ in missing], [unions for _, unions in missing])


def _by_mask_set(pairs: PairBatch) -> list[NDArray[np.intp]]:
    """Groups of pairs whose images have one size and one mask set, by number."""
    kinds = {i: (pairs.images[i].pixels.shape, id(pairs.images[i].table.mask_set)) for i in np.unique(pairs.which)}
    groups: dict[object, list[NDArray[np.intp]]] = {}
    for i, kind in kinds.items():
        groups.setdefault(kind, []).append(np.flatnonzero(pairs.which == i))
    return [np.sort(np.concatenate(numbers)) for numbers in groups.values()]


def pack(rows: NDArray[np.intp], size: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Put pairs into as few batches of a size as possible, each at its row, or at any free one (-1): members and rows.

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


def default_chunk(device: torch.device, numel: int) -> int:
    """How many inputs of `numel` numbers to classify at once, to begin with."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(max(1, min(8192, free // 2 // (numel * CUDA_BYTES_PER_NUMBER))))
    return max(1, min(512, BATCH_NUMEL["cpu"] // numel))


def out_of_memory(pairs: PairBatch, classifier: Classifier) -> OutOfMemoryError:
    """The error for an image that does not fit alone."""
    return OutOfMemoryError(
        f"not even one image of {tuple(pairs.image().pixels.shape)} fits into the memory of {classifier.device}; "
        "use a smaller model or another device"
    )


def sanitize(logits: Tensor) -> Tensor:
    """Replace NaN by -inf and +inf by the largest finite number.

    A patch may drive a network into NaN under masks that do not hide it. A fixed rule for that keeps the classifier a
    total function, and with it the theorem.
    """
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def nonfinite(logits: Tensor) -> Tensor:
    """Rows that hold NaN or +inf, bool [N]. A logit of -inf is allowed: it rules a class out."""
    return (torch.isnan(logits) | torch.isposinf(logits)).any(1)


def top2_margin(logits: Tensor) -> Tensor:
    """The difference of the two largest logits [N]; two infinities are a tie."""
    two = logits.topk(2, dim=1).values
    return (two[:, 0] - two[:, 1]).nan_to_num(nan=0.0, posinf=torch.inf)


def logit_scale(logits: Tensor) -> float:
    """The size of the two largest logits [classes], at least 1."""
    largest = sanitize(logits).topk(2).values.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    return max(1.0, float(largest))


def max_spread(rows: Sequence[Tensor]) -> float:
    """The largest difference between logits [classes] of one pair; infinite if only some of them are finite."""
    logits = sanitize(torch.stack([row.to(rows[0].device) for row in rows]))
    finite = torch.isfinite(logits)
    if (finite.any(0) & ~finite.all(0)).any():
        return float("inf")
    spread = (logits.amax(0) - logits.amin(0))[finite.all(0)]
    return float(spread.amax()) if len(spread) else 0.0
