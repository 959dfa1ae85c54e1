"""The stages of a cascade: backends that were compared with exact labels on the images at hand, and pay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.core.label_table import LabelTable
from patchcleanser.engine.exact import COPY_BYTES, FIRST_PROBES, ExactEngine, default_chunk, out_of_memory
from patchcleanser.engine.fast.backends import Backend, UnusableError, block_size, pad_to_blocks
from patchcleanser.engine.fast.calibration import ErrorBounds, closest_calls, draw_sample
from patchcleanser.engine.masking import ImageState, PairBatch
from patchcleanser.engine.numerics import nonfinite, sanitize

FEW_LABELS = 64
"""Fewer uncertain labels than this are computed exactly at once: so few keep no GPU busy."""

Candidates = Sequence[Sequence[Backend]]
"""Cascades to choose from, the fastest first. The first backend of the one that pays computes labels, and each
further one those that are uncertain before it."""


class Stage(NamedTuple):
    """A backend, and which of its labels are uncertain."""

    backend: Backend
    bounds: ErrorBounds


class InFlight(NamedTuple):
    """Pairs that were handed to a stage; a GPU may still be at work on their logits."""

    pairs: PairBatch
    logits: Tensor
    stage: int
    done: torch.cuda.Event | None = None


class CachedLogits(NamedTuple):
    """Fast logits that close calls were chosen from, and the tables that they are for."""

    batches: list[InFlight]
    tables: list[LabelTable]


@dataclass
class Calibration:
    """The stages that were learnt from some clean images, and for which images they hold."""

    seed: tuple[int, ...] | None = None
    only_for: list[ImageState] | None = None
    """The few images that it was learnt from; None: it holds for any image."""
    stages: list[Stage] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Stages that no longer work, or not as they were compared."""
    given_up: bool = False
    """Whether the fast labels proved wrong, or do not pay for these images."""
    cached: CachedLogits | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        """Draws the labels that are audited."""

    @property
    def ready(self) -> bool:
        """Whether fast labels may be used."""
        return bool(self.stages) and not self.given_up

    def holds_for(self, image: ImageState) -> bool:
        """Whether it may be used for an image."""
        return self.only_for is None or any(image is other for other in self.only_for)

    def give_up(self, stage: int) -> None:
        """Leave a stage that does not work for some input, or whose network changed."""
        self.failed.add(stage)
        self.given_up |= not self.stages[stage].backend.trusted_inputs_only


class BackendRunner:
    """Computes logits of pairs by a backend, in chunks that fit into memory."""

    def __init__(self, exact: ExactEngine) -> None:
        self.exact, self.chunk = exact, exact.chunk
        self.fixed_chunk = exact.chunk is not None
        """Whether somebody set the chunk, or memory ran out: then no backend is given several chunks at once."""
        self.sizes: set[tuple[int, ...]] | None = None
        """Heights and widths of inputs that backends were compared for; others are computed exactly. None: any."""

    def chunk_size(self, pairs: PairBatch, start: int = 0, chunks: int = 1) -> int:
        """How many pairs from `start` on fit into so many chunks."""
        pixels, device = pairs.image(start).pixels, self.exact.classifier.device
        if self.chunk is None:
            numel = self.exact.input_numel(pixels)
            self.chunk, block = default_chunk(device, numel), block_size(numel)
            if device.type == "cuda" and self.chunk >= block:
                self.chunk -= self.chunk % block
        size = self.chunk * chunks
        return size if self.exact.grid == "input" else max(1, min(size, COPY_BYTES // (4 * pixels.numel())))

    def split(self, pairs: PairBatch, chunks: int = 1) -> Iterator[PairBatch]:
        """Cut pairs into parts of so many chunks."""
        start = 0
        while start < len(pairs):
            yield (part := pairs.part(start, start + self.chunk_size(pairs, start, chunks)))
            start += len(part)

    def logits(self, pairs: PairBatch, backend: Backend) -> Tensor:
        """Logits by a backend; if memory runs out, of halves, and of smaller chunks from then on."""
        try:
            return self.forward(pairs, backend)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(pairs) == 1:
                raise out_of_memory(pairs, self.exact.classifier) from error
        self.exact.empty_caches()
        half = len(pairs) // 2
        self.fixed_chunk, self.chunk = True, max(1, min(self.chunk or half, half))
        return torch.cat([self.logits(part, backend) for part in (pairs.part(0, half), pairs.part(half, len(pairs)))])

    def forward(self, pairs: PairBatch, backend: Backend, *, pad_to: int | None = None) -> Tensor:
        """Logits in as few calls as image sizes allow; `pad_to` pads each call to whole blocks."""
        rows: list[Tensor] = []
        inputs: list[Tensor] = []

        def flush() -> None:
            if inputs:
                batch = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
                padded = batch if pad_to is None else pad_to_blocks(batch, pad_to)
                rows.append(backend.logits(padded)[: len(batch)])
                inputs.clear()

        shapes = [tuple(pairs.images[i].pixels.shape) for i in pairs.which]
        bounds = [0, *(n for n in range(1, len(shapes)) if shapes[n] != shapes[n - 1]), len(shapes)]
        for start, stop in pairwise(bounds):
            part = pairs.part(start, stop)
            size = tuple(self.exact.input_shape(part.image().pixels)[-2:])
            if self.sizes is not None and size not in self.sizes:
                flush()
                rows.append(self.exact.logits(part))
                continue
            batch = self.exact.masked_inputs(part, backend.input_dtype)
            if inputs and inputs[-1].shape[1:] != batch.shape[1:]:
                flush()
            inputs.append(batch)
        flush()
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def is_faster(self, pairs: PairBatch, backend: Backend) -> bool:
        """Whether a backend is faster on a GPU than float32, both warm."""
        device = self.exact.classifier.device
        work: list[Callable[[], Tensor]] = [lambda: self.logits(pairs, backend), lambda: self.exact.logits(pairs)]
        seconds = [math.inf, math.inf]
        for turn in range(3):
            for number, call in enumerate(work):
                torch.cuda.synchronize(device)
                started = time.monotonic()
                call()
                torch.cuda.synchronize(device)
                if turn:
                    seconds[number] = min(seconds[number], time.monotonic() - started)
                self.exact.checks += len(pairs)
        return seconds[0] < seconds[1]


class _Example(NamedTuple):
    """A part of the sample with its exact logits."""

    pairs: PairBatch
    exact: Tensor
    close_calls: bool

    def pick(self, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> _Example:
        return self._replace(
            pairs=self.pairs.pick(rows), exact=self.exact[torch.from_numpy(rows).to(self.exact.device)]
        )


class Calibrator:
    """Compares the backends of candidate cascades with exact labels of clean images, which it writes."""

    def __init__(self, runner: BackendRunner, pays: dict[Backend, bool]) -> None:
        self.runner, self.exact = runner, runner.exact
        self.pays = pays
        """Refining backends that were timed on this GPU; a changed network is timed again."""

    def run(self, candidates: Candidates, images: Sequence[ImageState], calibration: Calibration) -> None:
        """Find the stages for some images."""
        ordered = sorted(images, key=lambda image: tuple(image.pixels.shape))
        sample, pool = draw_sample(ordered, np.random.default_rng(calibration.seed))
        runner = self.runner
        chunk = (runner.chunk_size(sample), runner.fixed_chunk)
        sampled = {ordered[i].pixels.shape: ordered[i].pixels for i in np.unique(sample.which)}.values()
        runner.sizes = {tuple(self.exact.input_shape(pixels)[-2:]) for pixels in sampled}
        with torch.inference_mode():
            examples = self._examples(sample, close_calls=False)
            for backends in candidates:
                if backends[0].min_batch(self.exact.input_numel(sample.images[0].pixels)) > runner.chunk_size(sample):
                    continue  # no batch will ever be as large
                first = self._first_stage(backends[0], examples, pool)
                if first is None:
                    continue
                stage, fast = first
                calibration.stages = [stage, *self._refinements(stage, backends[1:], examples)]
                if (runner.chunk_size(sample), runner.fixed_chunk) == chunk:  # else of a batch size nobody compared
                    calibration.cached = CachedLogits(fast, [image.table for image in ordered])
                return

    def _examples(self, pairs: PairBatch, *, close_calls: bool) -> list[_Example]:
        """Exact logits of pairs, which are written, and probed where they are a sample of any labels."""
        examples = [_Example(part, self.exact.logits(part), close_calls) for part in self.runner.split(pairs)]
        if not close_calls and examples:
            part, logits, _ = examples[0]
            for at in np.linspace(0, len(part) - 1, FIRST_PROBES, dtype=int):
                self.exact.probe(part.part(at, at + 1), logits[at])
        for part, logits, _ in examples:
            self.exact.write(part, logits, strict=True)
        return examples

    def _first_stage(
        self, backend: Backend, examples: list[_Example], pool: PairBatch
    ) -> tuple[Stage, list[InFlight]] | None:
        """A backend as first stage, with its logits of the pool; close calls of the pool join the examples."""
        try:
            backend.refresh()
            fast = [InFlight(part, self.runner.logits(part, backend), 0) for part in self.runner.split(pool)]
        except UnusableError:
            return None
        if not any(example.close_calls for example in examples):
            examples += self._examples(closest_calls(pool, [part.logits for part in fast]), close_calls=True)
        bounds = self._bounds(backend, examples, [part.logits for part in fast])
        if bounds is None or bounds.uncertain_share > backend.max_uncertain_share:
            return None
        return Stage(backend, bounds), fast

    def _refinements(self, last: Stage, backends: Sequence[Backend], examples: Sequence[_Example]) -> Iterator[Stage]:
        """The stages that uncertain labels pass before they are computed exactly."""
        share = last.bounds.uncertain_share
        expected = last.backend.expected
        for backend in backends:
            expected = backend.expected = math.ceil(share * expected)
            bounds = self._refining_bounds(backend, examples)
            if bounds is None:
                backend.release()
            else:
                yield Stage(backend, bounds)

    def _refining_bounds(self, backend: Backend, examples: Sequence[_Example]) -> ErrorBounds | None:
        """The bounds of a refining backend; None if it is of no use."""
        # Kernels are chosen by the size of a batch, and of uncertain labels there are few or many: every other label
        # is asked about in a large batch, and those between a few at a time.
        shares: list[_Example] = []
        for example in examples:
            many, few = (np.arange(start, len(example.pairs), 2) for start in (0, 1))
            parts = (many, *np.array_split(few, -(-len(few) // FEW_LABELS) or 1))
            shares += [example.pick(rows) for rows in parts if len(rows)]
        try:
            if backend.refresh():
                self.pays.pop(backend, None)
            if self.pays.get(backend) is False:
                return None
            bounds = self._bounds(backend, shares, [])
            if bounds is None or bounds.uncertain_share > backend.max_uncertain_share:
                return None
            if backend not in self.pays and self.exact.classifier.device.type == "cuda":
                # 3xTF32 convolutions are at times slower than float32's own.
                self.pays[backend] = self.runner.is_faster(examples[0].pairs, backend)
        except UnusableError:
            return None
        return bounds if self.pays.get(backend, True) else None

    def _bounds(self, backend: Backend, examples: Sequence[_Example], pool: Sequence[Tensor]) -> ErrorBounds | None:
        """Bounds from examples; None if the backend is unusable. The pool shows how many labels are uncertain, too."""
        try:
            fast = [self.runner.logits(example.pairs, backend) for example in examples]
            fast += self._by_large_batches(backend, [example.pairs for example in examples])
        except UnusableError:
            return None
        repeats = len(fast) // len(examples)
        logits, exact = torch.cat(fast), sanitize(torch.cat([example.exact for example in examples] * repeats))
        self.exact.checks += len(logits)
        finite = ~nonfinite(logits)
        if not finite.any():
            return None
        usual = [rows for rows, example in zip(fast, [*examples] * repeats, strict=True) if not example.close_calls]
        typical = torch.cat([*usual, *pool])
        overflowed = nonfinite(typical)
        return ErrorBounds(
            sanitize(logits[finite]),
            exact[finite],
            backend.resolution,
            typical=sanitize(typical[~overflowed]),
            overflowed=int(overflowed.sum()),
        )

    def _by_large_batches(self, backend: Backend, parts: Sequence[PairBatch]) -> list[Tensor]:
        """The logits of parts once more, by the kernels of large batches, if there will be such."""
        runner = self.runner
        size = backend.large_batch(self.exact.input_numel(parts[0].image().pixels))
        if size is None or (runner.chunk or 0) < size:
            return []
        try:
            return [runner.forward(part, backend, pad_to=size) for part in parts]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            runner.fixed_chunk, runner.chunk = True, size - 1  # then there will be none
            return []
