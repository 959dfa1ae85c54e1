"""Parquet files of images, from this machine and from elsewhere."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from patchcleanser.data import load_dataset
from patchcleanser.data import parquet as ours
from patchcleanser.errors import DataError, MissingDependencyError


def green() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (0, 255, 0)).save(file, "PNG")
    return file.getvalue()


GREEN = green()
TWO = [{"bytes": GREEN, "path": "a.png"}, {"bytes": GREEN, "path": None}]
NO_YES = {"class_names": json.dumps(["no", "yes"])}


def hugging(label: str, names: list[str] | None) -> dict[str, str]:
    feature = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value"}
    return {"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, label: feature}}})}


def write(path: Path, columns: dict[str, object], metadata: dict[str, str] | None = None, **options: object) -> None:
    parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), path, **options)


@pytest.mark.parametrize(
    ("columns", "metadata", "labels", "classes"),
    [
        pytest.param({"image": TWO, "label": [1, 0]}, NO_YES, [1, 0], ("no", "yes"), id="class_names"),
        pytest.param({"image": TWO, "label": [1, 0]}, hugging("label", ["n", "y"]), [1, 0], ("n", "y"), id="HF names"),
        pytest.param(
            {"img": TWO, "fine_label": [1, 0], "coarse_label": [0, 0]},
            hugging("fine_label", ["n", "y"]),
            [1, 0],
            ("n", "y"),
            id="CIFAR-100 as Hugging Face has it",
        ),
        pytest.param({"image": TWO, "labels": [1, 0]}, hugging("labels", None), [1, 0], ("0", "1"), id="no names"),
        pytest.param({"image": [GREEN, GREEN], "label": [1, 0]}, None, [1, 0], ("0", "1"), id="plain bytes"),
        pytest.param(
            {"image": pa.array([GREEN] * 2, pa.large_binary()), "label": [1, 0]}, None, [1, 0], ("0", "1"), id="large"
        ),
        pytest.param({"image": [{"bytes": GREEN}] * 2}, None, None, (), id="no labels, no paths"),
        pytest.param({"image": TWO, "label": [-1, -1]}, NO_YES, None, ("no", "yes"), id="-1 everywhere"),
        pytest.param({"image": TWO, "label": pa.array([None, None], pa.int64())}, None, None, (), id="null everywhere"),
    ],
)
def test_images_labels_and_class_names_are_found(tmp_path: Path, columns, metadata, labels, classes) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "x.parquet", columns, metadata)
    for address in (tmp_path / "x.parquet", tmp_path, tmp_path / "*.parquet", tmp_path / "?.parquet"):
        dataset = load_dataset(f"parquet:{address}")
        assert (None if dataset.labels is None else dataset.labels.tolist()) == labels
        assert dataset.classes == classes
        assert dataset.image(1).shape == (3, 4, 4)
        assert dataset.content(0) == GREEN


def test_images_keep_their_names_and_their_places(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"image": [GREEN, b"2", b"3"], "label": [0, 1, 1]}, row_group_size=2)
    write(tmp_path / "a.parquet", {"image": TWO, "label": [1, 1]})
    dataset = load_dataset(f"parquet:{tmp_path}")
    names = ["a.parquet:0:a.png", "a.parquet:1:", "b.parquet:0:", "b.parquet:1:", "b.parquet:2:"]
    assert [dataset.id(i) for i in range(5)] == names
    assert [dataset.content(i) for i in (4, 3, 0)] == [b"3", b"2", GREEN]
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 1, 0, 1, 1]


def test_files_of_one_name_in_several_folders_are_told_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "x.parquet", {"image": [GREEN]})
    dataset = load_dataset(f"parquet:{tmp_path}/*/x.parquet")
    assert dataset.id(0).endswith("one/x.parquet:0:")
    assert dataset.id(1).endswith("two/x.parquet:0:")


def test_only_the_row_groups_in_use_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "IN_MEMORY", 2500)
    images = [bytes([i]) * 1000 for i in range(6)]
    write(tmp_path / "x.parquet", {"image": images}, row_group_size=1)
    dataset = load_dataset(f"parquet:{tmp_path}")
    assert [dataset.content(i) for i in (0, 1, 2, 3, 4, 5, 0)] == [*images, images[0]]
    assert 1 <= len(dataset.contents.columns) <= 2  # type: ignore[attr-defined]


def test_a_dataset_can_be_sent_to_another_process(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"image": TWO, "label": [1, 0]})
    dataset = load_dataset(f"parquet:{tmp_path}")
    assert pickle.loads(pickle.dumps(dataset)).content(1) == dataset.content(1)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[fsspec.AbstractFileSystem]:
    memory = fsspec.filesystem("memory")
    for split in ("train", "test"):
        write(tmp_path / "x.parquet", {"image": TWO, "label": [1, 0]}, NO_YES)
        memory.pipe(f"/bucket/{split}-00000.parquet", (tmp_path / "x.parquet").read_bytes())
    memory.pipe("/bucket/half.parquet", b"PAR1 half")
    yield memory
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("address", ["memory://bucket/test-00000.parquet", "memory://bucket/te*.parquet"])
@pytest.mark.usefixtures("bucket")
def test_any_fsspec_address_is_read(address: str) -> None:
    dataset = load_dataset(f"parquet:{address}")
    assert dataset.classes == ("no", "yes")
    assert dataset.image(1).amax((1, 2)).tolist() == [0, 1, 0]
    assert dataset.id(0) == "test-00000.parquet:0:a.png"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("memory://bucket/none.parquet", "no Parquet file at memory://bucket/none"),
        ("memory://bucket/half.parquet", "half.parquet is not a whole Parquet file"),
        ("nowhere://x.parquet", "cannot look for Parquet files at nowhere://x.parquet: Protocol not known"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_bad_addresses_are_named(address: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_dataset(f"parquet:{address}")


def test_an_address_that_needs_another_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match="parquet:s3://b/x needs another package: Install s3fs"):
        load_dataset("parquet:s3://b/x")


@pytest.mark.parametrize(
    ("columns", "metadata", "words"),
    [
        ({"image": TWO, "label": [0, 2]}, NO_YES, "row 1 of x.parquet has label 2; labels go from 0 to 1"),
        ({"image": TWO, "label": [0, -3]}, None, "row 1 of x.parquet has label -3; labels go from 0 to 0"),
        ({"image": TWO, "label": [0, -1]}, NO_YES, "row 1 of x.parquet has label -1"),
        ({"image": TWO, "label": [0, None]}, NO_YES, "row 1 of x.parquet has no label, but others have"),
        ({"image": TWO, "label": ["a", "b"]}, None, "string in 'label'; labels are whole numbers"),
        ({"image": TWO, "label": [0.0, 1.0]}, None, "double in 'label'; labels are whole numbers"),
        ({"picture": [1]}, None, r"no column 'image' or 'img', only \['picture'\]"),
        ({"image": [1]}, None, "has int64 in 'image'; encoded images are binary, or struct<bytes, path>"),
        ({"image": [{"path": "a"}]}, None, "in 'image'; encoded images are binary"),
        ({"image": pa.array([], pa.binary())}, None, "x.parquet holds no images"),
        ({"image": TWO}, {"class_names": "[no"}, "class names that are no JSON list"),
        ({"image": TWO}, {"huggingface": "[]"}, "class names that are no JSON list"),
    ],
)
def test_bad_columns_are_refused(tmp_path: Path, columns, metadata, words: str) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "x.parquet", columns, metadata)
    with pytest.raises(DataError, match=words):
        load_dataset(f"parquet:{tmp_path / 'x.parquet'}")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no Parquet file at"), (b"PAR1 half", "not a whole Parquet file"), (b"", "whole")]
)
def test_bad_files_are_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_dataset(f"parquet:{tmp_path / 'x.parquet'}")


@pytest.mark.parametrize("image", [None, {"bytes": None, "path": "elsewhere.png"}])
def test_an_image_that_is_not_in_the_file_is_named_when_it_is_its_turn(tmp_path: Path, image: object) -> None:
    write(tmp_path / "x.parquet", {"image": [*TWO, image]}, row_group_size=2)
    dataset = load_dataset(f"parquet:{tmp_path}")
    assert dataset.image(1).shape == (3, 4, 4)
    with pytest.raises(DataError, match=r"row 2 of .*x\.parquet holds no image bytes in 'image'"):
        dataset.image(2)


def test_damage_inside_a_file_is_named_when_it_is_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(path, {"image": [bytes(range(256)) * 40] * 2}, row_group_size=1, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet is not a whole Parquet file"):
        load_dataset(f"parquet:{path}").image(0)


def test_files_of_several_datasets_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"image": TWO, "label": [0, 1]}, NO_YES)
    write(tmp_path / "b.parquet", {"image": TWO, "label": [0, 1]}, {"class_names": '["x", "y"]'})
    with pytest.raises(DataError, match=r"a\.parquet and b\.parquet name different classes"):
        load_dataset(f"parquet:{tmp_path}")


def test_splits_in_one_folder_are_not_mixed_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", {"image": TWO})
    write(tmp_path / "test.parquet", {"image": TWO})
    with pytest.raises(DataError, match=r"holds the splits test, train; name one: parquet:.*/test\*\.parquet"):
        load_dataset(f"parquet:{tmp_path}")
    assert len(load_dataset(f"parquet:{tmp_path}/*.parquet")) == 4
