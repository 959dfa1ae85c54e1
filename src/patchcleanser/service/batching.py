"""The scheduler: label flows of many requests, computed in shared batches on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.label_table import Indices, LabelTable
from patchcleanser.engine import LabelEngine, RecomputeError
from patchcleanser.engine.masking import ImageState, LabelRequest
from patchcleanser.service.access import Reservation
from patchcleanser.service.problems import RefusedError

log = logging.getLogger("patchcleanser.service")

NOTHING: Indices = np.array([], dtype=np.intp)
NUMBERS = 64_000_000
"""Pixel values in the masked images of one step. A label of a large photo takes a second of resizing, and requests that
were cancelled or wait are only looked at between steps."""


@dataclass(eq=False)
class ScheduledImage:
    """One image, the label flow to run on it, and the result to come."""

    state: ImageState
    start: Callable[[LabelTable], LabelFlow[Any]]
    strict: bool
    """Whether logits that are not finite are an error, as in certify, or only if there are no others."""
    reservation: Reservation
    """Its part of the queue, released when it is done or dropped."""
    client: str = ""
    """Clients take turns."""
    future: Future[Any] = field(default_factory=Future, init=False)

    def __post_init__(self) -> None:
        self.restart(self.state.table)

    def restart(self, table: LabelTable) -> None:
        self.state.table, self.flow = table, self.start(table)
        self.wanted: tuple[LabelTable, Indices] = table, NOTHING
        """Labels that the flow waits for, and the table that they go into."""

    def missing(self) -> Indices:
        table, unions = self.wanted
        return table.missing(unions)

    def request(self, unions: Indices) -> LabelRequest:
        return LabelRequest(self.state.with_table(self.wanted[0]), unions)

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        self.reservation.release()
        with suppress(InvalidStateError):  # cancelled in this very moment
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


Batch = list[tuple[ScheduledImage, Indices]]
"""Images, and the labels that are computed of each."""


class Scheduler:
    """A thread that owns the model.

    At each step every flow says which labels it wants next, and as many as the device classifies at
    once are computed: those of every client's oldest image, then of its second, and so on. Second
    rounds of some images come beside first rounds of others. Whatever arrives meanwhile joins the next
    step, so batches grow with the load and nobody waits for one to fill. Certificates take twenty
    times as many labels as predictions, so while there are predictions they get a quarter of that.
    """

    def __init__(
        self,
        engine: LabelEngine,
        *,
        together: int,
        on_batch: Callable[[int, int, float], None] = lambda images, labels, seconds: None,
    ) -> None:
        self.engine, self.together, self.on_batch = engine, together, on_batch
        self._waiting: deque[ScheduledImage] = deque()
        self._running: list[ScheduledImage] = []
        self._steps = 0
        self._served: dict[str, int] = {}
        """The last step in which a client got labels."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs, or would at the first image."""
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def submit(self, images: list[ScheduledImage]) -> list[Future[Any]]:
        """Accept images, all or none; cancel a future to drop its image."""
        with self._changed:
            if self._closing:
                raise RefusedError("not-ready", "the service is shutting down", retry_after=1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="model-worker", daemon=True)
                self._thread.start()
            self._waiting.extend(images)
            self._changed.notify()
        return [image.future for image in images]

    def close(self) -> None:
        """Finish what was accepted, take nothing more, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._next():
            self._step()

    def _next(self) -> bool:
        """Wait for images and let them join; False when there are none and there will be none."""
        with self._changed:
            while not (self._running or self._waiting or self._closing):
                self._changed.wait()
            self._running += self._waiting
            self._waiting.clear()
            return bool(self._running)

    def _step(self) -> None:
        self._running = [image for image in self._running if self._advance(image)]
        if not self._running:
            return
        clients = {image.client for image in self._running}
        self._served = {client: step for client, step in self._served.items() if client in clients}
        self._steps += 1
        state, exact = self._running[0].state, self.engine.exact
        most, least = exact.labels_at_once(state), exact.batch_rows(state)
        predictions = self._select(most, strict=False)
        certificates = self._select(max(least, most // 4) if predictions else most, strict=True)
        for batch, strict in ((predictions, False), (certificates, True)):
            if batch:
                self._compute(batch, strict)

    def _advance(self, image: ScheduledImage) -> bool:
        """Let a flow that has its labels say what it wants next; False if it is over."""
        if image.future.cancelled():
            image.finish()
            return False
        try:
            while not len(image.missing()):
                image.wanted = next(image.flow)
            return True
        except StopIteration as end:
            image.finish(end.value)
        except Exception as error:  # the other images go on
            image.finish(error=error)
        return False

    def _select(self, most: int, *, strict: bool) -> Batch:
        """At most `most` labels of one kind for this step: an equal part for each image, while they fit.

        An image whose single label is more than its part gets one if that still fits, and one such image always does.
        """
        batch: Batch = []
        images, numbers, large = self._in_turn(strict=strict)[: self.together], NUMBERS, False
        for image in images:
            size = image.state.pixels.numel() if self.engine.exact.grid == "source" else 1
            part = NUMBERS // len(images) // size
            if part == 0 and (size <= numbers or not large):
                part, large = 1, True
            labels = image.missing()[: min(most, part)]
            if len(labels):
                batch.append((image, labels))
                self._served[image.client] = self._steps
                most, numbers = most - len(labels), numbers - len(labels) * size
        return batch

    def _in_turn(self, *, strict: bool) -> list[ScheduledImage]:
        """Images of one kind: each client's oldest, then each one's second. Who was served last comes last."""
        positions: Counter[str] = Counter()
        order: list[tuple[int, int, ScheduledImage]] = []
        for image in self._running:
            if image.strict is strict:
                order.append((positions[image.client], self._served.get(image.client, 0), image))
                positions[image.client] += 1
        return [image for *_, image in sorted(order, key=lambda entry: entry[:2])]

    def _compute(self, batch: Batch, strict: bool) -> None:
        began = time.monotonic()
        engine = self.engine.exact if strict else self.engine  # every certificate is a proof
        try:
            engine.compute([image.request(labels) for image, labels in batch], strict=strict)
        except RecomputeError:
            for image in self._running:
                image.restart(image.state.table.anew())
        except Exception as error:
            self._isolate(batch, strict, error)
        else:
            self.on_batch(len(batch), sum(len(labels) for _, labels in batch), time.monotonic() - began)

    def _isolate(self, batch: Batch, strict: bool, error: Exception) -> None:
        """After a batch failed, compute each image alone, so that only the one at fault fails."""
        for image, labels in batch:
            table = image.wanted[0]
            silent = table.spent > 0 and not table.answered  # all its logits so far were NaN
            if len(batch) > 1 and not silent:
                self._compute([(image, labels)], strict)
                continue
            log.warning("an image could not be classified", exc_info=error)
            self._running.remove(image)
            image.finish(error=error)
