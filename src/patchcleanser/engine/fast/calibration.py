"""Calibration: how far backends move logits of clean images, and which labels are therefore uncertain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.classifier import is_out_of_memory
from patchcleanser.core.label_table import LabelTable
from patchcleanser.engine.exact import FIRST_PROBES, nonfinite, sanitize, top2_margin
from patchcleanser.engine.fast.backends import Backend, BackendRunner, UnusableError
from patchcleanser.engine.masking import ImageState, PairBatch

SAMPLE = 512
MIN_IMAGES = 8
"""About how many labels, and of how many clean images at least, are computed both ways before a fast one is trusted.
One or two images say too little about others (observed with `tiny` in bfloat16)."""

POOL = 2048
"""Up to half of the sample are the closest calls among so many other labels: confident ones move least."""

SAFETY = 2.0
"""Labels are uncertain up to this many times the largest observed movement."""

FEW_LABELS = 64
"""Fewer uncertain labels than this are computed exactly at once: so few keep no GPU busy."""


class ErrorBounds:
    """How far each class's logit may move against another's between a fast backend and a finer one.

    A label flips if some class gains more on the first than it lay behind. So a label is uncertain if some class lies
    no further behind the first than (twice) the most that just these two, or the top two of any label, were observed
    to move against each other, or than the backend can resolve at all. Bounds are learnt from clean images only and
    then fixed: neither the order of images nor the batch size changes them, and an attacker's images teach nothing.
    They only ever widen, when a label turns out to have moved further.
    """

    def __init__(
        self, fast: Tensor, exact: Tensor, resolution: float, *, typical: Tensor | None = None, overflowed: int = 0
    ) -> None:
        """Learn from logits [N, C] by both; `typical` fast logits, and how many overflowed, give `uncertain_share`."""
        self._moved = fast.new_zeros(0, fast.shape[1])
        self._top2_moved = 0.0
        self._resolution = SAFETY * resolution
        self._typical, self._overflowed = fast if typical is None else typical, overflowed
        self.widen(fast, exact)

    def widen(self, fast: Tensor, finer: Tensor) -> None:
        """Learn from these logits [N, C] too, and update `uncertain_share`, that of typical labels."""
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(finer), 0.0, finer - fast)
        moved = moved.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        two = moved.gather(1, fast.topk(min(2, fast.shape[1]), dim=1).indices)
        self._top2_moved = max(self._top2_moved, float((two[:, 0] - two[:, -1]).abs().nan_to_num(nan=torch.inf).amax()))
        self._moved = torch.cat([self._moved, moved])
        self._by_label: dict[tuple[int, torch.device], Tensor] = {}
        uncertain, total = int(self.uncertain(self._typical).sum()), len(self._typical)
        self.uncertain_share = (uncertain + self._overflowed) / max(1, total + self._overflowed)

    def uncertain(self, fast: Tensor) -> Tensor:
        """Which labels might be others in float32, bool [N]."""
        first = fast.argmax(1, keepdim=True)
        behind = (fast.gather(1, first) - fast).nan_to_num(nan=0.0, posinf=torch.inf)
        return (behind <= self._limits(fast, first)).scatter(1, first, False).any(1)

    def exceeded(self, fast: Tensor, finer: Tensor) -> Tensor:
        """Labels for which some class gained more on the first than its bound, bool [N]."""
        first = fast.argmax(1, keepdim=True)
        before, after = (logits.gather(1, first) - logits for logits in (fast, finer))
        gained = torch.where(torch.isposinf(before) & torch.isposinf(after), 0.0, before - after)
        return (gained > self._limits(fast, first)).any(1)

    def _limits(self, fast: Tensor, first: Tensor) -> Tensor:
        """How far behind the first each class must lie [N, C]."""
        if not len(fast):
            return fast
        scale = fast.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True)
        labels = first[:, 0].tolist()
        rows = {label: row for row, label in enumerate(dict.fromkeys(labels))}
        which = torch.tensor([rows[label] for label in labels], device=fast.device)
        return self._bounds([*rows], fast.device)[which] + self._resolution * scale

    def _bounds(self, labels: list[int], device: torch.device) -> Tensor:
        """How near each class may come to each of these labels [len(labels), C].

        Most pairs of classes have no close call in the sample, so the movement of any label's top two counts for all.
        """
        for label in labels:
            if (label, device) not in self._by_label:
                largest = (self._moved - self._moved[:, label : label + 1]).abs().amax(0)
                largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
                self._by_label[label, device] = SAFETY * largest.clamp_min(self._top2_moved).to(device)
        return torch.stack([self._by_label[label, device] for label in labels])


def draw_sample(images: list[ImageState], rng: np.random.Generator) -> tuple[PairBatch, PairBatch]:
    """Labels to compare backends on, and the pool that close calls are chosen from, spread over all images."""
    orders = [rng.permutation(len(image.table.mask_set.unions)) for image in images]
    pooled = min(POOL, sum(map(len, orders)) // 10)
    wanted = SAMPLE - min(SAMPLE // 2, pooled // 4)
    # If there are more images than that, some have no label in the sample, but each size of image has one.
    firsts = np.diff(np.linspace(0, wanted, len(images) + 1).astype(int))
    firsts = np.maximum(firsts, -(-wanted // len(images))) if len(images) <= wanted else firsts
    each_size = list({tuple(image.pixels.shape): number for number, image in enumerate(images)}.values())
    firsts[each_size] = np.maximum(firsts[each_size], 1)
    more = -(-pooled // len(images))
    sample = [order[:first] for order, first in zip(orders, firsts, strict=True)]
    pool = [order[first : first + more] for order, first in zip(orders, firsts, strict=True)]
    return PairBatch.of(images, sample), PairBatch.of(images, pool)


def closest_calls(pool: PairBatch, fast: Sequence[Tensor]) -> PairBatch:
    """The labels of the pool with the smallest margins."""
    if not len(pool):
        return pool
    logits = torch.cat(list(fast))
    margins = torch.where(nonfinite(logits), torch.inf, top2_margin(sanitize(logits)))
    most = min(SAMPLE // 2, len(pool) // 4)
    return pool.pick(np.sort(margins.argsort(stable=True)[:most].cpu().numpy()))


class Stage(NamedTuple):
    """A backend, and which of its labels are uncertain."""

    backend: Backend
    bounds: ErrorBounds


class InFlight(NamedTuple):
    """Pairs whose logits a GPU may still be computing."""

    pairs: PairBatch
    logits: Tensor
    stage: int
    done: torch.cuda.Event | None = None


@dataclass
class Calibration:
    """The stages that some clean images led to, and for which images they hold."""

    seed: tuple[int, ...] | None = None
    only_for: list[ImageState] | None = None
    """The few images that it was learnt from; None if it holds for any image."""
    stages: list[Stage] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Stages that no longer work, or not as they were compared."""
    given_up: bool = False
    """Whether fast labels proved wrong, or do not pay for these images."""
    cached: tuple[list[InFlight], list[LabelTable]] | None = None
    """Fast logits of the pool, and the tables that they are for."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        """Draws the labels to audit."""

    @property
    def ready(self) -> bool:
        """Whether fast labels may be used."""
        return bool(self.stages) and not self.given_up

    def holds_for(self, image: ImageState) -> bool:
        """Whether it may be used for an image."""
        return self.only_for is None or any(image.pixels is member.pixels for member in self.only_for)

    def give_up(self, stage: int) -> None:
        """Stop using a stage that does not work for some input, or whose network changed."""
        self.failed.add(stage)
        self.given_up |= not self.stages[stage].backend.trusted_inputs_only


class _Example(NamedTuple):
    """A part of the sample with its exact logits."""

    pairs: PairBatch
    exact: Tensor
    close_calls: bool

    def pick(self, rows: NDArray[np.intp]) -> _Example:
        exact = self.exact[torch.from_numpy(rows).to(self.exact.device)]
        return _Example(self.pairs.pick(rows), exact, self.close_calls)


class Calibrator:
    """Compares the backends of candidate cascades with exact labels of clean images, which it writes."""

    def __init__(self, runner: BackendRunner) -> None:
        self.runner, self.exact = runner, runner.exact

    def run(
        self, candidates: Sequence[Sequence[Backend]], images: Sequence[ImageState], calibration: Calibration
    ) -> None:
        """Find the stages for some images: those of the first candidate whose first backend pays."""
        ordered = sorted(images, key=lambda image: tuple(image.pixels.shape))
        sample, pool = draw_sample(ordered, np.random.default_rng(calibration.seed))
        runner = self.runner
        chunk = (runner.chunk_size(sample), runner.fixed_chunk)
        sampled = {ordered[i].pixels.shape: ordered[i].pixels for i in np.unique(sample.which)}.values()
        runner.sizes = {tuple(self.exact.input_shape(pixels)[-2:]) for pixels in sampled}
        with torch.inference_mode():
            examples = self._examples(sample, close_calls=False)
            for backends in candidates:
                with suppress(UnusableError):
                    stage, fast = self._first_stage(backends[0], examples, pool)
                    calibration.stages = [stage, *self._refinements(stage, backends[1:], examples)]
                    if (runner.chunk_size(sample), runner.fixed_chunk) == chunk:  # else of a batch size not compared
                        calibration.cached = fast, [image.table for image in ordered]
                    return

    def _examples(self, pairs: PairBatch, *, close_calls: bool) -> list[_Example]:
        """Pairs with their exact logits, which are written, and probed unless they are close calls."""
        examples = [_Example(part, self.exact.logits(part), close_calls) for part in self.runner.split(pairs)]
        if not close_calls and examples:
            part, logits, _ = examples[0]
            for at in np.linspace(0, len(part) - 1, FIRST_PROBES, dtype=int):
                self.exact.probe(part.part(at, at + 1), logits[at])
        for part, logits, _ in examples:
            self.exact.write(part, logits, strict=True)
        return examples

    def _first_stage(self, backend: Backend, examples: list[_Example], pool: PairBatch) -> tuple[Stage, list[InFlight]]:
        """A backend as first stage, and its logits of the pool, whose close calls join the examples."""
        pairs = examples[0].pairs
        if backend.min_batch(self.exact.input_numel(pairs.images[0].pixels)) > self.runner.chunk_size(pairs):
            raise UnusableError("no batch will ever be large enough")
        backend.refresh()
        fast = [InFlight(part, self.runner.logits(part, backend), 0) for part in self.runner.split(pool)]
        if not any(example.close_calls for example in examples):
            examples += self._examples(closest_calls(pool, [part.logits for part in fast]), close_calls=True)
        return Stage(backend, self._bounds(backend, examples, [part.logits for part in fast])), fast

    def _refinements(self, last: Stage, backends: Sequence[Backend], examples: Sequence[_Example]) -> Iterator[Stage]:
        """The stages that uncertain labels pass before they are computed exactly."""
        share, expected = last.bounds.uncertain_share, last.backend.expected
        for backend in backends:
            expected = backend.expected = math.ceil(share * expected)
            try:
                yield Stage(backend, self._refining_bounds(backend, examples))
            except UnusableError:
                backend.release()

    def _refining_bounds(self, backend: Backend, examples: Sequence[_Example]) -> ErrorBounds:
        """The bounds of a refining backend."""
        # Kernels are chosen by batch size, and there may be few or many uncertain labels: every other label is
        # computed in a large batch, and those between a few at a time.
        shares: list[_Example] = []
        for example in examples:
            many, few = (np.arange(start, len(example.pairs), 2) for start in (0, 1))
            parts = (many, *np.array_split(few, -(-len(few) // FEW_LABELS) or 1))
            shares += [example.pick(rows) for rows in parts if len(rows)]
        backend.refresh()
        return self._bounds(backend, shares, [])

    def _bounds(self, backend: Backend, examples: Sequence[_Example], pool: Sequence[Tensor]) -> ErrorBounds:
        """Bounds from examples; UnusableError if too many labels of them, and of the pool, are uncertain."""
        fast = [self.runner.logits(example.pairs, backend) for example in examples]
        fast += self._by_large_batches(backend, [example.pairs for example in examples])
        repeats = len(fast) // len(examples)
        logits, exact = torch.cat(fast), sanitize(torch.cat([example.exact for example in examples] * repeats))
        self.exact.checks += len(logits)
        finite = ~nonfinite(logits)
        if not finite.any():
            raise UnusableError("no logits are finite")
        drawn = [rows for rows, example in zip(fast, [*examples] * repeats, strict=True) if not example.close_calls]
        typical = torch.cat([*drawn, *pool])
        overflowed = nonfinite(typical)
        bounds = ErrorBounds(
            sanitize(logits[finite]),
            exact[finite],
            backend.resolution,
            typical=sanitize(typical[~overflowed]),
            overflowed=int(overflowed.sum()),
        )
        if bounds.uncertain_share > backend.max_uncertain_share:
            raise UnusableError(f"{bounds.uncertain_share:.0%} of the labels are uncertain")
        return bounds

    def _by_large_batches(self, backend: Backend, parts: Sequence[PairBatch]) -> list[Tensor]:
        """The logits of parts once more, by the kernels of large batches, if there will be large batches."""
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
