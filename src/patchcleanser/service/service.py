"""From a request to its results: parse, reserve capacity, decode, schedule, wait; and how each may fail."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from starlette.requests import Request

from patchcleanser.core.label_table import LabelTable
from patchcleanser.engine.masking import ImageState
from patchcleanser.errors import ClassifierError, DataError, ImageError, InputError, MaskError, ThreatError
from patchcleanser.service.access import Capacity, Reservation
from patchcleanser.service.batching import ScheduledImage, Scheduler
from patchcleanser.service.config import ServiceSettings
from patchcleanser.service.decoding import Decoders
from patchcleanser.service.middleware import Metrics
from patchcleanser.service.model import DefendedModel
from patchcleanser.service.parsing import OptionsT, parse_request
from patchcleanser.service.problems import ClientGoneError, RefusedError
from patchcleanser.service.schemas import CertifyOptions, Options

log = logging.getLogger("patchcleanser.service")

T = TypeVar("T")
Result = tuple[Any, ImageState]
"""A verdict or a certificate, and the image with the labels it rests on."""


class Service:
    """The defended model, its scheduler, and the capacity there is for requests."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings, self.model = settings, DefendedModel(settings)
        limits = settings.limits
        self.capacity = Capacity(
            images=limits.queue,
            pixels=limits.queue_pixels,
            large_pixels=limits.large_pixels,
            shares={"images": limits.client_images, "pixels": limits.client_pixels},
        )
        self.metrics = Metrics(lambda: self.capacity.used("images"))
        self.scheduler = Scheduler(self.model.defense.engine, together=limits.together, on_batch=self._on_batch)
        self.decoders = Decoders(limits)
        self._threads = ThreadPoolExecutor(limits.decoders, thread_name_prefix="masks")
        self._image_seconds = 0.05
        """Seconds the model lately took for an image in a batch; Retry-After is estimated from it."""
        self.closing = False

    async def stop(self) -> None:
        """Finish what was accepted, and end; decoders end with the event loop."""
        self.closing = True
        await asyncio.to_thread(self.scheduler.close)
        self._threads.shutdown(cancel_futures=True)

    def check_ready(self) -> None:
        """Refuse requests while the service shuts down, or after its thread died."""
        if self.closing or not self.scheduler.alive:
            raise RefusedError("not-ready", "the service is shutting down", retry_after=1)

    async def masks(self, client: str, height: int, width: int, masks: int | None) -> LabelTable:
        """An empty table with the masks for images of a size; building them takes a decoder's turn."""
        pixels, most = height * width, self.settings.limits.pixels
        if pixels > most:
            raise RefusedError("too-large", f"the image would have {pixels:,} pixels; at most {most:,} are taken")
        self._check_options(masks)
        try:
            with anyio.fail_after(self.settings.limits.deadline):
                async with self.decoders.turn(client, pixels=pixels):
                    return await self._in_thread(lambda: self.model.empty_table((height, width), masks))
        except (MaskError, ThreatError) as error:
            raise RefusedError("bad-fit", str(error)) from None
        except TimeoutError:
            raise _late("deadline") from None

    async def answer(self, request: Request, kind: type[OptionsT]) -> tuple[list[Result], OptionsT]:
        """The results for a request's images, in order, within its deadline and while its client is connected."""
        self.check_ready()
        limits = self.settings.limits
        service_due = time.monotonic() + limits.deadline
        try:
            with anyio.fail_after(limits.deadline):
                images, options = await parse_request(request, kind, limits)
        except TimeoutError:
            message = f"the request did not arrive whole within {limits.deadline:g} s; send fewer or smaller images"
            raise RefusedError("body-too-slow", message) from None
        milliseconds = options.deadline_ms
        request_due = math.inf if milliseconds is None else time.monotonic() + milliseconds / 1000
        self._check_options(options.masks, options.labels if isinstance(options, CertifyOptions) else ())
        request.state.facts = {"images": len(images), "bytes": sum(map(len, images))}
        work = self._compute(request.state.client, images, options)
        try:
            return await _while_connected(request, work, min(service_due, request_due)), options
        except TimeoutError:
            raise _late("too-late" if request_due < service_due else "deadline") from None

    async def _compute(self, client: str, images: list[bytes], options: Options) -> list[Result]:
        states, sizes = list[ImageState](), list[int]()
        for number, content in enumerate(images):
            async with self.decoders.turn(client):
                sizes.append(await self.decoders.count_pixels(content, number))
        reservations = self._reserve(client, sizes)
        try:
            for number, (content, size) in enumerate(zip(images, sizes, strict=True)):
                states.append(await self._decode(client, content, size, number, options.masks))
            flows, strict = self.model.flows(options, len(states)), isinstance(options, CertifyOptions)
            parts = zip(states, flows, reservations, strict=True)
            futures = self.scheduler.submit([ScheduledImage(s, flow, strict, r, client) for s, flow, r in parts])
            reservations = []  # released by the scheduler from now on
        finally:
            for reservation in reservations:
                reservation.release()
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return list(zip(results, states, strict=True))
        except ClassifierError:
            raise RefusedError("classifier-failed", "the classifier gave no usable answer") from None
        except InputError as error:
            raise RefusedError("bad-fit", str(error)) from None
        finally:
            for future in futures:  # if one failed, or nobody waits any more, the rest is not needed
                future.cancel()

    def _reserve(self, client: str, sizes: list[int]) -> list[Reservation]:
        """Capacity for all images, given their numbers of pixels, or for none."""
        pixels, limits = sum(sizes), self.settings.limits
        if pixels > limits.client_pixels:
            most = f"at most {limits.client_pixels:,} are taken; send fewer"
            raise RefusedError("too-large", f"the images have {pixels:,} pixels in all; {most}")
        is_large = pixels > limits.small_pixels
        parts = ({"images": 1, "pixels": size, "large_pixels": size * is_large} for size in sizes)
        seconds = max(1, math.ceil(self.capacity.used("images") * self._image_seconds))  # for all that is queued
        return self.capacity.reserve(client, *parts, retry_after=seconds)

    async def _decode(self, client: str, content: bytes, pixels: int, number: int, masks: int | None) -> ImageState:
        try:
            async with self.decoders.turn(client, pixels=pixels):
                picture = await self.decoders.decode(content, number)
                return await self._in_thread(lambda: self.model.image_state(picture, masks))
        except (DataError, ImageError) as error:
            log.info("an image was refused", extra={"facts": {"reason": str(error)[:200]}})
            raise RefusedError("bad-image", f"image {number} is damaged or cannot be used", image=number) from None
        except (MaskError, ThreatError) as error:
            raise RefusedError("bad-fit", f"image {number}: {error}", image=number) from None

    def _check_options(self, masks: int | None, labels: Sequence[int] = ()) -> None:
        most, classes = self.settings.limits.masks, self.model.classifier.classes or 0
        if masks is not None and masks > most:
            raise RefusedError("invalid", f"masks: at most {most} per axis are taken, got {masks}")
        if masks is not None and not self.model.may_choose_masks:
            raise RefusedError("invalid", "masks: against several patches at once the number is fixed; leave it out")
        for number, label in enumerate(labels):
            if not 0 <= label < classes:
                message = f"the label of image {number} is out of range; classes are 0 to {classes - 1}"
                raise RefusedError("invalid", message, image=number)

    def _on_batch(self, images: int, labels: int, seconds: float) -> None:
        self._image_seconds += 0.1 * (seconds / images - self._image_seconds)
        self.metrics.batch_images.observe(images)
        self.metrics.batch_labels.observe(labels)
        self.metrics.model_seconds.inc(seconds)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T], due: float) -> T:
    """The result, unless the deadline passes (TimeoutError) or the client leaves; then the work is dropped."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        seconds = max(0.0, due - time.monotonic())
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise TimeoutError
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, RefusedError):
                await future


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _late(code: str) -> RefusedError:
    return RefusedError(
        code, "there was no answer before the deadline, so the work was dropped; send fewer images, or try later"
    )
