"""Datasets known by name: official files, downloads, and words that say what to put where."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torchvision.datasets
from PIL import Image
from pyarrow import parquet
from scipy.io import savemat

from patchcleanser.data import DATASETS, load_dataset
from patchcleanser.data.catalog import NAMED, SAMPLE, cached_splits, full_name
from patchcleanser.errors import DataError, MissingDependencyError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(path: Path, colour: tuple[int, int, int] = (255, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), colour).save(path, "JPEG")


def svhn(root: Path) -> np.ndarray[Any, Any]:
    """Three digits as the official file has them: 1, 9 and, as label 10, 0."""
    root.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)
    savemat(root / "test_32x32.mat", {"X": pixels, "y": np.array([[1], [9], [10]], dtype=np.uint8)})
    return pixels


def flowers(root: Path) -> None:
    """Four flowers of two kinds; number 1 is for training, 2 for validation, 4 and 3 for the test."""
    for number in (1, 2, 3, 4):
        picture(root / "flowers-102" / "jpg" / f"image_{number:05d}.jpg", (0, 0, 60 * number))
    sets = {"trnid": [[1]], "valid": [[2]], "tstid": [[4, 3]]}
    savemat(root / "flowers-102" / "setid.mat", {k: np.array(v) for k, v in sets.items()})
    savemat(root / "flowers-102" / "imagelabels.mat", {"labels": np.array([[1, 1, 2, 102]], dtype=np.uint8)})


def imagenette(root: Path, folder: str = "imagenette2-320") -> None:
    for number in ("n01440764", "n03888257"):
        for split in ("train", "val"):
            picture(root / folder / split / number / f"{number}_1.JPEG")


def labels(dataset: Any) -> list[int]:
    return [] if dataset.labels is None else dataset.labels.tolist()


def test_svhn_is_read_and_its_ten_is_the_digit_zero(tmp_path: Path) -> None:
    pixels = svhn(tmp_path)
    for split in ("test", "val"):
        dataset = load_dataset("svhn", split=split, root=tmp_path)
        assert labels(dataset) == [1, 9, 0]
    assert dataset.classes[0] == "0"
    assert np.allclose(dataset.image(1).numpy() * 255, pixels[..., 1].transpose(2, 0, 1))


@pytest.mark.parametrize(("split", "ids", "want"), [("train", [1], [0]), ("val", [2], [0]), ("test", [4, 3], [101, 1])])
def test_flowers_are_read_by_split(tmp_path: Path, split: str, ids: list[int], want: list[int]) -> None:
    flowers(tmp_path)
    for root in (tmp_path, tmp_path / "flowers-102"):
        dataset = load_dataset("flowers102", split=split, root=root)
        assert [dataset.id(i) for i in range(len(dataset))] == [f"image_{n:05d}.jpg" for n in ids]
        assert labels(dataset) == want
        assert len(dataset.classes) == 102
        assert dataset.image(0)[2, 3, 3] == pytest.approx(60 * ids[0] / 255, abs=0.02)


def test_imagenet_classes_keep_their_numbers_even_if_folders_are_missing(tmp_path: Path) -> None:
    for number in ("n01440764", "n02012849", "n03126707"):  # tench, and the two kinds of crane
        picture(tmp_path / "val" / number / "a.JPEG")
    for root in (tmp_path, tmp_path / "val"):
        dataset = load_dataset("imagenet", split="test", root=root)
        assert labels(dataset) == [0, 134, 517]
    assert dataset.name == "imagenet-val"
    assert len(set(dataset.classes)) == 1000
    assert [dataset.classes[k] for k in labels(dataset)] == ["tench", "crane bird", "crane"]


def devkit(root: Path, truth: str = "2\n1\n3\n") -> None:
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    synsets = [(1, "n03126707", "crane"), (2, "n01440764", "tench"), (3, "n02012849", "crane"), (1001, "n1", "animal")]
    savemat(data / "meta.mat", {"synsets": np.array(synsets, dtype=kinds).reshape(-1, 1)})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


def test_flat_imagenet_gets_its_labels_from_the_devkit(tmp_path: Path) -> None:
    for number in (1, 3):  # a part of them will do
        picture(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG")
    with pytest.raises(DataError, match=r"val has no class folders, .* unpack ILSVRC2012_devkit_t12\.tar\.gz in"):
        load_dataset("imagenet", root=tmp_path)
    devkit(tmp_path)
    assert labels(load_dataset("imagenet", root=tmp_path)) == [0, 134]
    picture(tmp_path / "val" / "ILSVRC2012_val_00000004.JPEG")
    with pytest.raises(DataError, match=r"'ILSVRC2012_val_00000004\.JPEG' is not one of .* to 00000003"):
        load_dataset("imagenet", root=tmp_path)


@pytest.mark.parametrize("truth", ["1001\n", "7\n", "x\n"])
def test_a_wrong_devkit_is_refused(tmp_path: Path, truth: str) -> None:
    picture(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    devkit(tmp_path, truth)
    with pytest.raises(DataError, match="data is not the ILSVRC 2012 devkit's"):
        load_dataset("imagenet", root=tmp_path)


def test_imagenette_has_ten_classes_with_names_or_imagenet_s_own_labels(tmp_path: Path) -> None:
    imagenette(tmp_path)
    for root in (tmp_path, tmp_path / "imagenette2-320"):
        dataset = load_dataset("imagenette", split="test", root=root)
        assert (dataset.name, dataset.classes[9], labels(dataset)) == ("imagenette-val", "parachute", [0, 9])
    as_imagenet = load_dataset("imagenet", split="val", root=tmp_path / "imagenette2-320")
    assert labels(as_imagenet) == [0, 701]
    assert as_imagenet.classes[701] == "parachute"


@pytest.mark.parametrize("name", list(NAMED))
def test_every_dataset_with_a_name_is_read_from_parquet_files_too(tmp_path: Path, name: str) -> None:
    picture(tmp_path / "a.png")
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "a.png"}
    for part, label in enumerate((1, 0)):
        table = pa.table({"image": [image], "label": [label]})
        parquet.write_table(
            table.replace_schema_metadata({"class_names": '["x", "y"]'}), tmp_path / f"{name}-train-{part}.parquet"
        )
    dataset = load_dataset(name, split="train", root=tmp_path)
    assert (labels(dataset), dataset.classes) == ([1, 0], ("x", "y"))


def test_of_several_imagenettes_the_largest_pictures_are_taken(tmp_path: Path) -> None:
    for folder in ("imagenette2-160", "imagenette2", "imagenette2-320"):
        imagenette(tmp_path, folder)
    assert NAMED["imagenette"].find(tmp_path, "val") == tmp_path / "imagenette2" / "val"
    chosen = tmp_path / "imagenette2-160"
    assert NAMED["imagenette"].find(chosen, "val") == chosen / "val"


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("imagenet", lambda r: picture(r / "val" / "cat" / "a.jpg"), "class folders n01440764 to n15075141, got cat"),
        ("imagenette", lambda r: picture(r / "imagenette2" / "val" / "a.jpg"), "got pictures without folders"),
        ("imagenette", lambda r: (r / "imagenette2" / "val").mkdir(parents=True), "no pictures in"),
        ("svhn", lambda r: (r / "test_32x32.mat").write_bytes(b"half"), "mat is not a whole file with X, y"),
        ("svhn", lambda r: savemat(r / "test_32x32.mat", {"X": 1}), "mat is not a whole file with X, y"),
        ("svhn", lambda r: savemat(r / "test_32x32.mat", {"X": [1], "y": [1]}), "SVHN is uint8"),
        (
            "svhn",
            lambda r: savemat(r / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [0, 11]}),
            "labels from 0 to 11; SVHN has 1 to 10",
        ),
        ("flowers102", lambda r: savemat(r / "setid.mat", {"tstid": [1]}), r"no imagelabels\.mat in"),
        (
            "flowers102",
            lambda r: [flowers(r), (r / "flowers-102" / "jpg").rename(r / "x")],
            r"no folder jpg in .*; unpack 102flowers\.tgz",
        ),
        (
            "flowers102",
            lambda r: [flowers(r), savemat(r / "flowers-102" / "setid.mat", {"tstid": [9000]})],
            "names images outside 1 to 4",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, make, words: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path)
    with pytest.raises(DataError, match=words):
        load_dataset(name, root=tmp_path)


@pytest.mark.parametrize("name", NAMED)
def test_a_root_without_the_files_says_what_to_put_there(tmp_path: Path, name: str) -> None:
    entry = NAMED[name]
    for split, files in entry.files.items():
        wanted = (tmp_path / "root" / files[0]).as_posix()
        with pytest.raises(DataError) as caught:
            load_dataset(name, split=split, root=tmp_path / "root")
        message = str(caught.value)
        assert message.startswith(f"{entry.title} ({split}) is not in {tmp_path / 'root'}: there is no {wanted}")
        assert "http" in message
        assert "{" not in message


def test_imagenet_is_never_downloaded_and_the_command_is_given(cache: Path) -> None:
    with pytest.raises(DataError, match=rf"run: python -c \"from torchvision.*ImageNet\('{cache}/imagenet', 'val'\)\""):
        load_dataset("imagenet")


class FromNowhere:
    """Torchvision's classes, but the network is a tar file made here."""

    def __init__(self, make: Any, error: Exception | None = None) -> None:
        self.make, self.error, self.calls = make, error, 0

    def __call__(self, root: Path, *, download: bool, **options: object) -> None:
        assert download
        self.calls += 1
        print("Downloading …")
        source = root / "made"
        self.make(source)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for entry in source.iterdir():
                archive.add(entry, entry.name)
        (root / "download.tgz").write_bytes(packed.getvalue())
        with tarfile.open(root / "download.tgz") as archive:
            archive.extractall(root, filter="data")
        if self.error:
            raise self.error


DOWNLOADS = [
    ("svhn", "SVHN", svhn, 3),
    ("flowers102", "Flowers102", flowers, 2),
    ("imagenette", "Imagenette", imagenette, 2),
]


@pytest.mark.parametrize(("name", "kind", "make", "images"), DOWNLOADS)
def test_what_is_nowhere_is_downloaded_once_into_the_cache(  # type: ignore[no-untyped-def]
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, kind: str, make, images
) -> None:
    stub = FromNowhere(make)
    monkeypatch.setattr(torchvision.datasets, kind, stub)
    assert cached_splits(name) == []
    assert len(load_dataset(name)) == images
    assert len(load_dataset(name)) == images
    assert stub.calls == 1
    assert cached_splits(name)
    assert not list(cache.rglob("*.tgz"))
    assert not [p for p in (cache / name).iterdir() if p.name.startswith(".")]
    output = capsys.readouterr()
    assert output.out == ""
    assert f"into {cache / name}" in output.err


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("File not found or corrupted."), EOFError("end")])
@pytest.mark.parametrize(("name", "kind", "make", "images"), DOWNLOADS)
def test_a_failed_download_leaves_nothing_and_says_what_to_put_where(  # type: ignore[no-untyped-def]
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, make, images: int, error: Exception
) -> None:
    monkeypatch.setattr(torchvision.datasets, kind, FromNowhere(make, error))
    with pytest.raises(DataError, match=rf"could not be downloaded \({error}\): there is no {cache}.* To have it, "):
        load_dataset(name)
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_half_a_folder_in_the_cache_is_left_alone_and_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "imagenette" / "imagenette2-320").mkdir(parents=True)
    monkeypatch.setattr(torchvision.datasets, "Imagenette", FromNowhere(imagenette))
    with pytest.raises(DataError, match=r"there is no .*imagenette2-320/val"):
        load_dataset("imagenette")


@pytest.mark.parametrize("name", ["svhn", "flowers102"])
def test_without_scipy_the_command_that_installs_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    svhn(tmp_path)
    flowers(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    for root in (tmp_path, None):  # and before anything is downloaded
        with pytest.raises(
            MissingDependencyError, match=r"scipy is not installed; run, in a clone of .*: pip install '\.\[data"
        ):
            load_dataset(name, root=root)


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("cifar10", "dev", "CIFAR-10 has the splits train, test; got 'dev'"),
        ("flowers102", "extra", "Flowers-102 has the splits train, val, test; got 'extra'"),
        ("imagenet", "dev", "ImageNet has the splits train, val; got 'dev'"),
        ("banana", "test", "no folder here and no dataset 'banana'; there are sample, cifar10, "),
        ("CIFAR-10", "test", r"no dataset 'CIFAR-10'; there are sample, .*; did you mean cifar10\?$"),
        ("folder:", "test", "no dataset 'folder:'"),
        ("", "test", "no dataset ''"),
    ],
)
def test_unknown_splits_and_datasets_are_named(name: str, split: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_dataset(name, split=split)


def test_a_path_alone_names_a_folder_or_a_parquet_file_but_a_dataset_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "sample"):
        picture(tmp_path / folder / "cat" / "a.jpg")
    for path in ("photos", "./photos", tmp_path / "photos"):
        assert load_dataset(str(path)).classes == ("cat",)
    assert len(load_dataset(str(SAMPLE))) == len(load_dataset("sample")) == 300
    assert full_name("photos") == "folder:photos"


@pytest.mark.parametrize("name", ["sample", "folder:x", "parquet:x"])
def test_what_says_where_it_lies_takes_no_root(name: str) -> None:
    with pytest.raises(DataError, match="takes no root, got elsewhere"):
        load_dataset(name, root="elsewhere")


def test_the_registry_describes_every_dataset_in_a_line() -> None:
    assert list(DATASETS) == ["sample", *NAMED, "folder:PATH", "parquet:PATH"]
    assert all(words and "\n" not in words for words in DATASETS.values())
