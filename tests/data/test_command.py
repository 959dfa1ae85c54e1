"""`patchcleanser data`: what there is, and what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from patchcleanser.cli.catalog import data
from patchcleanser.data import DATASETS, load_dataset
from patchcleanser.data.catalog import ANNOTATED
from patchcleanser.errors import DataError

app = typer.Typer()
app.command()(data)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two ants of different sizes, a damaged cat and no bee."""
    for name, size in {"ant/a.png": (8, 6), "ant/b.png": (8, 8), "cat/c.png": (8, 6)}.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "bee").mkdir()
    (tmp_path / "photos" / "cat" / "c.png").write_bytes(b"half")
    return tmp_path / "photos"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_without_a_name_every_dataset_is_listed_and_whether_it_is_here(cache: Path) -> None:
    (cache / "imagenet" / "val").mkdir(parents=True)
    done = run()
    assert done.exit_code == 0
    for name, words in DATASETS.items():
        assert f"{name:14} {words}" in done.stdout
    assert "in 1,000 classes; here: val\n" in done.stdout
    assert "in 10 classes; not here\n" in done.stdout
    listed = {entry["name"]: entry for entry in json.loads(run("--json").stdout)}
    assert list(listed) == [*DATASETS, *ANNOTATED]
    assert listed["imagenet"]["here"] == ["val"]
    assert listed["svhn"]["folder"] == str(cache / "svhn")


def test_a_name_tells_images_classes_sizes_and_the_fingerprint() -> None:
    done = run("sample")
    assert done.exit_code == 0
    for words in ("300 images, 10 classes", "3 cat ", "32x32 (16), of the first 16; --check reads all"):
        assert words in done.stdout
    facts = json.loads(run("sample", "--check", "--json").stdout)
    assert (facts["images"], facts["sizes"], facts["unreadable"]) == (300, {"32x32": 300}, [])
    assert facts["classes"][3] == {"name": "cat", "images": 30}
    assert facts["fingerprint"] == load_dataset("sample").fingerprint
    assert len(facts["first_ids"]) == 3
    assert json.loads(run("sample", "--limit", "5", "--seed", "1", "--json").stdout)["images"] == 5


def test_images_that_cannot_be_read_are_named_and_counted(photos: Path) -> None:
    done = run(f"folder:{photos}", "--check")
    assert isinstance(done.exception, DataError)
    assert "1 of 3 images read cannot be decoded" in str(done.exception)
    for words in ("3 images, 3 classes", "1 bee                      0", "6x8 (1), 8x8 (1)", "image cat/c.png: "):
        assert words in done.stdout
    facts = json.loads(run(f"folder:{photos}", "--json").stdout)
    assert [entry["id"] for entry in facts["unreadable"]] == ["cat/c.png"]


def test_pictures_without_labels_are_said_to_have_none(photos: Path) -> None:
    done = run(f"folder:{photos / 'ant'}")
    assert done.exit_code == 0
    assert "ant: 2 images, no labels\n" in done.stdout
