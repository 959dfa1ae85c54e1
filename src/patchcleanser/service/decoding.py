"""Decode images in processes of their own, bounded in time and memory, with clients taking turns.

Those processes import this module, so nothing here may import torch, which would cost each of them seconds and 300 MB.
They bound what an image costs; they are no sandbox.
"""

from __future__ import annotations

import io
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
from anyio import BrokenWorkerProcess, CapacityLimiter, fail_after, to_process
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.pixels import pixels_of
from patchcleanser.errors import DataError, InputError
from patchcleanser.service.config import MIB, Limits
from patchcleanser.service.problems import RefusedError

log = logging.getLogger("patchcleanser.service")

T = TypeVar("T")
Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""[3, H, W], as bytes where that loses nothing."""

BASE_BYTES, BYTES_PER_PIXEL = 128 * MIB, 96
"""Memory that a decoder may take besides its code: about twice what the costliest images need."""


class Decoders:
    """Processes that decode images. One client has a share of them, and large images leave some to small ones.

    Call `count_pixels` and `decode` within `turn`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory = BASE_BYTES + BYTES_PER_PIXEL * limits.pixels
        self._limiters: WeakValueDictionary[str, CapacityLimiter] = WeakValueDictionary()

    async def start(self) -> None:
        """Start one of them, so that the first request need not wait for it."""
        try:
            await to_process.run_sync(_set_up, self._memory)
        except BrokenWorkerProcess as error:
            message = "a decoder does not start; it runs the main script again, so call create_app in that script below"
            raise InputError(f"{message} `if __name__ == '__main__':`") from error

    @asynccontextmanager
    async def turn(self, client: str, *, pixels: int = 0) -> AsyncIterator[None]:
        """Wait for a decoder: first come, first served, within this client's share and that of large images."""
        limits = self._limits
        bounds = {f"client {client}": limits.client_decoders}  # first, so that nobody fills the other queues
        if pixels > limits.small_pixels:
            bounds["large"] = limits.large_decoders
        bounds["all"] = limits.decoders
        async with AsyncExitStack() as stack:
            for name, number in bounds.items():
                await stack.enter_async_context(self._limiters.setdefault(name, CapacityLimiter(number)))
            yield

    async def count_pixels(self, content: bytes, number: int) -> int:
        """Pixels of an image by the size in its header; RefusedError if they are too many, or it is no image."""
        limits = self._limits
        pixels = await self._run(number, header_pixels, content)
        if pixels is None:
            message = f"image {number} is empty, damaged, or none of {', '.join(limits.formats)}"
            raise RefusedError("unsupported-media", message, image=number)
        if pixels > limits.pixels:
            message = f"image {number} has too many pixels; at most {limits.pixels:,} are taken"
            raise RefusedError("too-large", message, image=number)
        return pixels

    async def decode(self, content: bytes, number: int) -> Pixels:
        """The pixels of an image; DataError if it is damaged."""
        return await self._run(number, decode, content)

    async def _run(self, number: int, function: Callable[..., T], content: bytes) -> T:
        """Run a function in another process, which is killed if that takes too long or nobody waits any more."""
        seconds = self._limits.decode_seconds
        try:
            with fail_after(seconds):
                args = (content, self._limits.formats, self._memory)
                return await to_process.run_sync(function, *args, cancellable=True, limiter=CapacityLimiter(1))
        except TimeoutError:
            message = f"image {number} takes longer to decode than {seconds:g} s, the limit; save it smaller or plainer"
        except BrokenWorkerProcess:
            log.warning("a decoder died", exc_info=True)
            message = f"image {number} ended its decoder; save it again"
        raise RefusedError("bad-image", message, image=number)


def header_pixels(content: bytes, formats: tuple[str, ...], memory: int) -> int | None:
    """Pixels by the size in an image's header; None if it is no image of these formats."""
    _set_up(memory)
    try:
        with _open(content, formats) as picture:
            return picture.height * picture.width
    except Image.DecompressionBombError:
        return sys.maxsize
    except Exception:  # Pillow's readers raise whatever the damage leads them to
        return None


def decode(content: bytes, formats: tuple[str, ...], memory: int) -> Pixels:
    """The pixels of an image by the rules of core/pixels.py; the first frame of several."""
    _set_up(memory)
    try:
        with _open(content, formats) as picture:
            return _pack(pixels_of(picture))
    except Exception as error:  # Pillow's readers, and MemoryError
        raise DataError(str(error) or type(error).__name__) from None


def unpack(pixels: Pixels) -> NDArray[np.float32]:
    """Pixels in [0, 1], to the last bit what `pixels_of` gave."""
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels.astype(np.float32)


def _pack(pixels: NDArray[np.float32]) -> Pixels:
    """As bytes where that loses nothing: a quarter to send between processes."""
    packed = np.empty(pixels.shape, dtype=np.uint8)
    for values, plane in zip(packed, pixels, strict=True):  # one by one, since that takes less memory
        values[:] = np.rint(plane * np.float32(255))
        if not np.array_equal(unpack(values), plane):
            return pixels
    return packed


def _open(content: bytes, formats: tuple[str, ...]) -> Image.Image:
    Image.init()
    return Image.open(io.BytesIO(content), formats=[name for name in formats if name in Image.OPEN])


@cache
def _set_up(memory: int) -> None:
    """Bound this process's memory, and leave its end to the service: Ctrl-C reaches every process of a terminal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    used = Path("/proc/self/statm")
    if used.exists():  # Linux; other systems do not hold a process to this limit, or have none
        import resource

        limit = int(used.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
