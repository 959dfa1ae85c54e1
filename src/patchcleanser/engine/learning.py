"""Which labels of a fast way are doubtful, learnt from clean images, and which finer ways those go by."""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.base import Classifier, is_out_of_memory
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.tables import LabelTable
from patchcleanser.core.threats import Grid
from patchcleanser.engine.batches import Batches, Piece, Subject
from patchcleanser.engine.fast.backends import UnusableError, Way
from patchcleanser.engine.fast.half import block_size
from patchcleanser.engine.fast.onnxruntime import ways_of
from patchcleanser.engine.precision import CALIBRATION, FEWEST, Precision, Recheck, broken_rows, total
from patchcleanser.engine.samples import closest, drawn
from patchcleanser.errors import InputError

Rows = NDArray[np.intp]

PROBES = 4
"""So many of the first answers are probed: is the classifier a function?"""

EXACT_BATCHES = 64
"""So many exact batches are filled from one piece."""

FINER = 64
"""Fewer doubtful labels than this are computed exactly at once: so few keep no GPU busy, whichever way they go."""


class Step(NamedTuple):
    """A way to labels, and which are doubtful: those take the next one, which is finer, or at last the exact one."""

    way: Way
    recheck: Recheck


class Example(NamedTuple):
    """A part of the sample that ways are compared on."""

    piece: Piece
    exact: Tensor
    chosen: bool
    """Whether these are close calls, and not any labels."""

    def pick(self, rows: Rows) -> Example:
        """Those with these numbers."""
        exact = self.exact[torch.from_numpy(rows).to(self.exact.device)]
        return self._replace(piece=self.piece.pick(rows), exact=exact)


class Launched(NamedTuple):
    """A piece on its way: its logits may not be there yet."""

    piece: Piece
    logits: Tensor
    step: int | None
    """By which step; None: exactly."""
    moment: torch.cuda.Event | None = None
    """When a GPU will be done with it."""


class Held(NamedTuple):
    """Fast labels that are at hand, and the tables that they are for."""

    done: list[Launched]
    tables: list[LabelTable]


class Learning(Batches):
    """Knows faster ways to labels, and compares them with the exact one before any is trusted."""

    def __init__(
        self, classifier: Classifier, *, grid: Grid, chunk: int | None = None, precision: Precision = "exact"
    ) -> None:
        if precision not in ("exact", "fast"):
            raise InputError(f"precision is 'exact' or 'fast', got {precision!r}")
        super().__init__(classifier, grid=grid, chunk=chunk)
        # Where no way is faster, fast labels are simply the exact ones.
        self.ways = ways_of(classifier) if precision == "fast" and isinstance(classifier, TorchClassifier) else []
        self.way: Way | None = None
        """The one whose labels were found to be worth checking, last."""
        self.recheck = Recheck()
        """Which labels of that way are doubtful."""
        self.finer: list[Step] = []
        """The steps that doubtful labels take before they are computed exactly."""
        self._failed: set[int] = set()
        """Numbers of steps that no longer work, or not as they were compared."""
        self._only: list[Subject] | None = None
        """The few images that it was learnt from which fast labels are doubtful, and that this holds for; None: any."""
        self._held: Held | None = None
        """Fast labels that close calls were chosen from, for whoever asks for labels of these images next."""
        self.exact_only = False
        """While it is set, no faster way is used."""
        self.checks = 0
        """Classifications spent on checking: probes, ties and fast labels computed again."""

    @property
    def fast(self) -> bool:
        """Whether there is a faster way to labels, worth checking them for."""
        return bool(self.ways)

    def expect(self, labels: int) -> None:
        """Say about how many labels will be asked for: what takes long to prepare is worth it for many only."""
        for way in self.ways:
            way.expected = labels

    @property
    def _steps(self) -> list[Step]:
        return [] if self.way is None else [Step(self.way, self.recheck), *self.finer]

    @staticmethod
    def are_few(labels: int) -> bool:
        """Whether so few doubtful labels are computed exactly at once."""
        return labels < FINER

    def __copy__(self) -> Learning:
        """The same with the same network, and all that was learnt."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """A deep copy trusts no faster way: nobody can tell whether its network is the one that was compared."""
        recheck = copy.copy(self.recheck)
        recheck.begin()
        fresh: dict[str, Any] = {
            "recheck": recheck,
            "way": None,
            "finer": [],
            "_failed": set(),
            "_only": None,
            "_held": None,
        }
        return {**vars(self), **fresh}

    @abstractmethod
    def _probe(self, one: Piece, answer: Tensor, way: Way | None, *, clean: bool = True) -> None:
        """Refuse a classifier, or a fast way, that answers a pair differently in other batches."""

    @abstractmethod
    def _keep(self, piece: Piece, logits: Tensor, strict: bool, *, exact: bool) -> None:
        """Write labels, margins and confidences down; those that are not `exact` are counted."""

    def calibrate(self, subjects: Sequence[Subject]) -> None:
        """Learn from clean images which fast labels are doubtful; the labels computed for it are kept.

        A few images are not worth a sample of their own if there was one before. What fewer than eight teach holds for
        them alone, and is learnt only if they have very many unions.
        """
        unions = sum(len(s.table.mask_set.unions) for s in subjects)
        worth, few = unions >= 4 * CALIBRATION, len(subjects) < FEWEST
        known = self.recheck.ready and self._only is None and not worth
        if not self.fast or (known and self.way is not None and not self.way.old):
            return
        self._only = list(subjects) if few else None
        if few and not worth:
            self.recheck.begin()
            return
        ordered = sorted(subjects, key=lambda s: tuple(s.pixels.shape))
        sample, pool = drawn(ordered, np.random.default_rng(self.recheck.seed))
        self.recheck.begin()
        self.finer, self._failed, self._held = [], set(), None
        different = {s.pixels.shape: s.pixels for s in (ordered[i] for i in np.unique(sample.which))}.values()
        room = (self._size(sample, 0, 1), self.roomy)
        self.sizes = {tuple(self._input(pixels)[-2:]) for pixels in different}
        with torch.inference_mode():
            found = self._first_way(sample, pool)
            if not self.recheck.ready or self.way is None:
                return
            examples, fast = found
            last = self.way
            while last.finer is not None:
                last.finer.expected = math.ceil(self.recheck.share * last.expected)
                self._learn_finer(last.finer, examples)
                last = last.finer
        if (self._size(sample, 0, 1), self.roomy) == room:  # else by batches of a size that nobody compared
            self._held = Held(fast, [s.table for s in ordered])

    def _make_room(self) -> None:
        """Chunks become smaller, and some ways are for large ones only."""
        for way in self.ways:
            way.shrink()

    def release(self) -> None:
        """Nobody will ask for labels of the images that were learnt from."""
        self._held = None

    def _first_way(self, sample: Piece, pool: Piece) -> tuple[list[Example], list[Launched]]:
        """Find the first way that pays: the sample that it was compared on, and what it said of the pool."""
        examples = self._examples(sample, chosen=False)
        fast: list[Launched] = []
        numbers, most = self._numbers(sample.subjects[0].pixels), self._size(sample, 0, 1)
        for way in self.ways:
            if way.fewest(numbers) > most:  # no piece will ever be as large
                continue
            self.way = way
            try:
                way.renew()
                fast = [Launched(part, self._logits(part, way), 0) for part in self._parts(pool, exact=True)]
            except UnusableError:
                continue
            if not any(example.chosen for example in examples):
                examples += self._examples(closest(pool, [part.logits for part in fast]), chosen=True)
            self._learn(self.recheck, way, examples, fast)
            if self.recheck.ready:
                break
        return examples, fast

    def _examples(self, piece: Piece, *, chosen: bool) -> list[Example]:
        """Exact logits of a piece, which are kept; what goes by a faster way says nothing of the network itself."""
        examples = [Example(part, self._logits(part), chosen) for part in self._parts(piece, exact=True)]
        if not chosen and examples:
            piece, exact, _ = examples[0]
            for at in np.linspace(0, len(piece) - 1, PROBES, dtype=int):
                self._probe(piece.part(at, at + 1), exact[at], None)
        for part, logits, _ in examples:
            self._keep(part, logits, True, exact=True)
        return examples

    def _learn_finer(self, finer: Way, examples: Sequence[Example]) -> None:
        """Compare a finer way too; one that is of no use is not asked again."""
        if finer.pays is False:
            return
        # Kernels are chosen by the size of a batch, and of doubtful labels there are few or many: every other label
        # is asked about in a large batch, and those between a few at a time.
        shares: list[Example] = []
        for example in examples:
            many, few = (np.arange(start, len(example.piece), 2) for start in (0, 1))
            shares += [
                example.pick(rows) for rows in (many, *np.array_split(few, -(-len(few) // FINER) or 1)) if len(rows)
            ]
        recheck = Recheck()
        try:
            finer.renew()
        except UnusableError:
            finer.forget()
            return
        self._learn(recheck, finer, shares)
        if recheck.ready and self._pays(finer, examples[0].piece):
            self.finer.append(Step(finer, recheck))
        else:
            finer.forget()

    def _holds_for(self, subject: Subject) -> bool:
        """Whether what was learnt about fast labels may be used for an image."""
        return self._only is None or any(subject is one for one in self._only)

    def _pays(self, finer: Way, piece: Piece) -> bool:
        """Whether a finer way is faster than the exact one; on a GPU that is seen once, where both were at work before.

        Convolutions in pieces are at times slower than float32's own.
        """
        if finer.pays is None and self.classifier.device.type == "cuda":
            try:
                finer.pays = self._faster(piece, lambda: self._logits(piece, finer), lambda: self._logits(piece))
            except UnusableError:  # just now
                return False
        return finer.pays is not False

    def _faster(self, piece: Piece, one: Callable[[], object], other: Callable[[], object]) -> bool:
        """Whether one way to a piece's labels is faster on a GPU than another, both warm."""
        seconds = {one: math.inf, other: math.inf}
        for turn in range(3):
            for work in seconds:
                torch.cuda.synchronize(self.classifier.device)
                started = time.monotonic()
                work()
                torch.cuda.synchronize(self.classifier.device)
                if turn:
                    seconds[work] = min(seconds[work], time.monotonic() - started)
                self.checks += len(piece)
        return seconds[one] < seconds[other]

    def _many(self, piece: Piece, start: int) -> int:
        """So many pairs fill exact batches well, and their logits still fit into memory."""
        return EXACT_BATCHES * self.batch_rows(piece.subjects[piece.which[start]])

    def _parts(self, piece: Piece, *, exact: bool = False, last: bool = False) -> Iterator[Piece]:
        """A piece cut into chunks, or, if it may go by a faster way, into as many at once as that way likes.

        `last` is what no faster way will look at: exact batches are cut from it.
        """
        start = 0
        while start < len(piece):
            way = self.way if self.roomy and self.recheck.ready and not exact else None
            if self.fast and not last:
                size = self._size(piece, start, way.chunks if way is not None else 1)
            else:
                size = self._many(piece, start)
            yield (part := piece.part(start, min(start + size, len(piece))))
            start += len(part)

    def _learn(self, recheck: Recheck, way: Way, examples: Sequence[Example], others: Sequence[Launched] = ()) -> None:
        """Compare a fast way with the exact logits; if it is unusable, nothing is learnt.

        How many labels are doubtful is seen from what it said of others, too.
        """
        recheck.begin()
        parts = [example.piece for example in examples]
        try:
            fast = [self._logits(part, way) for part in parts] + self._by_blocks(way, parts)
        except UnusableError:
            return
        again = len(fast) // len(examples)
        found, exact = torch.cat(fast), total(torch.cat([example.exact for example in examples] * again))
        self.checks += len(found)
        whole = ~broken_rows(found)
        if not whole.any():
            return
        usual = [logits for logits, example in zip(fast, [*examples] * again, strict=True) if not example.chosen]
        common = torch.cat([*usual, *(other.logits for other in others)])
        seen = ~broken_rows(common)
        recheck.calibrate(
            total(found[whole]),
            exact[whole],
            way.resolution,
            common=total(common[seen]),
            broken=int((~seen).sum()),
            most=way.bearable,
        )

    def _by_blocks(self, way: Way, parts: Sequence[Piece]) -> list[Tensor]:
        """The logits of parts once more, by the kernels that compute whole blocks, if there will be such."""
        if not way.blocks:
            return []
        size = block_size(self._numbers(parts[0].subjects[parts[0].which[0]].pixels))
        if (self.chunk or 0) < size:
            return []
        try:
            with way.whole_blocks():
                return [self._forward(part, way) for part in parts]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.roomy, self.chunk = False, size - 1  # then there will be none
            return []
