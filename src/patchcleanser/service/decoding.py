"""Pictures to pixels in processes of their own: bounded in time and memory, in turn between clients.

Those processes import this module, so nothing here may import torch, which would cost each of them seconds and 300 MB.
They bound what a picture costs; they are no sandbox.
"""

from __future__ import annotations

import io
import logging
import signal
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
from patchcleanser.service.problems import RefusedError
from patchcleanser.service.settings import MIB, Limits

log = logging.getLogger("patchcleanser.service")

T = TypeVar("T")
Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""[3, H, W], as bytes where that loses nothing."""

BASE_BYTES, BYTES_PER_PIXEL = 128 * MIB, 96
"""Memory that a decoder may take besides its code: about twice what the costliest pictures need."""


class Decoders:
    """Processes that decode pictures. One client has a share of them, and large pictures leave some to small ones."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory = BASE_BYTES + BYTES_PER_PIXEL * limits.pixels
        self._limiters: WeakValueDictionary[str, CapacityLimiter] = WeakValueDictionary()

    async def start(self) -> None:
        """Start one of them, so that the first request need not wait for it."""
        try:
            await to_process.run_sync(_set_up, self._memory)
        except BrokenWorkerProcess as error:
            words = "a decoder does not start; it runs the main script again, so call create_app in that script below"
            raise InputError(f"{words} `if __name__ == '__main__':`") from error

    @asynccontextmanager
    async def turn(self, client: str, *, pixels: int = 0) -> AsyncIterator[None]:
        """Wait for a decoder: first come, first served, within this client's share and that of large pictures."""
        limits = self._limits
        bounds = {f"client {client}": limits.client_decoders}  # first, so that nobody fills the other queues
        if pixels > limits.small_pixels:
            bounds["large"] = limits.large_decoders
        bounds["all"] = limits.decoders
        async with AsyncExitStack() as stack:
            for name, number in bounds.items():
                await stack.enter_async_context(self._limiters.setdefault(name, CapacityLimiter(number)))
            yield

    async def size(self, content: bytes, number: int) -> tuple[int, int] | None:
        """Height and width of a picture; None if it is none. Call it in `turn`, as `decode`."""
        return await self._run(number, picture_size, content)

    async def decode(self, content: bytes, number: int) -> Pixels:
        """The pixels of a picture; DataError if it is damaged."""
        return await self._run(number, decode, content)

    async def _run(self, number: int, work: Callable[..., T], content: bytes) -> T:
        """One picture in another process, which is killed if that takes too long or nobody waits any more."""
        seconds = self._limits.decode_seconds
        try:
            with fail_after(seconds):
                args = (content, self._limits.formats, self._memory)
                return await to_process.run_sync(work, *args, cancellable=True, limiter=CapacityLimiter(1))
        except TimeoutError:
            words = f"image {number} takes longer to decode than {seconds:g} s, the limit; save it smaller or plainer"
            raise RefusedError("bad-image", words, image=number) from None
        except BrokenWorkerProcess:
            log.warning("a decoder died", exc_info=True)
            words = f"image {number} ended its decoder; save it again"
            raise RefusedError("bad-image", words, image=number) from None


def picture_size(content: bytes, formats: tuple[str, ...], memory: int) -> tuple[int, int] | None:
    """Height and width as the first bytes say; None if it is no picture of these formats."""
    _set_up(memory)
    try:
        with _opened(content, formats) as picture:
            return picture.height, picture.width
    except Image.DecompressionBombError:
        raise DataError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except Exception:  # Pillow's readers raise whatever the damage leads them to
        return None


def decode(content: bytes, formats: tuple[str, ...], memory: int) -> Pixels:
    """A picture as core/pixels.py sees it; the first frame of several."""
    _set_up(memory)
    try:
        with _opened(content, formats) as picture:
            return _packed(pixels_of(picture))
    except Exception as error:  # Pillow's readers, and MemoryError
        raise DataError(str(error) or type(error).__name__) from None


def unpacked(pixels: Pixels) -> NDArray[np.float32]:
    """Pixels in [0, 1], to the last bit what `pixels_of` gave."""
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels.astype(np.float32)


def _packed(pixels: NDArray[np.float32]) -> Pixels:
    """As bytes where that loses nothing: there is a quarter to send."""
    packed = np.empty(pixels.shape, dtype=np.uint8)
    for values, plane in zip(packed, pixels, strict=True):  # one by one, since that takes less memory
        values[:] = np.rint(plane * np.float32(255))
        if not np.array_equal(unpacked(values), plane):
            return pixels
    return packed


def _opened(content: bytes, formats: tuple[str, ...]) -> Image.Image:
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
