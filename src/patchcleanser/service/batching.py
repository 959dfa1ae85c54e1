"""One model worker: the games of many requests, played together, joining and leaving at any move."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import numpy as np

from patchcleanser.core.algorithms import LabelFlow
from patchcleanser.core.label_table import Indices, LabelTable
from patchcleanser.engine import LabelEngine, RecomputeError
from patchcleanser.engine.masking import ImageState, LabelRequest
from patchcleanser.service.room import Place

log = logging.getLogger("patchcleanser.service")


NOTHING: Indices = np.array([], dtype=np.intp)
NUMBERS = 64_000_000
"""Numbers in the masked copies of one move. A label of a large photo takes a second of resizing, and whoever left, or
waits beside it, is only looked at between moves."""


class ClosedError(Exception):
    """The worker takes no more work."""


@dataclass(frozen=True)
class Work:
    """One image to play a game on."""

    subject: ImageState
    start: Callable[[LabelTable], LabelFlow[Any]]
    strict: bool
    """Whether logits that are not finite are an error, as in certify, or only if there are no others."""
    place: Place
    """Its room in the queue, left when the work is done or dropped."""
    client: str = ""
    """Whose it is; clients take turns."""


class _Ticket:
    """Work that was accepted, its game, and the answer to come."""

    def __init__(self, work: Work) -> None:
        self.work, self.future = work, Future[Any]()
        self.game = work.start(work.subject.table)
        self.wants = NOTHING
        """Labels that its game waits for."""

    def missing(self) -> Indices:
        """Those of them that are not known yet."""
        return self.work.subject.table.missing(self.wants)

    def restart(self) -> None:
        subject = self.work.subject
        subject.table = LabelTable(subject.table.mask_set)
        self.game, self.wants = self.work.start(subject.table), NOTHING

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        self.work.place.leave()
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        except InvalidStateError:
            pass  # cancelled in this very moment


Batch = list[tuple[_Ticket, Indices]]
"""Games, and the labels that each gets of what it wants."""


class Worker:
    """A thread that owns the model.

    At each move every game says which labels it wants next, and as many as the device classifies at
    once are computed: those of every client's oldest image, then of its second, and so on. Second
    rounds of some images come beside first rounds of others. Whatever arrives meanwhile joins the next
    move, so batches grow with the load and nobody waits for one to fill. Certificates take twenty
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
        self._waiting: deque[_Ticket] = deque()
        self._playing: list[_Ticket] = []
        self._moves = 0
        self._served: dict[str, int] = {}
        """The last move in which a client got labels."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs, or would at the first work."""
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def submit(self, works: list[Work]) -> list[Future[Any]]:
        """Accept work, all or none; cancel a future to drop it."""
        tickets = [_Ticket(work) for work in works]
        with self._changed:
            if self._closing:
                raise ClosedError
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="model-worker", daemon=True)
                self._thread.start()
            self._waiting.extend(tickets)
            self._changed.notify()
        return [ticket.future for ticket in tickets]

    def close(self) -> None:
        """Finish what was accepted, take nothing more, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._next():
            self._move()

    def _next(self) -> bool:
        """Wait for work and let it join; False when there is none and there will be none."""
        with self._changed:
            while not (self._playing or self._waiting or self._closing):
                self._changed.wait()
            self._playing += self._waiting
            self._waiting.clear()
            return bool(self._playing)

    def _move(self) -> None:
        self._playing = [ticket for ticket in self._playing if self._goes_on(ticket)]
        if not self._playing:
            return
        clients = {ticket.work.client for ticket in self._playing}
        self._served = {client: move for client, move in self._served.items() if client in clients}
        self._moves += 1
        subject = self._playing[0].work.subject
        room, least = self.engine.exact.labels_at_once(subject), self.engine.exact.batch_rows(subject)
        predictions = self._share(room, strict=False)
        certificates = self._share(max(least, room // 4) if predictions else room, strict=True)
        for batch, strict in ((predictions, False), (certificates, True)):
            if batch:
                self._fill_in(batch, strict)

    def _goes_on(self, ticket: _Ticket) -> bool:
        """Let a game that has its labels say what it wants next; False if it is over."""
        if ticket.future.cancelled():
            ticket.end()
            return False
        try:
            while not len(ticket.missing()):
                ticket.wants = next(ticket.game)
        except StopIteration as end:
            ticket.end(end.value)
            return False
        except Exception as error:  # one image's trouble is not the others'
            ticket.end(error=error)
            return False
        return True

    def _share(self, room: int, *, strict: bool) -> Batch:
        """Labels of one kind for this move: an equal part for each image, until there is no more room.

        An image whose single label is more than its part gets one if that still fits, and one such image always does.
        """
        chosen: Batch = []
        tickets, numbers, large = self._in_turn(strict=strict)[: self.together], NUMBERS, False
        for ticket in tickets:
            copy = ticket.work.subject.pixels.numel() if self.engine.exact.grid == "source" else 1
            most = NUMBERS // len(tickets) // copy
            if most == 0 and (copy <= numbers or not large):
                most, large = 1, True
            labels = ticket.missing()[: min(room, most)]
            if len(labels):
                chosen.append((ticket, labels))
                self._served[ticket.work.client] = self._moves
                room, numbers = room - len(labels), numbers - len(labels) * copy
        return chosen

    def _in_turn(self, *, strict: bool) -> list[_Ticket]:
        """Images of one kind: each client's oldest, then each one's second. Who was served last comes last."""
        places: Counter[str] = Counter()
        order: list[tuple[int, int, _Ticket]] = []
        for ticket in self._playing:
            if ticket.work.strict is strict:
                client = ticket.work.client
                order.append((places[client], self._served.get(client, 0), ticket))
                places[client] += 1
        return [ticket for *_, ticket in sorted(order, key=lambda entry: entry[:2])]

    def _fill_in(self, batch: Batch, strict: bool) -> None:
        began = time.monotonic()
        engine = self.engine.exact if strict else self.engine  # every certificate is a proof
        try:
            engine.compute([LabelRequest(ticket.work.subject, some) for ticket, some in batch], strict=strict)
        except RecomputeError:
            for ticket in self._playing:
                ticket.restart()
        except Exception as error:
            self._isolate(batch, strict, error)
        else:
            self.on_batch(len(batch), sum(len(some) for _, some in batch), time.monotonic() - began)

    def _isolate(self, batch: Batch, strict: bool, error: Exception) -> None:
        """A batch failed: each image alone, so that only the one at fault fails."""
        for ticket, some in batch:
            table = ticket.work.subject.table
            silent = table.spent > 0 and not table.answered  # labels of logits that were no numbers
            if len(batch) > 1 and not silent:
                self._fill_in([(ticket, some)], strict)
                continue
            log.warning("an image could not be classified", exc_info=error)
            self._playing.remove(ticket)
            ticket.end(error=error)
