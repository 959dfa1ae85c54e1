"""FastEngine: a cascade of faster backends over an exact engine; uncertain labels go on to finer stages."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.label_table import LabelTable
from patchcleanser.engine import LabelEngine, RecomputeError
from patchcleanser.engine.exact import (
    BATCHES_AT_ONCE,
    FIRST_PROBES,
    PROBE_EVERY,
    ExactEngine,
    logit_scale,
    max_spread,
    missing_pairs,
    nonfinite,
    sanitize,
)
from patchcleanser.engine.fast.backends import Backend, BackendRunner, UnusableError, candidates_for
from patchcleanser.engine.fast.calibration import FEW_LABELS, MIN_IMAGES, SAMPLE, Calibration, Calibrator, InFlight
from patchcleanser.engine.masking import ImageState, LabelRequest, PairBatch

AUDIT = 1 / 512
"""The share of labels that are computed in float32 although they are not uncertain."""

RETRIES = 3
"""How often a group of images is computed again with wider bounds before all its labels are computed exactly."""

FEW_LOGITS = 32_768
"""Fewer logits are judged on the CPU, since each small GPU kernel has its latency. For more, torch would wake its
threads (36 images and 1,000 classes: 0.2 ms each, beside an H200)."""


@dataclass
class FastLabelStats:
    """How many labels were computed how, since the engine was made."""

    labels: int = 0
    """Labels of the first stage."""
    rechecked: int = 0
    """Labels computed again in float32."""
    flipped: int = 0
    """Of the rechecked ones, those whose first label was wrong."""
    audited: int = 0
    """Labels that were not uncertain, and were computed in float32 as a sample."""
    caught: int = 0
    """Of the audited ones, those that were wrong: then all labels of the group are computed exactly."""
    settled: Counter[str] = field(default_factory=Counter)
    """Uncertain labels that a refining backend settled, by its class."""


class Pending(NamedTuple):
    """Labels that are to be computed again: the uncertain ones, and those that are audited."""

    pairs: PairBatch
    logits: Tensor
    stage: Tensor
    """The stage that each row of logits is by."""
    first_label: Tensor
    """The label that the first stage gave."""
    uncertain: Tensor
    audited: Tensor

    def pick(self, rows: Tensor) -> Pending:
        return Pending(self.pairs.pick(rows.cpu().numpy()), *(tensor[rows] for tensor in self[1:]))

    def to(self, device: torch.device) -> Pending:
        """The same on a device. Labels wait on the CPU, since two CUDA streams would share memory."""
        return Pending(self.pairs, *(tensor.to(device) for tensor in self[1:]))


class FastEngine(LabelEngine):
    """Labels by the fastest backend that pays, checked against the exact engine that it owns.

    Which labels of a backend are uncertain is learnt from clean images before any is trusted. Uncertain labels go to
    the next stage, finally to the exact engine. A sample of the other labels is audited there. If labels moved further
    than their bounds, the group is computed again. Nothing is learnt from images that an attacker may have touched.
    """

    def __init__(self, exact: ExactEngine) -> None:
        self.exact, self.runner, classifier = exact, BackendRunner(exact), exact.classifier
        self.candidates = candidates_for(classifier) if isinstance(classifier, TorchClassifier) else []
        """Cascades to choose from. If there is none, labels are the exact ones."""
        self.calibration = Calibration()
        self.stats = FastLabelStats()
        self.seed: tuple[int, ...] | None = None
        self.prefetch = 1 if classifier.device.type == "cuda" else 0
        """How many batches a GPU is given before the labels of an earlier one are read, so that it never waits."""
        exact.free_memory = self._shrink
        self._moved_far: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By stage, logits before and after of labels that moved further than their bounds."""
        self._retries = 0
        self._probed = 0
        self._side_stream: torch.cuda.Stream | None = None

    @property
    def fast(self) -> bool:  # type: ignore[override]
        return bool(self.candidates)

    @property
    def ready(self) -> bool:
        """Whether fast labels may be used: it is calibrated, and most labels are not uncertain."""
        return self.calibration.ready

    def with_classifier(self, classifier: Classifier) -> FastEngine:
        """The same calibrated engine, with other preprocessing around the same network."""
        engine = object.__new__(type(self))
        vars(engine).update(vars(self))
        engine.exact = self.exact.with_classifier(classifier)
        engine.runner = copy.copy(self.runner)
        engine.runner.exact = engine.exact
        return engine

    def __getstate__(self) -> dict[str, Any]:
        """A deep copy is not calibrated: its network may be another than the one that was compared."""
        return {**vars(self), "calibration": Calibration(self.seed), "_moved_far": {}, "_side_stream": None}

    def reset(self, seed: tuple[int, ...] | None = None) -> None:
        """Forget the calibration; the statistics go on."""
        self.seed = seed
        self.calibration = Calibration(seed)

    def hint_total_labels(self, labels: int) -> None:
        for backends in self.candidates:
            backends[0].expected = labels

    def _shrink(self) -> None:
        for backends in self.candidates:
            backends[0].shrink()

    def calibrate(self, images: Sequence[ImageState]) -> None:
        """Learn from clean images which fast labels are uncertain; the labels computed for it are kept.

        An earlier calibration is kept if these images have few unions. Fewer than eight images are calibrated for
        themselves alone, and only if they have very many unions.
        """
        self._retries = 0
        unions = sum(len(image.table.mask_set.unions) for image in images)
        many_unions, few_images = unions >= 4 * SAMPLE, len(images) < MIN_IMAGES
        before = self.calibration
        reusable = before.ready and before.only_for is None and not many_unions
        if not self.fast or (reusable and not before.stages[0].backend.stale):
            return
        self.calibration = Calibration(self.seed, only_for=list(images) if few_images else None)
        if many_unions or not few_images:
            Calibrator(self.runner).run(self.candidates, images, self.calibration)

    def compute(self, requests: Sequence[LabelRequest], *, strict: bool = True, clean: bool = False) -> None:
        if self.ready and not all(self.calibration.holds_for(request.image) for request in requests):
            self.calibration = Calibration(self.seed)
        self._moved_far = {}
        with torch.inference_mode():
            self._use_cached(requests, strict, clean)
        self._widen_bounds()
        pairs = missing_pairs(requests)
        with torch.inference_mode():
            self._run_cascade(pairs, strict, clean)
        self._widen_bounds()
        self.exact.finish(pairs)

    def _run_cascade(self, pairs: PairBatch, strict: bool, clean: bool) -> None:
        if not self.ready:
            self.exact.compute_pairs(pairs, strict=strict, clean=clean)
            return
        in_flight: deque[InFlight] = deque()
        pending: list[list[Pending]] = [[] for _ in self.calibration.stages]
        chunks = 1 if self.runner.fixed_chunk else self.calibration.stages[0].backend.chunks
        for part in self.runner.split(pairs, chunks):
            launched = self._launch(part, clean)
            if launched is None:
                self.exact.compute_pairs(part, strict=strict, clean=clean)
            else:
                in_flight.append(launched)
            while len(in_flight) > self.prefetch:
                self._collect(in_flight.popleft(), strict, pending)
            self._advance(pending, strict, clean)
        while in_flight:
            self._collect(in_flight.popleft(), strict, pending)
        self._advance(pending, strict, clean, flush=True)

    def _use_cached(self, requests: Sequence[LabelRequest], strict: bool, clean: bool) -> None:
        """Use fast logits of the calibration's pool, if labels of just these images are requested."""
        calibration = self.calibration
        (batches, tables), calibration.cached = calibration.cached or ([], []), None
        requested = {id(request.image.table) for request in requests}
        if not self.ready or not batches or id(tables[0]) not in requested:
            return
        images, backend = batches[0].pairs.images, calibration.stages[0].backend
        same = all(image.table is table for image, table in zip(images, tables, strict=True))
        if not same or (backend.trusted_inputs_only and not clean):
            return
        try:
            for batch in batches:
                self._probe_sometimes(batch.pairs, batch.logits, backend)
        except UnusableError:
            calibration.give_up(0)
            return
        pending: list[list[Pending]] = [[] for _ in calibration.stages]
        for batch in batches:
            rows = np.flatnonzero([images[i].table.labels[u] < 0 for i, u in zip(*batch.pairs[1:], strict=True)])
            if len(rows):  # close calls were computed exactly
                logits = batch.logits[torch.from_numpy(rows).to(batch.logits.device)]
                self._collect(batch._replace(pairs=batch.pairs.pick(rows), logits=logits), strict, pending)
        self._advance(pending, strict, clean, flush=True)

    def _launch(self, pairs: PairBatch, clean: bool) -> InFlight | None:
        """Start the first stage that takes the pairs (some only clean ones, or many); None if none does."""
        numel, calibration = self.exact.input_numel(pairs.image().pixels), self.calibration
        for number, (backend, _) in enumerate(calibration.stages):
            starts = number not in calibration.failed and any(backend is c[0] for c in self.candidates)
            trusted = clean or not backend.trusted_inputs_only
            if not self.ready or not starts or not trusted or len(pairs) < backend.min_batch(numel):
                continue
            try:
                logits = self.runner.logits(pairs, backend)
                self._probe_sometimes(pairs, logits, backend)
            except UnusableError:
                calibration.give_up(number)
                continue
            done = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
            return InFlight(pairs, logits, number, done)
        return None

    def _collect(self, batch: InFlight, strict: bool, pending: list[list[Pending]]) -> None:
        """Write the labels of a stage; uncertain and audited ones wait until they fill a batch."""
        with self._on_side_stream(batch.done):
            logits = batch.logits.cpu() if batch.logits.numel() < FEW_LOGITS else batch.logits
            uncertain = self.calibration.stages[batch.stage].bounds.uncertain(sanitize(logits)) | nonfinite(logits)
            self.stats.labels += len(logits)
            audited = torch.from_numpy(self.calibration.rng.random(len(logits)) < AUDIT).to(logits.device)
            labels = sanitize(logits).argmax(1)
            stage = torch.full_like(labels, batch.stage)
            rows = Pending(batch.pairs, logits, stage, labels, uncertain, audited)
            self._write_settled(rows, strict, pending[batch.stage])

    @contextmanager
    def _on_side_stream(self, done: torch.cuda.Event | None) -> Iterator[None]:
        """Judge a batch's logits on a side stream, while the GPU computes the next batch."""
        if done is None:
            yield
            return
        if self._side_stream is None:  # a few small kernels, which must not queue behind the next batch's
            device = self.exact.classifier.device
            self._side_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._side_stream.wait_event(done)
        with torch.cuda.stream(self._side_stream):
            try:
                yield
            finally:
                self._side_stream.synchronize()  # then no other code has to know of this stream

    def _write_settled(self, rows: Pending, strict: bool, queue: list[Pending]) -> None:
        """Write labels that are settled; the rest waits for the next stage."""
        again = (rows.uncertain | rows.audited).cpu()
        settled, rest = torch.nonzero(~again)[:, 0], torch.nonzero(again)[:, 0]
        if len(rest):
            queue.append(rows.pick(rest).to(torch.device("cpu")))
        if len(settled):
            pairs = rows.pairs.pick(settled.numpy())
            self.exact.write(pairs, rows.logits[settled], strict=strict, confirmed=False)

    def _advance(self, pending: list[list[Pending]], strict: bool, clean: bool, *, flush: bool = False) -> None:
        """Run the next stage, or the exact engine, on pending labels; fewer than a chunk wait unless `flush`."""
        for number, queue in enumerate(pending):
            if not queue:
                continue
            pairs, last = PairBatch.concat([rows.pairs for rows in queue]), number == len(pending) - 1
            enough = BATCHES_AT_ONCE * self.exact.batch_rows(pairs.image()) if last else self.runner.chunk or 1
            if len(pairs) < enough and not flush:
                continue
            device = self.exact.classifier.device
            tensors = [torch.cat(parts).to(device) for parts in zip(*(rows[1:] for rows in queue), strict=True)]
            queue.clear()
            start = 0
            for part in self.exact.split(pairs) if last else self.runner.split(pairs):
                end = start + len(part)
                rows = Pending(part, *(tensor[start:end] for tensor in tensors))
                start = end
                if len(part) < enough and end == len(pairs) and not flush:
                    queue.append(rows.to(torch.device("cpu")))
                elif not last:
                    self._write_settled(self._refine(rows, number + 1, clean), strict, pending[number + 1])
                else:
                    self.exact.write(part, self._recheck(rows, clean), strict=strict)

    def _refine(self, rows: Pending, number: int, clean: bool) -> Pending:
        """Compute uncertain labels by the next stage; those that are uncertain there stay so."""
        calibration = self.calibration
        stage = calibration.stages[number]
        at = torch.nonzero(rows.uncertain)[:, 0]
        if len(at) < FEW_LABELS or number in calibration.failed:
            return rows
        try:
            finer = self.runner.logits(rows.pairs.pick(at.cpu().numpy()), stage.backend)
        except UnusableError:  # the exact engine computes them
            calibration.failed.add(number)
            return rows
        if clean:
            self._note_far_moves(rows.pick(at), finer)
        still = stage.bounds.uncertain(sanitize(finer)) | nonfinite(finer)
        self.exact.checks += len(at)
        self.stats.settled[type(stage.backend).__name__] += int((~still).sum())
        logits, stages, uncertain = rows.logits.clone(), rows.stage.clone(), rows.uncertain.clone()
        logits[at], stages[at], uncertain[at] = finer, number, still
        return rows._replace(logits=logits, stage=stages, uncertain=uncertain)

    def _recheck(self, rows: Pending, clean: bool) -> Tensor:
        """Exact logits of uncertain and audited labels; an audited one that was wrong ends the fast labels."""
        audited = ~rows.uncertain
        exact = self.exact.logits(rows.pairs)
        self.exact.probe_sometimes(rows.pairs, exact, clean=clean)
        labels = sanitize(exact).argmax(1)
        caught = (labels != sanitize(rows.logits).argmax(1)) & audited
        flips = labels != rows.first_label
        self.exact.checks += len(labels)
        columns = torch.stack([flips, audited, caught], 1).tolist()
        for i, (flip, audit, wrong) in zip(rows.pairs.which, columns, strict=True):
            counters: list[LabelTable | FastLabelStats] = [rows.pairs.images[i].table, self.stats]
            for counter in counters:
                counter.rechecked += 1
                counter.flipped += flip
                counter.audited += audit
                counter.caught += wrong
        if caught.any():
            self.calibration.given_up = True
            raise RecomputeError("an audit caught a wrong fast label that was not uncertain")
        if clean:
            self._note_far_moves(rows, exact)
        return exact

    def _note_far_moves(self, rows: Pending, finer: Tensor) -> None:
        """Note labels that moved further than their bounds: others may have flipped unnoticed.

        Only for clean images: an attacker must not be able to have everybody's labels computed again.
        """
        finite = ~nonfinite(rows.logits) & ~nonfinite(finer)
        for number in torch.unique(rows.stage).tolist():
            at = torch.nonzero(finite & (rows.stage == number))[:, 0]
            before, after = sanitize(rows.logits[at]), sanitize(finer[at])
            far = self.calibration.stages[number].bounds.exceeded(before, after)
            if far.any():
                self._moved_far.setdefault(number, []).append((before[far], after[far]))

    def _widen_bounds(self) -> None:
        """Learn from labels that moved too far, drop stages that no longer pay, and request the group again."""
        far, self._moved_far = self._moved_far, {}
        for number, moves in far.items():
            backend, bounds = self.calibration.stages[number]
            bounds.widen(*(torch.cat(parts) for parts in zip(*moves, strict=True)))
            if bounds.uncertain_share > backend.max_uncertain_share:
                self.calibration.failed.add(number)
        if far:
            self.calibration.given_up |= self._retries >= RETRIES
            self._retries += 1
            raise RecomputeError("a label moved further than its bound")

    def _probe_sometimes(self, pairs: PairBatch, logits: Tensor, backend: Backend) -> None:
        """Probe a pair of the first calls, and of every 64th after them: no backend may depend on the batch."""
        if self._probed < FIRST_PROBES or self._probed % PROBE_EVERY == 0:
            at = 0 if self._probed == 0 else len(pairs) // 2
            beside_noise = not (self.runner.fixed_chunk and self.runner.chunk == 1)
            batches = self.exact.probe_batches(pairs.part(at, at + 1), beside_noise=beside_noise)
            spread = max_spread([logits[at], *(self.runner.logits(batch, backend)[0] for batch in batches)])
            if spread > 5e-2 * logit_scale(logits[at]):  # an attacker's image may be too much for half precision
                raise UnusableError(f"the same image got fast logits {spread:.3g} apart")
        self._probed += 1
