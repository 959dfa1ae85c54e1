"""Folders and Parquet files of pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from patchcleanser.data import EncodedDataset, in_memory, load_dataset, together
from patchcleanser.errors import DataError


def picture(path: Path, colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_class_folders_become_labels_in_name_order(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "b.png")
    picture(tmp_path / "ant" / "deep" / "a.jpg", (0, 0, 255))
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.classes == ("ant", "cat")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 1]
    assert dataset.image(1)[:, 0, 0].tolist() == [1, 0, 0]
    assert dataset.image(1).shape == (3, 6, 8)


def test_a_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    assert load_dataset(f"folder:{tmp_path}").labels is None


def test_the_fingerprint_follows_names_pixels_and_labels(tmp_path: Path) -> None:
    picture(tmp_path / "x" / "a.png")
    seen = {load_dataset(f"folder:{tmp_path}").fingerprint}
    picture(tmp_path / "x" / "a.png", (254, 0, 0))
    seen.add(load_dataset(f"folder:{tmp_path}").fingerprint)
    (tmp_path / "x" / "a.png").rename(tmp_path / "x" / "b.png")
    seen.add(load_dataset(f"folder:{tmp_path}").fingerprint)
    assert len(seen) == 3


def test_the_packaged_sample_is_real_and_balanced() -> None:
    sample = load_dataset("sample")
    assert len(sample) == 300
    assert sample.labels is not None
    assert np.bincount(sample.labels).tolist() == [30] * 10
    assert sample.image(0).shape == (3, 32, 32)


def test_several_datasets_make_one_pool_of_photos(tmp_path: Path) -> None:
    picture(tmp_path / "one" / "a.png", (255, 0, 0))
    picture(tmp_path / "two" / "b.png", (0, 255, 0))
    picture(tmp_path / "two" / "c.png", (0, 0, 255))
    pool = together([load_dataset(f"folder:{tmp_path / n}") for n in ("one", "two")])
    assert [pool.image(i).amax((1, 2)).tolist() for i in range(3)] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    few = together([pool], limit=2, seed=1)
    assert len(few) == 2
    assert few.fingerprint != pool.fingerprint


def test_in_memory_resizes_to_one_size(tmp_path: Path) -> None:
    picture(tmp_path / "x" / "a.png", size=(20, 10))
    arrays = in_memory(load_dataset(f"folder:{tmp_path}"), (8, 8))
    assert arrays.images.shape == (1, 8, 8, 3)
    assert (arrays.images[0, :, :, 0] == 255).all()


def encoded(content: bytes) -> EncodedDataset:
    return EncodedDataset("one", ["pictures/a.jpg"], [content])


def bytes_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("RGBA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("1", "PNG"), ("LA", "PNG")]
)
def test_every_kind_of_picture_becomes_rgb(mode: str, kind: str) -> None:
    image = encoded(bytes_of(Image.new(mode, (5, 4)), kind)).image(0)
    assert image.shape == (3, 4, 5)
    assert 0 <= image.min() <= image.max() <= 1


def test_pictures_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    content = bytes_of(Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    assert encoded(content).image(0).shape == (3, 8, 4)


@pytest.mark.parametrize("content", [b"", b"not a picture", bytes_of(Image.new("RGB", (64, 64)), "JPEG")[:200]])
def test_what_cannot_be_decoded_is_named(content: bytes) -> None:
    with pytest.raises(DataError, match=r"cannot decode image pictures/a\.jpg"):
        encoded(content).image(0)


def test_parquet_keeps_labels_and_class_names(tmp_path: Path) -> None:
    content = bytes_of(Image.new("RGB", (4, 4), (0, 255, 0)), "PNG")
    table = pa.table({"image": [{"bytes": content, "path": "a"}] * 2, "label": [1, 0]})
    parquet.write_table(
        table.replace_schema_metadata({"class_names": json.dumps(["no", "yes"])}), tmp_path / "a.parquet"
    )
    dataset = load_dataset(f"parquet:{tmp_path}")
    assert dataset.classes == ("no", "yes")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "no folder at"),
        (lambda p: p.mkdir(), "no pictures in"),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, make, words: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=words):
        load_dataset(f"folder:{tmp_path / 'photos'}")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no Parquet file at"), (b"PAR1 half", "not a whole Parquet file")]
)
def test_bad_parquet_files_are_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_dataset(f"parquet:{tmp_path / 'x.parquet'}")


def test_parquet_without_images_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"picture": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no column 'image', only"):
        load_dataset(f"parquet:{tmp_path / 'x.parquet'}")
