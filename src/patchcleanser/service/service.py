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

from patchcleanser.core.masks import MaskSet
from patchcleanser.engine.masking import ImageState
from patchcleanser.errors import ClassifierError, DataError, ImageError, InputError, MaskError, ThreatError
from patchcleanser.service.batching import ClosedError, Work, Worker
from patchcleanser.service.decoding import Decoders
from patchcleanser.service.engine import Engine, Start
from patchcleanser.service.metrics import Metrics
from patchcleanser.service.problems import ClientGoneError, RefusedError
from patchcleanser.service.reading import Asked, Wanted, checked_pixels, read, too_many_pixels
from patchcleanser.service.room import NoRoomError, OverShareError, Place, Room
from patchcleanser.service.schemas import CertifyOptions, PredictOptions
from patchcleanser.service.settings import ServiceSettings

log = logging.getLogger("patchcleanser.service")

T = TypeVar("T")
Played = tuple[Any, ImageState]
"""A verdict or a certificate, and the image with the labels it rests on."""


class Service:
    """The engine, the worker that plays on it, and the room there is for requests."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings, self.engine = settings, Engine(settings)
        limits = settings.limits
        self.room = Room(
            images=limits.queue,
            pixels=limits.queue_pixels,
            large_pixels=limits.large_pixels,
            shares={"images": limits.client_images, "pixels": limits.client_pixels},
        )
        self.metrics = Metrics(lambda: self.room.used("images"))
        self.worker = Worker(self.engine.defense.engine, together=limits.together, on_batch=self._on_batch)
        self.decoders = Decoders(limits)
        self._threads = ThreadPoolExecutor(limits.decoders, thread_name_prefix="masks")
        self._pace = 0.05
        """Seconds the model lately took for an image's round; what Retry-After is made of."""
        self.closing = False

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.closing and self.worker.alive

    async def start(self) -> None:
        """Start what the first request would have to wait for."""
        await self.decoders.start()

    async def stop(self) -> None:
        """Finish what was accepted, and end; decoders end with the event loop."""
        self.closing = True
        await asyncio.to_thread(self.worker.close)
        self._threads.shutdown(cancel_futures=True)

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

    async def masks(self, client: str, height: int, width: int, masks: int | None) -> MaskSet:
        """The masks for images of a size; finding them counts as decoding does."""
        if height * width > self.settings.limits.pixels:
            raise RefusedError("too-large", f"at most {self.settings.limits.pixels:,} pixels are taken")
        self._check_masks(masks)
        try:
            with anyio.fail_after(self.settings.limits.deadline):
                async with self.decoders.turn(client, pixels=height * width):
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
        work = self._play(request.state.client, asked, starts(asked), strict)
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

    async def _play(self, client: str, asked: Asked[Any], plan: list[Start], strict: bool) -> list[Played]:
        images, masks = asked.images, asked.options.masks
        sizes = [await self._pixels(client, number, content) for number, content in enumerate(images)]
        places = self._places(client, sizes)
        try:
            pictures = enumerate(zip(images, sizes, strict=True))
            subjects = [await self._subject(client, *picture, number, masks) for number, picture in pictures]
            works = [
                Work(s, start, strict, place, client) for s, start, place in zip(subjects, plan, places, strict=True)
            ]
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

    async def _pixels(self, client: str, number: int, content: bytes) -> int:
        limits = self.settings.limits
        try:
            async with self.decoders.turn(client):
                return checked_pixels(await self.decoders.size(content, number), number, limits)
        except DataError:
            raise too_many_pixels(number, limits) from None

    def _places(self, client: str, sizes: list[int]) -> list[Place]:
        """Room for all images, or none."""
        pixels, limits = sum(sizes), self.settings.limits
        if pixels > limits.client_pixels:
            words = f"the images have {pixels:,} pixels in all; at most {limits.client_pixels:,} are taken; send fewer"
            raise RefusedError("too-large", words)
        is_large = pixels > limits.small_pixels
        try:
            self.room.require(client, images=len(sizes), pixels=pixels, large_pixels=pixels * is_large)
            return [self.room.take(client, images=1, pixels=one, large_pixels=one * is_large) for one in sizes]
        except NoRoomError:
            words = "too much is waiting already; try again later"
            raise RefusedError("overloaded", words, retry_after=self._wait()) from None
        except OverShareError as error:
            raise RefusedError("too-many-requests", str(error), retry_after=self._wait()) from None

    async def _subject(self, client: str, content: bytes, pixels: int, number: int, masks: int | None) -> ImageState:
        try:
            async with self.decoders.turn(client, pixels=pixels):
                picture = await self.decoders.decode(content, number)
                return await self._in_thread(lambda: self.engine.subject(picture, masks))
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

    def _wait(self) -> int:
        """Seconds in which what is waiting now may be done."""
        return max(1, math.ceil(self.room.used("images") * self._pace))

    def _on_batch(self, images: int, labels: int, seconds: float) -> None:
        self._pace += 0.1 * (seconds / images - self._pace)
        self.metrics.batch(images, labels, seconds)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


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
