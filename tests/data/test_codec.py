"""Every odd picture becomes a right one, or an error that names it."""

from __future__ import annotations

import io
import re
import struct
import warnings

import numpy as np
import pytest
from PIL import Image

from patchcleanser.data import codec, decode
from patchcleanser.errors import DataError

RED, GRAY_16 = (255, 0, 0), np.array([[0, 257, 32896, 65535]], dtype=np.uint16)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(content: bytes) -> list[list[float]]:
    """The first row, in steps of 1/255, as [r, g, b] for each pixel."""
    return [[round(v, 2) for v in pixel] for pixel in (decode(content, "x")[:, 0] * 255).T.tolist()]


def tiff(values: bytes, size: tuple[int, int], bits: int, *, photometric: int = 1, kind: int = 1) -> bytes:
    """An uncompressed TIFF of one channel, written by hand, for what Pillow does not write."""
    tags = [(256, size[0]), (257, size[1]), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1)]
    tags += [(278, size[1]), (279, len(values)), (339, kind)]
    values += b"\0" * (len(values) % 2)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(values)) + values + struct.pack("<H", len(tags)) + entries + bytes(4)


def palette(transparency: object) -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.info["transparency"] = transparency
    return image


def alpha(mode: str, *pixels: tuple[int, ...]) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    return image


def animation() -> bytes:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, (0, 255, 0))]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


WHITE, BLACK = [255.0] * 3, [0.0] * 3
RED_BLUE = [[255.0, 0.0, 0.0], [0.0, 0.0, 255.0]]
DEEP = [[0.0] * 3, [1.0] * 3, [128.0] * 3, [255.0] * 3]
INVERTED = [[255 - v for v in pixel] for pixel in DEEP]


@pytest.mark.parametrize(
    ("content", "want"),
    [
        pytest.param(encoded(Image.new("RGB", (1, 1), RED), "PNG"), [[255, 0, 0]], id="rgb"),
        pytest.param(encoded(Image.new("L", (1, 1), 100), "PNG"), [[100, 100, 100]], id="gray"),
        pytest.param(encoded(Image.new("1", (1, 1), 1), "PNG"), [WHITE], id="1 bit"),
        pytest.param(encoded(Image.fromarray(GRAY_16), "PNG"), DEEP, id="16-bit PNG"),
        pytest.param(encoded(Image.fromarray(GRAY_16), "TIFF"), DEEP, id="16-bit TIFF"),
        pytest.param(encoded(Image.fromarray(GRAY_16), "PPM"), DEEP, id="16-bit PGM"),
        pytest.param(tiff(GRAY_16.tobytes(), (4, 1), 16, photometric=0), INVERTED, id="16-bit TIFF, white is 0"),
        pytest.param(tiff(bytes([0x00, 0x0F, 0xFF]), (2, 1), 12), [BLACK, WHITE], id="12-bit TIFF"),
        pytest.param(
            encoded(Image.fromarray(GRAY_16), "PNG", transparency=257), [BLACK, WHITE, *DEEP[2:]], id="16 bits, a hole"
        ),
        pytest.param(encoded(Image.fromarray(np.float32([[0, 0.5, 1]])), "TIFF"), [BLACK, [127.5] * 3, WHITE], id="F"),
        pytest.param(encoded(palette(b"\xff\xff"), "PNG"), RED_BLUE, id="palette"),
        pytest.param(encoded(palette(0), "PNG"), [WHITE, RED_BLUE[1]], id="palette, one colour transparent"),
        pytest.param(encoded(palette(b"\x00\xff"), "PNG"), [WHITE, RED_BLUE[1]], id="palette with alpha"),
        pytest.param(encoded(palette(0), "GIF"), [WHITE, RED_BLUE[1]], id="GIF, one colour transparent"),
        pytest.param(
            encoded(alpha("RGBA", (9, 9, 9, 0), (255, 0, 0, 255), (0, 0, 0, 51)), "PNG"),
            [WHITE, [255, 0, 0], [204, 204, 204]],
            id="alpha over white",
        ),
        pytest.param(encoded(alpha("LA", (9, 0), (9, 255)), "PNG"), [WHITE, [9, 9, 9]], id="gray with alpha"),
        pytest.param(
            encoded(alpha("RGB", (1, 2, 3), RED), "PNG", transparency=(1, 2, 3)), [WHITE, [255, 0, 0]], id="RGB, a hole"
        ),
        pytest.param(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG"), [BLACK] * 8, id="CMYK black"),
        pytest.param(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "TIFF"), [WHITE] * 8, id="CMYK white"),
        pytest.param(animation(), [[255, 0, 0]] * 4, id="first frame"),
        pytest.param(encoded(Image.new("RGB", (4, 4), RED), "WEBP", lossless=True), [[255, 0, 0]] * 4, id="WebP"),
    ],
)
def test_odd_pictures_become_right_ones(content: bytes, want: list[list[float]]) -> None:
    image = decode(content, "x")
    assert image.is_contiguous()
    assert str(image.dtype) == "torch.float32"
    assert shown(content) == want


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_are_turned_upright(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways: what is left in the file belongs on top
    image = Image.new("RGB", (16, 8))
    image.paste(RED, (0, 0, 8, 8))
    turned = decode(encoded(image, kind, exif=exif), "x")
    assert turned.shape == (3, 16, 8)
    assert turned[0, 2, 4] > 0.9
    assert turned[0, 13, 4] < 0.1


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_says_nothing() -> None:
    content = encoded(Image.new("RGB", (16, 8), RED), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    assert decode(content, "x").shape == (3, 8, 16)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"not a picture", "the file is damaged, or none of .*JPEG", id="no picture"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "damaged, or none of", id="a program"),
        pytest.param(encoded(Image.new("RGB", (64, 64)), "JPEG")[:-40], "truncated", id="half a JPEG"),
        pytest.param(encoded(Image.new("RGB", (64, 64)), "PNG")[:60], "truncated", id="half a PNG"),
        pytest.param(encoded(Image.new("RGB", (64, 64)), "GIF")[:-30], "", id="half a GIF"),
        pytest.param(encoded(Image.new("RGB", (64, 64)), "WEBP")[:-10], "", id="half a WebP"),
        pytest.param(tiff(struct.pack("<2i", 0, 70000), (2, 1), 32, kind=2), "no agreed white", id="32 bits"),
        pytest.param(tiff(struct.pack("<2h", -5, 5), (2, 1), 16, kind=2), "no agreed white", id="signed"),
        pytest.param(tiff(struct.pack("<2f", 0, 255), (2, 1), 32, kind=3), "from 0 to 255; they must", id="0 to 255.0"),
        pytest.param(tiff(struct.pack("<2f", 0, np.nan), (2, 1), 32, kind=3), "must lie in 0 to 1", id="NaN"),
    ],
)
def test_what_cannot_be_decoded_is_named(content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=rf"cannot decode image pictures/a\.jpg: .*{words}"):
        decode(content, "pictures/a.jpg")


@pytest.mark.parametrize("heard", ["error", "ignore"])
@pytest.mark.parametrize("side", [11, 15])  # Pillow warns above 100 pixels, and raises above 200
def test_a_decompression_bomb_is_refused_with_its_limit(monkeypatch: pytest.MonkeyPatch, side: int, heard: str) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    content = encoded(Image.new("RGB", (side, side)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter(heard)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="image bomb: it has more than 100 pixels, the limit"):
            decode(content, "bomb")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(content, "bomb").shape == (3, side, side)


def in_scans(scans: int, *, comment: bytes = b"") -> bytes:
    """A progressive JPEG whose second scan comes so often that there are this many, with a comment."""
    content = encoded(Image.new("L", (64, 64), 90), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(rb"\xff\xda", content)]
    table = content.index(b"\xff\xc4", starts[1])  # where the second scan ends
    head = content[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + content[2:table]
    return head + content[starts[1] : table] * (scans - 2) + b"\xff\xd9"


def test_a_jpeg_of_endless_passes_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(in_scans(200), "x").shape == (3, 64, 64)
    monkeypatch.setattr(codec, "pixels_of", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(DataError, match="image bomb: it asks for more than 200 passes over its pixels"):
        decode(in_scans(201), "bomb")


def test_only_passes_over_the_picture_itself_count() -> None:
    """Cameras put previews into a JPEG and films behind it."""
    content = in_scans(100, comment=b"\xff\xda" * 300)
    assert decode(content + b"\xff\xda" * 300, "x").shape == (3, 64, 64)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "PPM", "JPEG2000"])
def test_damage_anywhere_never_shows_a_traceback_of_pillow(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    intact = encoded(noise, kind)
    for _ in range(60):
        damaged = bytearray(intact)
        for place in rng.integers(0, len(intact), 4):
            damaged[min(place, rng.integers(1, 80) if rng.random() < 0.7 else place)] = rng.integers(256)
        content = bytes(damaged[: rng.integers(1, len(intact) + 1) if rng.random() < 0.3 else None])
        try:
            image = decode(content, "x")
        except DataError:
            continue
        assert 0 <= image.min() <= image.max() <= 1
