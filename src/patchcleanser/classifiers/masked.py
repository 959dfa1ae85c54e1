"""THE hot path: labels and margins of images under unions of masks, in batches."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.base import Classifier, is_out_of_memory
from patchcleanser.classifiers.batches import Batches, Piece, Subject
from patchcleanser.classifiers.copied import block_size
from patchcleanser.classifiers.precision import (
    CALIBRATION,
    FEWEST,
    Precision,
    Recheck,
    WrongFastLabelError,
    gaps,
    ties,
    total,
)
from patchcleanser.classifiers.ways import BusyError, UnusableError, Way
from patchcleanser.core.tables import UNMASKED, Indices
from patchcleanser.core.threats import Grid
from patchcleanser.errors import InputError, NotAFunctionError, OutputError

PROBES = 4
PROBE_EVERY = 64
"""The first pieces, and then every so manieth, are probed: is the classifier a function?"""

FINER = 64
"""Fewer doubtful labels than this are computed exactly at once: so few keep no GPU busy, whichever way they go."""

NOT_FINITE = "the classifier returned NaN or infinite logits; check its weights and preprocessing"


class Request(NamedTuple):
    """Unions whose labels are wanted for one image."""

    subject: Subject
    unions: Indices


class Step(NamedTuple):
    """A way to labels, and which are doubtful: those take the next one, which is finer, or at last the exact one."""

    way: Way
    recheck: Recheck


class Waiting(NamedTuple):
    """Labels that are to be computed again: the doubtful ones, and those that are audited."""

    piece: Piece
    logits: Tensor
    first: Tensor
    """The labels that the first step gave."""
    unsure: Tensor
    sampled: Tensor

    def pick(self, rows: Tensor) -> Waiting:
        """Those with these numbers."""
        return Waiting(self.piece.pick(rows.cpu().numpy()), *(tensor[rows] for tensor in self[1:]))


class Launched(NamedTuple):
    """A piece on its way: its logits may not be there yet."""

    piece: Piece
    logits: Tensor
    step: int | None
    """By which step; None: exactly."""


class MaskedClassifier(Batches):
    """Computes labels under masks that can be trusted, however they were computed.

    Labels do not depend on how pairs
    are put into chunks: kernels round differently for other batch sizes, so where a margin is
    within rounding of zero, the label is that of the pair computed alone.
    """

    def __init__(
        self, classifier: Classifier, *, grid: Grid, chunk: int | None = None, precision: Precision = "exact"
    ) -> None:
        if precision not in ("exact", "fast"):
            raise InputError(f"precision is 'exact' or 'fast', got {precision!r}")
        super().__init__(classifier, grid=grid, chunk=chunk)
        # Where no way is faster, fast labels are simply the exact ones.
        self.ways = classifier.ways() if precision == "fast" else []
        self.way: Way | None = None
        """The one whose labels were found to be worth checking, last."""
        self.recheck = Recheck()
        """Which labels of that way are doubtful."""
        self.finer: list[Step] = []
        """The steps that doubtful labels take before they are computed exactly."""
        self._failed: set[int] = set()
        """Numbers of steps that no longer work, or not as they were compared."""
        self.settled: Counter[str] = Counter()
        """How many of them each kind of finer way settled."""
        self._only: list[Subject] | None = None
        """The few images that it was learnt from which fast labels are doubtful, and that this holds for; None: any."""
        # A GPU is given the next piece before the answers to the last one are looked at, so it never waits.
        self.ahead = 1 if classifier.device.type == "cuda" else 0
        self.checks = 0
        """Classifications spent on checking: probes, ties and fast labels computed again."""
        self._stored = 0
        self._apart = 0.0
        """How far, relative to their size, exact logits were seen to move with the batch they are in."""

    @property
    def fast(self) -> bool:
        """Whether there is a faster way to labels, worth checking them for."""
        return bool(self.ways)

    def expect(self, labels: int) -> None:
        """Say about how many labels will be asked for: what takes long to prepare is worth it for many only."""
        for way in self.ways:
            way.expected = labels

    def fill_in(self, requests: Sequence[Request], *, strict: bool = True, clean: bool = False) -> None:
        """Compute the labels that the tables do not know yet, all requests batched together.

        Logits that are NaN or infinite are an error. Not `strict`, they are one only if an image
        gets no other answer: whoever predicts must not let a patch silence the classifier. `clean` are
        images that no attacker had a hand in: some ways are for these only.
        """
        if self.recheck.ready and not all(self._holds_for(r.subject) for r in requests):
            self.recheck.begin()
        # Images of one size sit together, so that most chunks are one stack of equal images.
        wanted = [(r.subject, r.subject.table.missing(r.unions)) for r in requests]
        wanted = sorted((w for w in wanted if len(w[1])), key=lambda w: tuple(w[0].pixels.shape))
        if not wanted:
            return
        piece = Piece(
            [subject for subject, _ in wanted],
            np.repeat(np.arange(len(wanted)), [len(unions) for _, unions in wanted]),
            np.concatenate([unions for _, unions in wanted]),
        )
        with torch.inference_mode():
            launched: deque[Launched] = deque()
            waiting: list[list[Waiting]] = [[] for _ in range(len(self.finer) + 1)]
            for part in self._parts(piece):
                launched.append(self._launch(part, clean))
                while len(launched) > self.ahead:
                    self._store(launched.popleft(), strict, waiting)
                self._go_on(waiting, strict)
            while launched:
                self._store(launched.popleft(), strict, waiting)
            self._go_on(waiting, strict, all_of_it=True)
        if not all(subject.table.answered for subject in piece.subjects):
            raise OutputError(NOT_FINITE)

    def _launch(self, piece: Piece, clean: bool) -> Launched:
        while (step := self._step_for(piece, clean)) is not None:
            try:
                return self._launched(piece, step)
            except UnusableError:  # for inputs of this size, though it worked for others, or the network changed
                self._failed.add(step)
        self.recheck.hopeless |= bool(self._failed)
        return self._launched(piece, None)

    def _launched(self, piece: Piece, step: int | None) -> Launched:
        way = None if step is None else self._steps[step].way
        logits = self._logits(piece, way)
        if self._to_probe:
            at = 0 if self._stored == 0 else len(piece) // 2
            self._probe(piece.part(at, at + 1), logits[at], way)
        self._stored += 1
        return Launched(piece, logits, step)

    @property
    def _steps(self) -> list[Step]:
        return [] if self.way is None else [Step(self.way, self.recheck), *self.finer]

    def _step_for(self, piece: Piece, clean: bool) -> int | None:
        """The first step that takes a piece: one may be for clean images only, or for many pairs; None: none does."""
        if not self.fast or not self.recheck.ready:
            return None
        numbers = self._numbers(piece.subjects[piece.which[0]].pixels)
        for number, (way, _) in enumerate(self._steps):
            if number not in self._failed and len(piece) >= way.fewest(numbers) and (clean or not way.clean_only):
                return number
        return None

    def _either(self, piece: Piece, way: Way | None) -> Tensor:
        """Logits by a faster way, if that can be; exact ones pass for fast ones in every check."""
        try:
            return self._logits(piece, way)
        except UnusableError:
            return self._logits(piece)

    @property
    def _to_probe(self) -> bool:
        return self._stored < PROBES or self._stored % PROBE_EVERY == 0

    def _store(self, done: Launched, strict: bool, waiting: list[list[Waiting]]) -> None:
        """Keep the labels of a piece; fast ones that are to be computed again wait for others, to keep a GPU busy."""
        piece, logits, step = done
        if step is None:
            self._keep(piece, logits, strict, alone=len(piece) == 1)
            return
        unsure = self._steps[step].recheck.doubt(total(logits)) | _broken(logits)
        sampled = self.recheck.sampled(len(piece)).to(logits.device)
        self._pass_on(Waiting(piece, logits, total(logits).argmax(1), unsure, sampled), strict, waiting[step])

    def _pass_on(self, done: Waiting, strict: bool, further: list[Waiting]) -> None:
        """Keep what is settled; what is not waits further on."""
        again = done.unsure | done.sampled
        mine, others = torch.nonzero(~again)[:, 0], torch.nonzero(again)[:, 0]
        if len(others):
            further.append(done.pick(others))
        if len(mine):
            self._keep(done.piece.pick(mine.cpu().numpy()), done.logits[mine], strict, alone=False)

    def _keep(self, piece: Piece, logits: Tensor, strict: bool, *, alone: bool) -> None:
        """Write labels, margins and confidences down; `alone` is a pair that was computed exactly, in no company."""
        finite = ~_broken(logits)
        if strict and not finite.all():
            raise OutputError(NOT_FINITE)
        logits = total(logits) if alone else self._settled(piece, total(logits))
        labels = logits.argmax(dim=1).cpu().numpy()
        margins = gaps(logits).cpu().numpy()
        confidences = logits.softmax(dim=1).amax(dim=1).nan_to_num(0.0).cpu().numpy()
        answered = finite.cpu().numpy()
        for s in np.unique(piece.which):
            table, mine = piece.subjects[s].table, piece.which == s
            table.labels[piece.unions[mine]] = labels[mine]
            table.margins[piece.unions[mine]] = margins[mine]
            table.confidences[piece.unions[mine]] = confidences[mine]
            table.answered |= bool(answered[mine].any())

    def _settled(self, piece: Piece, logits: Tensor) -> Tensor:
        """Logits in which every tie was computed again, alone, so that no batch decides it."""
        for at in torch.nonzero(ties(logits, self.classifier.dtype, self._apart))[:, 0].tolist():
            logits[at] = total(self._logits(piece.part(at, at + 1))[0])
            self.checks += 1
        return logits

    def calibrate(self, subjects: Sequence[Subject]) -> None:
        """Learn from clean images which fast labels are doubtful; the labels computed for it are kept.

        A few images are not worth a sample of their own if there was one before. What fewer than eight teach holds for
        them alone, and is learnt only if they have very many unions.
        """
        unions = sum(len(s.table.mask_set.unions) for s in subjects)
        worth, few = unions >= 4 * CALIBRATION, len(subjects) < FEWEST
        if not self.fast or (self.recheck.ready and self._only is None and not worth):
            return
        self._only = list(subjects) if few else None
        if few and not worth:
            self.recheck.begin()
            return
        draw = np.random.default_rng(0)
        each = -(-CALIBRATION // len(subjects))
        ordered = sorted(subjects, key=lambda s: tuple(s.pixels.shape))
        picks = [draw.permutation(len(s.table.mask_set.unions))[:each] for s in ordered]
        piece = Piece(ordered, np.repeat(np.arange(len(ordered)), [len(p) for p in picks]), np.concatenate(picks))
        self.recheck.begin()
        self.finer, self._failed = [], set()
        different = {s.pixels.shape: s.pixels for s in ordered}.values()
        self.sizes = {tuple(self._input(pixels)[-2:]) for pixels in different}
        with torch.inference_mode():
            parts = list(self._parts(piece))
            exact = [self._logits(part) for part in parts]
            for part, logits in zip(parts, exact, strict=True):
                self._keep(part, logits, True, alone=len(part) == 1)
            numbers, most = self._numbers(ordered[0].pixels), self._size(piece, 0, 1)
            for way in self.ways:
                if way.fewest(numbers) > most:  # no piece will ever be as large
                    continue
                self.way = way
                self._learn(self.recheck, way, parts, exact)
                if self.recheck.ready:
                    break
            last = self.way if self.recheck.ready else None
            while last is not None and last.finer is not None:
                last.finer.expected = math.ceil(self.recheck.share * last.expected)
                self._learn_finer(last.finer, parts, exact)
                last = last.finer

    def _learn_finer(self, finer: Way, parts: Sequence[Piece], exact: Sequence[Tensor]) -> None:
        """Compare a finer way too; one that is of no use is not asked again."""
        if finer.pays is False:
            return
        # Kernels are chosen by the size of a batch, and of doubtful labels there are few or many: every other label
        # is asked about in a large batch, and those between a few at a time.
        shares: list[tuple[Piece, Tensor]] = []
        for part, logits in zip(parts, exact, strict=True):
            many, few = np.arange(0, len(part), 2), np.arange(1, len(part), 2)
            for rows in [many, *(few[at : at + FINER] for at in range(0, len(few), FINER))]:
                shares.append((part.pick(rows), logits[torch.from_numpy(rows).to(logits.device)]))
        recheck = Recheck()
        self._learn(recheck, finer, [part for part, _ in shares], [logits for _, logits in shares])
        if recheck.ready and self._pays(finer, parts[0]):
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

    def _try_sharing(self, way: Way, subject: Subject) -> None:
        """See once, on a GPU, whether a way is faster if pairs share work; a CPU's work is counted beforehand.

        In less than a block: whole blocks may be compiled, and this is not worth compiling a network twice.
        """
        most = min(self.chunk or 1, block_size(self._numbers(subject.pixels)) - 1)
        unions = np.arange(min(most, len(subject.table.mask_set.unions)))
        piece = Piece([subject], np.zeros_like(unions), unions)
        sharing = self._sharing(piece, way)
        if sharing is None or sharing.pays is not None or self.classifier.device.type != "cuda":
            return

        def alone() -> None:
            with way.unshared():
                self._logits(piece, way)

        sharing.pays = self._faster(piece, lambda: self._logits(piece, way), alone)

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

    def _parts(self, piece: Piece, *, exact: bool = False) -> Iterator[Piece]:
        """A piece cut into chunks, or, if it may go by a faster way, into as many at once as that way likes."""
        start = 0
        while start < len(piece):
            way = self.way if self.roomy and self.recheck.ready and not exact else None
            size = self._size(piece, start, way.chunks if way is not None else 1)
            yield (part := piece.part(start, min(start + size, len(piece))))
            start += len(part)

    def _learn(self, recheck: Recheck, way: Way, parts: Sequence[Piece], logits: Sequence[Tensor]) -> None:
        """Compare a fast way with the exact logits; if it is unusable, nothing is learnt."""
        recheck.begin()
        way.renew()
        try:
            self._try_sharing(way, parts[0].subjects[parts[0].which[0]])
            fast = [self._logits(part, way) for part in parts] + self._by_blocks(way, parts)
            if way.blocks and any(self._sharing(part, way) for part in parts):  # few pairs share nothing
                with way.unshared():
                    fast += [self._logits(part, way) for part in parts]
        except UnusableError:
            return
        found, exact = torch.cat(fast), total(torch.cat(list(logits) * (len(fast) // len(parts))))
        self.checks += len(found)
        whole = ~_broken(found)
        if whole.any():
            broken = int((~whole).sum())
            recheck.calibrate(total(found[whole]), exact[whole], way.resolution, broken=broken, most=way.bearable)

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

    def _go_on(self, waiting: list[list[Waiting]], strict: bool, *, all_of_it: bool = False) -> None:
        """Take the next step with what waits; what fills no chunk goes on waiting, unless no more is to come."""
        for number, here in enumerate(waiting):
            if not here or (sum(len(rest.piece) for rest in here) < (self.chunk or 1) and not all_of_it):
                continue
            piece = Piece.joined([rest.piece for rest in here])
            tensors = [torch.cat(parts) for parts in zip(*(rest[1:] for rest in here), strict=True)]
            here.clear()
            start = 0
            for part in self._parts(piece, exact=True):
                end = start + len(part)
                rest = Waiting(part, *(tensor[start:end] for tensor in tensors))
                start = end
                if len(part) < (self.chunk or 1) and end == len(piece) and not all_of_it:
                    here.append(rest)
                elif number < len(self.finer):
                    self._pass_on(self._refined(rest, number + 1), strict, waiting[number + 1])
                else:
                    self._keep(part, self._exactly(rest), strict, alone=False)

    def _exactly(self, rest: Waiting) -> Tensor:
        """Exact logits of the doubtful, the overflown and the audited; one that is audited must not be another."""
        recheck, audited = self.recheck, ~rest.unsure
        exact = self._logits(rest.piece)
        labels = total(exact).argmax(1)
        if ((labels != total(rest.logits).argmax(1)) & audited).any():
            raise WrongFastLabelError
        flips = labels != rest.first
        recheck.rechecked += len(labels)
        recheck.flipped += int(flips.sum())
        recheck.audited += int(audited.sum())
        self.checks += len(labels)
        for s, flip, sample in zip(rest.piece.which, flips.tolist(), audited.tolist(), strict=True):
            table = rest.piece.subjects[s].table
            table.rechecked += 1
            table.flipped += flip
            table.audited += sample
        return exact

    def _refined(self, rest: Waiting, number: int) -> Waiting:
        """What a finer way says of doubtful labels, and which are in doubt still."""
        before, step = self._steps[number - 1], self._steps[number]
        # What overflowed is like nothing that the finer way was compared on, unless little was enough for that.
        unsure = rest.unsure if before.way.clean_only else rest.unsure & ~_broken(rest.logits)
        rows = torch.nonzero(unsure)[:, 0]
        if len(rows) < FINER or number in self._failed:
            return rest
        try:
            found = self._logits(rest.piece.pick(rows.cpu().numpy()), step.way)
        except BusyError:
            return rest
        except UnusableError:  # or not as it was compared; the exact way is always there
            self._failed.add(number)
            return rest
        doubtful = step.recheck.doubt(total(found)) | _broken(found)
        self.checks += len(rows)
        self.settled[type(step.way).__name__] += int((~doubtful).sum())
        logits, unsure = rest.logits.clone(), rest.unsure.clone()
        logits[rows], unsure[rows] = found, doubtful
        return rest._replace(logits=logits, unsure=unsure)

    def _probe(self, one: Piece, answer: Tensor, way: Way | None) -> None:
        """Refuse a classifier, or a fast way, that answers a pair differently in its batch, alone and in company."""
        other = UNMASKED if one.unions[0] != UNMASKED else 0
        company = Piece(one.subjects, one.which[[0, 0]], np.array([one.unions[0], other]))
        # Who asks for chunks of one never has company, and the question does not arise.
        fast = way is not None
        asked = [one] if self.chunk == 1 and not (fast and self.roomy) else [one, company]
        self.checks += sum(map(len, asked))
        answers = total(torch.stack([answer, *(self._logits(piece, way)[0] for piece in asked)]))
        finite = torch.isfinite(answers).all(0)
        half = fast or self.classifier.dtype != torch.float32
        largest = answers[0].topk(2).values.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        limit = (5e-2 if half else 1e-3) * max(1.0, float(largest))
        apart = float((answers.amax(0) - answers.amin(0))[finite].amax()) if finite.any() else 0.0
        if not half:
            self._apart = max(self._apart, apart / max(1.0, float(largest)))
        if apart > limit or (torch.isneginf(answers).any(0) & ~torch.isneginf(answers).all(0)).any():
            if fast:  # an attacker's image may be too much for half precision; of the classifier, exact labels tell
                raise UnusableError(f"the same image got fast logits {apart:.3g} apart")
            raise NotAFunctionError(
                f"the same image got logits {apart:.3g} apart (limit {limit:.3g}) alone and in a "
                "batch; turn off dropout and batch statistics: a certificate needs a deterministic classifier"
            )


def _broken(logits: Tensor) -> Tensor:
    """Rows that overflowed, bool [N]."""
    return (torch.isnan(logits) | torch.isposinf(logits)).any(1)
