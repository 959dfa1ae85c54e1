"""THE hot path: labels and margins of images under unions of masks, in batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.base import Classifier
from patchcleanser.core.tables import UNMASKED, Indices
from patchcleanser.core.threats import Grid
from patchcleanser.engine.batches import Piece, Subject
from patchcleanser.engine.fast.backends import BusyError, UnusableError, Way
from patchcleanser.engine.learning import PROBES, Launched, Learning
from patchcleanser.engine.precision import (
    Precision,
    SmallerBatchError,
    TooFarError,
    WrongFastLabelError,
    broken_rows,
    gaps,
    total,
)
from patchcleanser.errors import NotAFunctionError, OutputError

PROBE_EVERY = 64
"""After the first pieces every so manieth is probed."""

MOST_COMPANY = 64
"""So many masked images of noise go beside one that is probed."""

FEW_NUMBERS = 32_768
"""Fewer logits are looked at on a CPU: each little question to a GPU takes its time. For more, torch would wake its
threads (36 images and 1,000 classes: 0.2 ms for each question, on the machine of an H200)."""

NOT_FINITE = "the classifier returned NaN or infinite logits; check its weights and preprocessing"


class Request(NamedTuple):
    """Unions whose labels are wanted for one image."""

    subject: Subject
    unions: Indices


class Waiting(NamedTuple):
    """Labels that are to be computed again: the doubtful ones, and those that are audited."""

    piece: Piece
    logits: Tensor
    by: Tensor
    """The numbers of the steps that they are by."""
    first: Tensor
    """The labels that the first step gave."""
    unsure: Tensor
    sampled: Tensor

    def pick(self, rows: Tensor) -> Waiting:
        """Those with these numbers."""
        return Waiting(self.piece.pick(rows.cpu().numpy()), *(tensor[rows] for tensor in self[1:]))

    def to(self, device: torch.device) -> Waiting:
        """The same, to wait on a device; where streams share memory, no GPU is one."""
        return Waiting(self.piece, *(tensor.to(device) for tensor in self[1:]))


class MaskedClassifier(Learning):
    """Computes labels under masks that can be trusted, however they were computed.

    Exact labels do not depend on what else is computed: see `Batches._exact`.
    """

    def __init__(
        self, classifier: Classifier, *, grid: Grid, chunk: int | None = None, precision: Precision = "exact"
    ) -> None:
        super().__init__(classifier, grid=grid, chunk=chunk, precision=precision)
        # A GPU is given the next piece before the answers to the last one are looked at, so it never waits.
        self.ahead = 1 if classifier.device.type == "cuda" else 0
        self.settled: Counter[str] = Counter()
        """How many doubtful labels each kind of finer way settled."""
        self._far: list[tuple[int, Tensor, Tensor]] = []
        """Of labels that moved too far: the step, its logits and finer ones."""
        self._side: torch.cuda.Stream | None = None
        self._stored = self._rechecks = 0

    def fill_in(self, requests: Sequence[Request], *, strict: bool = True, clean: bool = False) -> None:
        """Compute the labels that the tables do not know yet, all requests batched together.

        Logits that are NaN or infinite are an error. Not `strict`, they are one only if an image gets no other
        answer and noise gets none either: whoever predicts must not let pixels silence the classifier. `clean` are
        images that no attacker had a hand in: some ways are for these only.
        """
        if self.recheck.ready and not all(self._holds_for(r.subject) for r in requests):
            self.recheck.begin()
        self._far = []
        with torch.inference_mode():
            self._take_held(requests, strict, clean)
        self._learn_from_far()
        # Images of one size sit together, so that most chunks are one stack of equal images.
        wanted = [(r.subject, r.subject.table.missing(r.unions)) for r in requests]
        wanted = sorted((w for w in wanted if len(w[1])), key=lambda w: tuple(w[0].pixels.shape))
        if not wanted:
            self._require_one_shape()
            return
        piece = Piece(
            [subject for subject, _ in wanted],
            np.repeat(np.arange(len(wanted)), [len(unions) for _, unions in wanted]),
            np.concatenate([unions for _, unions in wanted]),
        )
        with torch.inference_mode():
            launched: deque[Launched] = deque()
            waiting = self._nothing_waiting()
            for part in self._parts(piece):
                launched.append(self._launch(part, clean))
                while len(launched) > self.ahead:
                    self._store(launched.popleft(), strict, waiting)
                self._go_on(waiting, strict, clean)
            while launched:
                self._store(launched.popleft(), strict, waiting)
            self._go_on(waiting, strict, clean, all_of_it=True)
        self._learn_from_far()
        self._require_one_shape()
        if not all(subject.table.answered for subject in piece.subjects) and not self._answers_noise(piece):
            raise OutputError(NOT_FINITE)

    def _require_one_shape(self) -> None:
        """Have labels computed again if memory ran out among them: batches are smaller since."""
        if self.shrunk:
            self.shrunk = False
            raise SmallerBatchError

    def _answers_noise(self, piece: Piece) -> bool:
        """Whether logits of noise are finite: then it was an image's pixels that left it without finite logits."""
        with torch.inference_mode():
            return not bool(broken_rows(self._logits(self._noise(piece.part(0, 1)))).any())

    def _nothing_waiting(self) -> list[list[Waiting]]:
        """What waits for each further step, and at last for the exact one."""
        return [[] for _ in range(len(self.finer) + 1)]

    def _take_held(self, requests: Sequence[Request], strict: bool, clean: bool) -> None:
        """Fast labels that were computed while learning are as good as any, if it was of these images."""
        held, self._held = self._held, None
        mine = {id(request.subject.table) for request in requests}
        if held is None or self.exact_only or not self.recheck.ready or not held.done or id(held.tables[0]) not in mine:
            return
        subjects, way = held.done[0].piece.subjects, self._steps[0].way
        same = all(s.table is table for s, table in zip(subjects, held.tables, strict=True))
        if not same or (way.clean_only and not clean):
            return
        try:
            for number, (piece, logits, *_) in enumerate(held.done):
                if number == 0 or self._to_probe:
                    self._probe(piece.part(0, 1), logits[0], way)
                self._stored += 1
        except UnusableError:
            self._give_up(0)
            return
        waiting = self._nothing_waiting()
        for done in held.done:
            known = [subjects[s].table.labels[u] >= 0 for s, u in zip(*done.piece[1:], strict=True)]
            rows = np.flatnonzero(~np.array(known, dtype=bool))  # close calls were computed exactly
            if len(rows):
                logits = done.logits[torch.from_numpy(rows).to(done.logits.device)]
                self._store(done._replace(piece=done.piece.pick(rows), logits=logits), strict, waiting)
        self._go_on(waiting, strict, clean, all_of_it=True)

    def _give_up(self, step: int) -> None:
        """A step does not work for inputs of this size, though it worked for others, or the network changed."""
        self._failed.add(step)
        self.recheck.hopeless |= not self._steps[step].way.clean_only

    def _launch(self, piece: Piece, clean: bool) -> Launched:
        while (step := self._step_for(piece, clean)) is not None:
            try:
                return self._launched(piece, step, clean)
            except UnusableError:
                self._give_up(step)
        return self._launched(piece, None, clean)

    def _launched(self, piece: Piece, step: int | None, clean: bool) -> Launched:
        way = None if step is None else self._steps[step].way
        logits = self._logits(piece, way)
        if self._to_probe:
            at = 0 if self._stored == 0 else len(piece) // 2
            self._probe(piece.part(at, at + 1), logits[at], way, clean=clean)
        self._stored += 1
        moment = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
        return Launched(piece, logits, step, moment)

    @contextmanager
    def _aside(self, moment: torch.cuda.Event | None) -> Iterator[None]:
        """Look at a piece's answers while a GPU is at work on the next one: in turn with that, it would wait for it."""
        if moment is None:
            yield
            return
        if self._side is None:  # a few small kernels, which are not to wait for room among the next piece's
            self._side = torch.cuda.Stream(self.classifier.device, priority=-1)  # type: ignore[no-untyped-call]
        self._side.wait_event(moment)
        with torch.cuda.stream(self._side):
            try:
                yield
            finally:
                self._side.synchronize()  # then nobody else need know that this was elsewhere

    def _step_for(self, piece: Piece, clean: bool) -> int | None:
        """The first step that takes a piece: one may be for clean images only, for many pairs, or for doubtful labels.

        None: it is computed exactly.
        """
        if not self.fast or self.exact_only or not self.recheck.ready:
            return None
        numbers = self._numbers(piece.subjects[piece.which[0]].pixels)
        for number, (way, _) in enumerate(self._steps):
            begins = number not in self._failed and any(way is one for one in self.ways)
            if begins and len(piece) >= way.fewest(numbers) and (clean or not way.clean_only):
                return number
        return None

    @property
    def _to_probe(self) -> bool:
        return self._stored < PROBES or self._stored % PROBE_EVERY == 0

    def _store(self, done: Launched, strict: bool, waiting: list[list[Waiting]]) -> None:
        """Keep the labels of a piece; fast ones that are to be computed again wait for others, to keep a GPU busy."""
        with self._aside(done.moment):
            self._look_at(done, strict, waiting)

    def _look_at(self, done: Launched, strict: bool, waiting: list[list[Waiting]]) -> None:
        piece, logits, step = done[:3]
        if step is None:
            self._keep(piece, logits, strict, exact=True)
            return
        logits = logits.cpu() if logits.numel() < FEW_NUMBERS else logits
        unsure = self._steps[step].recheck.doubt(total(logits)) | broken_rows(logits)
        sampled = self.recheck.sampled(len(piece)).to(logits.device)
        labels = total(logits).argmax(1)
        fast = Waiting(piece, logits, torch.full_like(labels, step), labels, unsure, sampled)
        self._pass_on(fast, strict, waiting[step])

    def _pass_on(self, done: Waiting, strict: bool, further: list[Waiting]) -> None:
        """Keep what is settled; what is not waits further on."""
        again = (done.unsure | done.sampled).cpu()
        mine, others = torch.nonzero(~again)[:, 0], torch.nonzero(again)[:, 0]
        if not len(others):
            self._keep(done.piece, done.logits, strict, exact=False)
            return
        further.append(done.pick(others).to(torch.device("cpu")))
        if len(mine):
            self._keep(done.piece.pick(mine.numpy()), done.logits[mine], strict, exact=False)

    def _keep(self, piece: Piece, logits: Tensor, strict: bool, *, exact: bool) -> None:
        """Write labels, margins and confidences down; those that are not `exact` are counted."""
        finite = ~broken_rows(logits)
        if strict and not finite.all():
            raise OutputError(NOT_FINITE)
        logits = total(logits)
        # A GPU's softmax may round by the row's address; Minority Reports needs the same bits in every batch.
        sure = (logits.cpu() if exact else logits).softmax(dim=1).amax(dim=1).nan_to_num(0.0).to(logits.device)
        told = torch.stack([logits.argmax(dim=1).float(), gaps(logits), sure, finite.float()])  # a GPU is asked once
        labels, margins, confidences, answered = told.cpu().numpy()
        for s in np.unique(piece.which):
            table, mine = piece.subjects[s].table, piece.which == s
            table.labels[piece.unions[mine]] = labels[mine]
            table.margins[piece.unions[mine]] = margins[mine]
            table.confidences[piece.unions[mine]] = confidences[mine]
            table.answered |= bool(answered[mine].any())
            table.unconfirmed += 0 if exact else int(mine.sum())

    def _go_on(self, waiting: list[list[Waiting]], strict: bool, clean: bool, *, all_of_it: bool = False) -> None:
        """Take the next step with what waits; what fills no chunk goes on waiting, unless no more is to come."""
        for number, here in enumerate(waiting):
            if not here:
                continue
            piece, last = Piece.joined([rest.piece for rest in here]), number == len(self.finer)
            enough = self._many(piece, 0) if last else self.chunk or 1
            if len(piece) < enough and not all_of_it:
                continue
            tensors = [
                torch.cat(parts).to(self.classifier.device) for parts in zip(*(r[1:] for r in here), strict=True)
            ]
            here.clear()
            start = 0
            for part in self._parts(piece, exact=True, last=last):
                end = start + len(part)
                rest = Waiting(part, *(tensor[start:end] for tensor in tensors))
                start = end
                if len(part) < enough and end == len(piece) and not all_of_it:
                    here.append(rest.to(torch.device("cpu")))
                elif not last:
                    self._pass_on(self._refined(rest, number + 1, clean), strict, waiting[number + 1])
                else:
                    self._keep(part, self._exactly(rest, clean), strict, exact=True)

    def _exactly(self, rest: Waiting, clean: bool) -> Tensor:
        """Exact logits of the doubtful, the overflown and the audited; one that is audited must not be another."""
        recheck, audited = self.recheck, ~rest.unsure
        exact = self._logits(rest.piece)
        if self._rechecks % PROBE_EVERY == 0:
            self._probe(rest.piece.part(0, 1), exact[0], None, clean=clean)
        self._rechecks += 1
        labels = total(exact).argmax(1)
        caught = (labels != total(rest.logits).argmax(1)) & audited
        flips = labels != rest.first
        recheck.rechecked += len(labels)
        recheck.flipped += int(flips.sum())
        recheck.audited += int(audited.sum())
        recheck.caught += int(caught.sum())
        self.checks += len(labels)
        told = torch.stack([flips, audited, caught], 1).tolist()
        for s, (flip, sample, wrong) in zip(rest.piece.which, told, strict=True):
            table = rest.piece.subjects[s].table
            table.rechecked += 1
            table.flipped += flip
            table.audited += sample
            table.caught += wrong
        if caught.any():
            raise WrongFastLabelError
        if clean:
            self._watch(rest, exact)
        return exact

    def _watch(self, rest: Waiting, finer: Tensor) -> None:
        """None of the labels that are computed again may have moved as far as doubt reaches: then others flip unseen.

        Of clean images only: one of an attacker's must not make everybody's labels be computed again.
        """
        told = ~broken_rows(rest.logits) & ~broken_rows(finer)
        for number in torch.unique(rest.by).tolist():
            rows = torch.nonzero(told & (rest.by == number))[:, 0]
            fast, now = total(rest.logits[rows]), total(finer[rows])
            far = self._steps[number].recheck.too_far(fast, now)
            if far.any():
                self._far.append((number, fast[far], now[far]))

    def _learn_from_far(self) -> None:
        """Learn from labels that moved too far, and say so: others may have; a step that then pays no more is left."""
        far, self._far = self._far, []
        for number in {step for step, _, _ in far}:
            fast, now = (
                torch.cat(parts) for parts in zip(*(rest for step, *rest in far if step == number), strict=True)
            )
            way, recheck = self._steps[number]
            if recheck.widen(fast, now) > way.bearable:
                self._failed.add(number)
        if far:
            raise TooFarError

    def _refined(self, rest: Waiting, number: int, clean: bool) -> Waiting:
        """What a finer way says of doubtful labels, and which are in doubt still."""
        before, step = self._steps[number - 1], self._steps[number]
        # What overflowed is like nothing that the finer way was compared on, unless little was enough for that.
        unsure = rest.unsure if before.way.clean_only else rest.unsure & ~broken_rows(rest.logits)
        rows = torch.nonzero(unsure)[:, 0]
        if self.are_few(len(rows)) or number in self._failed:
            return rest
        try:
            found = self._logits(rest.piece.pick(rows.cpu().numpy()), step.way)
        except BusyError:
            return rest
        except UnusableError:  # or not as it was compared; the exact way is always there
            self._failed.add(number)
            return rest
        if clean:
            self._watch(rest.pick(rows), found)
        doubtful = step.recheck.doubt(total(found)) | broken_rows(found)
        self.checks += len(rows)
        self.settled[type(step.way).__name__] += int((~doubtful).sum())
        logits, by, unsure = rest.logits.clone(), rest.by.clone(), rest.unsure.clone()
        logits[rows], by[rows], unsure[rows] = found, number, doubtful
        return rest._replace(logits=logits, by=by, unsure=unsure)

    def _probe(self, one: Piece, answer: Tensor, way: Way | None, *, clean: bool = True) -> None:
        """Refuse a classifier, or a fast way, that answers a pair differently in other batches.

        An exact answer must be the same to the last bit. Whoever predicts hands in what an attacker may have made,
        which must not silence the classifier: there, noise decides.
        """
        if way is None:
            if one.unions[0] == UNMASKED:  # it has no row of its own, so the first mask is probed instead
                one = Piece(one.subjects, one.which, np.zeros_like(one.unions))
                answer = self._logits(one)[0]
                self.checks += 1
            apart = _apart([answer, *self._in_other_batches(one, None)])
            if apart > 0 and not clean:
                noise = self._noise(one)
                answers = [self._logits(noise)[0], *self._in_other_batches(noise, None)]
                apart = _apart(answers) if _apart(answers) > 1e-3 * _size_of(answers[0]) else 0.0
            if apart > 0:
                raise NotAFunctionError(
                    f"the same image got logits {apart:.3g} apart (limit 0) alone and in a batch; "
                    "turn off dropout and batch statistics: a certificate needs a deterministic classifier"
                )
            return
        apart = _apart([answer, *self._in_other_batches(one, way)])
        if apart > 5e-2 * _size_of(answer):  # an attacker's image may be too much for half precision
            raise UnusableError(f"the same image got fast logits {apart:.3g} apart")

    def _in_other_batches(self, one: Piece, way: Way | None) -> list[Tensor]:
        """Logits [classes] of a pair alone, and beside noise; who asks for chunks of one never has company."""
        subject, noise = one.subjects[one.which[0]], self._noise(one).subjects[0]
        union, masks = one.unions[0], np.arange(len(subject.table.mask_set))[: (self.chunk or MOST_COMPANY) - 1]
        company = Piece([subject, noise], np.append(0, np.ones_like(masks)), np.append(union, masks))
        batches = [one] if self.chunk == 1 and not (way is not None and self.roomy) else [one, company]
        self.checks += sum(map(len, batches))
        return [self._logits(piece, way)[0] for piece in batches]

    def _noise(self, one: Piece) -> Piece:
        """The same union of an image of noise, which is always the same."""
        subject = one.subjects[one.which[0]]
        pixels = torch.rand(subject.pixels.shape, generator=torch.Generator().manual_seed(0))
        noise = Subject(pixels.to(subject.pixels), subject.table)
        return Piece([noise], np.zeros(1, dtype=np.intp), one.unions)


def _size_of(logits: Tensor) -> float:
    """The size of the two largest logits [classes], at least 1."""
    largest = total(logits).topk(2).values.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    return max(1.0, float(largest))


def _apart(answers: Sequence[Tensor]) -> float:
    """How far logits [classes] of one pair are apart at most; infinitely, if only some of them are finite."""
    logits = total(torch.stack([answer.to(answers[0].device) for answer in answers]))
    finite = torch.isfinite(logits)
    if (finite.any(0) & ~finite.all(0)).any():
        return float("inf")
    spread = (logits.amax(0) - logits.amin(0))[finite.all(0)]
    return float(spread.amax()) if len(spread) else 0.0
