"""Pictures that are damaged, lie about themselves, or would be huge: only 4xx, and the worker lives."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from patchcleanser.service.app import create_app
from patchcleanser.service.config import Limits

ALLOWED = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
MODES = {"PNG": ("RGB", "RGBA", "L", "P", "I;16", "1"), "GIF": ("P", "L"), "BMP": ("RGB", "L"), "WEBP": ("RGB", "RGBA")}


def whole(draw: random.Random) -> bytes:
    kind = draw.choice(ALLOWED)
    mode = draw.choice(MODES.get(kind, ("RGB", "L", "CMYK")))
    pixels = np.frombuffer(draw.randbytes(12 * 12 * 3), np.uint8).reshape(12, 12, 3)
    picture = Image.fromarray(pixels)
    picture = picture.convert("L").convert("I;16") if mode == "I;16" else picture.convert(mode)
    file = io.BytesIO()
    picture.save(file, format=kind)
    return file.getvalue()


def truncated(draw: random.Random) -> bytes:
    content = whole(draw)
    return content[: draw.randrange(len(content))]


def flipped(draw: random.Random) -> bytes:
    content = bytearray(whole(draw))
    for _ in range(draw.randrange(1, 20)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def spliced(draw: random.Random) -> bytes:
    """The head of one picture and the tail of another."""
    first, second = whole(draw), whole(draw)
    return first[: draw.randrange(1, len(first))] + second[draw.randrange(len(second)) :]


def noise(draw: random.Random) -> bytes:
    start = draw.choice([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\x20\0\0\0WEBPVP8 "])
    return start + draw.randbytes(draw.randrange(200))


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_of(width: int, height: int, *more: bytes, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def bomb(draw: random.Random) -> bytes:
    """Small files that claim, or unpack to, far more than they should."""
    zeros = bytes(5_000_000)
    return draw.choice(
        [
            lambda: png_of(60_000, 60_000),
            lambda: png_of(2**31 - 1, 2**31 - 1),
            lambda: png_of(1, 2**31 - 1),
            lambda: png_of(4096, 4096, data=zeros),
            lambda: png_of(8, 8, chunk(b"iCCP", b"x\0\0" + zlib.compress(zeros)), data=bytes(200)),
            lambda: png_of(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(zeros)), data=bytes(200)),
            lambda: png_of(0, 0),
            lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(8) + b"\x08\0;",
            lambda: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 65500, 65500, 1, 24, 0, 0, 0, 0, 0, 0),
            lambda: b"RIFF\x1a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff",
        ]
    )()


def mislabelled(draw: random.Random) -> bytes:
    """What is no picture, or one of a kind that is not opened."""
    pixels = Image.new("RGB", (9, 9))
    file = io.BytesIO()
    kind = draw.choice(["TIFF", "PPM", "ICO", "TGA", "PDF", "EPS", "svg", "zip", "html", "empty"])
    if kind == "svg":
        return b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    if kind == "zip":
        return b"PK\x03\x04" + draw.randbytes(60)
    if kind == "html":
        return b"<!doctype html><img src=file:///etc/passwd>"
    if kind == "empty":
        return b""
    pixels.save(file, format=kind)
    return file.getvalue()


MAKERS: list[Callable[[random.Random], bytes]] = [truncated, flipped, spliced, noise, bomb, mislabelled]


@pytest.fixture(scope="module")
def strict(kit: Any) -> Iterator[TestClient]:
    limits = Limits(file_bytes=100_000, body_bytes=400_000, pixels=1_000_000)
    with TestClient(create_app(kit.toy(limits=limits))) as client:
        yield client


def throw(client: TestClient, kit: Any, rounds: int, seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    counts: dict[str, int] = {}
    for number in range(rounds):
        make = MAKERS[number % len(MAKERS)]
        content = make(draw)
        answer = client.post("/v1/predict", files=kit.upload(content))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (make.__name__, answer.text, content[:80])
        if answer.status_code == 200:
            assert make in (flipped, truncated, spliced), (make.__name__, content[:80])
        counts[f"{make.__name__} {answer.status_code}"] = counts.get(f"{make.__name__} {answer.status_code}", 0) + 1
    assert client.get("/readyz").status_code == 200
    assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200
    assert "patchcleanser_queue_images 0.0" in client.get("/metrics").text
    return counts


def test_damaged_pictures_are_refused_and_the_worker_lives(kit: Any, strict: TestClient) -> None:
    counts = throw(strict, kit, 300, seed=0)
    assert {f"{make.__name__} {status}" for make in (noise, mislabelled) for status in (415,)} <= set(counts)


@pytest.mark.slow
def test_thousands_of_damaged_pictures_are_refused_and_the_worker_lives(kit: Any, strict: TestClient) -> None:
    assert sum(throw(strict, kit, 6000, seed=1).values()) == 6000
