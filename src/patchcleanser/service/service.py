"""From a request to its answers: read, admit, decode, queue, wait; and what happens when any of it fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from starlette.requests import Request

from patchcleanser.classifiers.batches import Subject
from patchcleanser.core.masks import MaskSet
from patchcleanser.errors import ClassifierError, DataError, ImageError, InputError, MaskError, ThreatError
from patchcleanser.service.batching import ClosedError, Work, Worker
from patchcleanser.service.engine import Engine, Start
from patchcleanser.service.metrics import Metrics
from patchcleanser.service.problems import ClientGoneError, RefusedError
from patchcleanser.service.reading import Asked, Wanted, checked_sizes, read
from patchcleanser.service.room import NoRoomError, Place, Room
from patchcleanser.service.schemas import CertifyOptions, PredictOptions
from patchcleanser.service.settings import Settings

log = logging.getLogger("patchcleanser.service")

T = TypeVar("T")
Played = tuple[Any, Subject]
"""A verdict or a certificate, and the image with the labels it rests on."""

DECODERS = 2
"""Threads that decode pictures and build masks."""


class Service:
    """The engine, the worker that plays on it, and the room there is for requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.engine = settings, Engine(settings)
        limits = settings.limits
        self.room = Room(images=limits.queue, pixels=limits.queue_pixels)
        self.metrics = Metrics(lambda: self.room.used("images"))
        self.worker = Worker(self.engine.defense.masked, together=limits.together, on_batch=self._on_batch)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decoder")
        self._pace = 0.05
        """Seconds the model lately took for an image's round; what Retry-After is made of."""
        self.closing = False

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.closing and self.worker.alive

    async def stop(self) -> None:
        """Finish what was accepted, and end."""
        self.closing = True
        await asyncio.to_thread(self.worker.close)
        self._decoders.shutdown(cancel_futures=True)

    async def predict(self, request: Request) -> tuple[list[Played], PredictOptions]:
        """Play `predict` on the images of a request."""

        def starts(asked: Asked[PredictOptions]) -> list[Start]:
            options = asked.options
            return [self.engine.prediction(options.masks, undefended=options.details)] * len(asked.images)

        return await self._handle(request, PredictOptions, starts, strict=False)

    async def certify(self, request: Request) -> tuple[list[Played], CertifyOptions]:
        """Play `certify` on the images of a request."""

        def starts(asked: Asked[CertifyOptions]) -> list[Start]:
            options, classes = asked.options, self.engine.classifier.classes or 0
            for number, label in enumerate(options.labels):
                if not 0 <= label < classes:
                    words = f"the label of image {number} is out of range; classes are 0 to {classes - 1}"
                    raise RefusedError("invalid", words, image=number)
            return [self.engine.certificate(options.masks, label, maps=options.maps) for label in options.labels]

        return await self._handle(request, CertifyOptions, starts, strict=True)

    async def masks(self, height: int, width: int, masks: int | None) -> MaskSet:
        """The masks for images of a size."""
        if height * width > self.settings.limits.pixels:
            raise RefusedError("too-large", f"at most {self.settings.limits.pixels:,} pixels are taken")
        self._check_masks(masks)
        try:
            with anyio.fail_after(self.settings.limits.deadline):
                return await self._in_thread(lambda: self.engine.mask_set((height, width), masks))
        except (MaskError, ThreatError) as error:
            raise RefusedError("bad-fit", str(error)) from None
        except TimeoutError:
            raise _late() from None

    async def _handle(
        self, request: Request, kind: type[Wanted], starts: Callable[[Asked[Wanted]], list[Start]], *, strict: bool
    ) -> tuple[list[Played], Wanted]:
        """Everything between a request and its results, within its deadline and while its client is there."""
        if not self.ready:
            raise RefusedError("not-ready", "the service is shutting down", retry_after=1)
        due = time.monotonic() + self.settings.limits.deadline
        asked = await self._read(request, kind)
        own = asked.options.deadline_ms
        wanted = math.inf if own is None else time.monotonic() + own / 1000
        self._check_masks(asked.options.masks)
        work = self._play(asked, starts(asked), strict)
        request.state.facts = {"images": len(asked.images), "bytes": sum(map(len, asked.images))}
        try:
            return await _while_there(request, work, min(due, wanted)), asked.options
        except TimeoutError:
            raise _late("too-late" if wanted < due else "deadline") from None

    async def _read(self, request: Request, kind: type[Wanted]) -> Asked[Wanted]:
        try:
            with anyio.fail_after(self.settings.limits.deadline):
                return await read(request, kind, self.settings.limits)
        except TimeoutError:
            raise RefusedError("body-too-slow", "the request did not arrive whole in time") from None

    async def _play(self, asked: Asked[Any], plan: list[Start], strict: bool) -> list[Played]:
        images, masks = asked.images, asked.options.masks
        places = self._places(await self._in_thread(lambda: checked_sizes(images, self.settings.limits)))
        try:
            subjects = [await self._subject(number, content, masks) for number, content in enumerate(images)]
            works = [Work(s, start, strict, place) for s, start, place in zip(subjects, plan, places, strict=True)]
            futures = self.worker.submit(works)
            places = []  # they are the worker's now
        except ClosedError:
            raise RefusedError("not-ready", "the service is shutting down", retry_after=1) from None
        finally:
            for place in places:
                place.leave()
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return list(zip(results, subjects, strict=True))
        except ClassifierError:
            raise RefusedError("classifier-failed", "the classifier gave no usable answer") from None
        except InputError as error:
            raise RefusedError("bad-fit", str(error)) from None
        finally:
            for future in futures:  # if one failed, or nobody waits any more, the others are not needed
                future.cancel()

    def _places(self, sizes: list[int]) -> list[Place]:
        """Room for all images, or none."""
        places: list[Place] = []
        try:
            for pixels in sizes:
                places.append(self.room.take(images=1, pixels=pixels))
        except NoRoomError:
            for place in places:
                place.leave()
            if sum(sizes) > self.settings.limits.queue_pixels:
                words = f"the images have too many pixels together; at most {self.settings.limits.queue_pixels:,}"
                raise RefusedError("too-large", words) from None
            raise self._overloaded() from None
        return places

    async def _subject(self, number: int, content: bytes, masks: int | None) -> Subject:
        try:
            return await self._in_thread(lambda: self.engine.subject(content, masks))
        except (DataError, ImageError) as error:
            log.info("an image was refused", extra={"facts": {"reason": str(error)[:200]}})
            raise RefusedError("bad-image", f"image {number} is damaged or cannot be used", image=number) from None
        except (MaskError, ThreatError) as error:
            raise RefusedError("bad-fit", f"image {number}: {error}", image=number) from None

    def _check_masks(self, masks: int | None) -> None:
        if masks is None:
            return
        most = self.settings.limits.masks
        if masks > most:
            raise RefusedError("invalid", f"masks: at most {most} per axis are taken")
        if not self.engine.may_choose_masks:
            raise RefusedError("invalid", "masks: against several patches at once the number is fixed")

    def _overloaded(self) -> RefusedError:
        waiting = self.room.used("images")
        seconds = max(1, math.ceil(waiting * self._pace))
        return RefusedError("overloaded", "too much is waiting already; try again later", retry_after=seconds)

    def _on_batch(self, images: int, labels: int, seconds: float) -> None:
        self._pace += 0.1 * (seconds / images - self._pace)
        self.metrics.batch(images, labels, seconds)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)


async def _while_there(request: Request, work: Coroutine[Any, Any, T], due: float) -> T:
    """The result, unless the deadline passes (TimeoutError) or the client leaves; then the work is dropped."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        left = max(0.0, due - time.monotonic())
        await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise TimeoutError
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, RefusedError):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _late(code: str = "deadline") -> RefusedError:
    return RefusedError(code, "there was no answer before the deadline; the work was dropped")
