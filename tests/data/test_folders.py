"""Folders of pictures, with and without labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchcleanser.data import in_memory, load_dataset, together
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


def test_pictures_beside_folders_make_all_of_them_unlabelled(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "cover.png")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert (len(dataset), dataset.labels, dataset.classes) == (2, None, ())


def test_an_empty_class_folder_stays_a_class(tmp_path: Path) -> None:
    picture(tmp_path / "ant" / "a.png")
    picture(tmp_path / "cat" / "a.png")
    (tmp_path / "bee").mkdir()
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.classes == ("ant", "bee", "cat")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 2]


def test_hidden_files_and_other_files_are_no_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "a.JPG")
    for name in ("cat/._a.jpg", "cat/notes.md", ".git/x.png", "__MACOSX/cat/b.jpg", ".hidden.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"no picture")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert ([dataset.id(i) for i in range(len(dataset))], dataset.classes) == (["cat/a.JPG"], ("cat",))


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path)
    dataset = load_dataset(f"folder:{tmp_path / 'photos'}")
    assert [dataset.id(i) for i in range(len(dataset))] == ["cat/a.png"]


def test_a_picture_that_is_gone_or_damaged_is_named_when_it_is_its_turn(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / "x" / f"{name}.png")
    dataset = load_dataset(f"folder:{tmp_path}")
    (tmp_path / "x" / "a.png").unlink()
    (tmp_path / "x" / "b.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read .*x/a\.png: No such file"):
        dataset.image(0)
    with pytest.raises(DataError, match=r"cannot decode image x/b\.png: the file is empty"):
        dataset.image(1)
    assert dataset.image(2).shape == (3, 6, 8)
    assert len(dataset.fingerprint) == 64


LISTED = {
    "class numbers": ("labels.csv", "a.png,1\nsub/b.png,0\n", [1, 0], ("0", "1")),
    "class names": ("labels.csv", 'path,label\na.png,cat\nsub/b.png,"ant, red"\n', [1, 0], ("ant, red", "cat")),
    "blanks, a mark of Excel's, an empty line": ("labels.txt", "\ufeffa.png  1\n\nsub/b.png  0", [1, 0], ("0", "1")),
    "names of several words": (
        "labels.txt",
        "a.png garbage truck\nsub/b.png church\n",
        [1, 0],
        ("church", "garbage truck"),
    ),
    "no labels": ("labels.csv", "a.png,\nsub/b.png,-1\n", None, ()),
}


@pytest.mark.parametrize(("name", "text", "labels", "classes"), LISTED.values(), ids=LISTED)
def test_a_list_of_labels_stands_in_for_class_folders(
    tmp_path: Path, name: str, text: str, labels: list[int] | None, classes: tuple[str, ...]
) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "sub" / "b.png")
    picture(tmp_path / "sub" / "not listed.png")
    (tmp_path / name).write_text(text, encoding="utf-8")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert [dataset.id(i) for i in range(len(dataset))] == ["a.png", "sub/b.png"]
    assert (None if dataset.labels is None else dataset.labels.tolist()) == labels
    assert dataset.classes == classes
    assert dataset.image(0).shape == (3, 6, 8)


@pytest.mark.parametrize(("label", "want"), [("2", 2), ("wasp", 2)])
def test_classes_txt_names_the_classes(tmp_path: Path, label: str, want: int) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "classes.txt").write_text("cat\nant\nwasp\n")
    (tmp_path / "labels.csv").write_text(f"a.png,{label}")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.classes == ("cat", "ant", "wasp")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [want]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.png,0\nb.png,3", r"line 2 of .*labels\.csv has label 3; labels go from 0 to 1"),
        ("a.png,0\nb.png,-2", r"line 2 of .*labels\.csv has label -2; labels go from 0 to 1"),
        ("a.png,0\nb.png,", r"line 2 of .*labels\.csv has no label, but others have"),
        ("a.png,cat\nb.png,dog", r"line 2 of .*labels\.csv has label 'dog', which is not in classes\.txt"),
        ("a.png,0\n\nc.png,1", r"line 3 of .*labels\.csv names 'c\.png', which is not in"),
        ("a.png,0\na.png,1", r"line 2 of .*labels\.csv names 'a\.png' again, after line 1"),
        ("a.png\n", r"line 1 of .*labels\.csv has 1 columns; write path,label"),
        ("a.png,0,0,5,5\n", r"line 1 of .*labels\.csv has 5 columns; write path,label"),
        ("", "holds no images"),
        ("\udcff", "it must be UTF-8 text"),
    ],
)
def test_a_bad_list_of_labels_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "classes.txt").write_text("cat\nant\n")
    (tmp_path / "labels.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=words):
        load_dataset(f"folder:{tmp_path}")


def test_labels_too_large_for_classes_without_names_are_damage(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("a.png,4000000000")
    with pytest.raises(DataError, match=r"line 1 .* has label 4000000000; labels go from 0 to 99999"):
        load_dataset(f"folder:{tmp_path}")


def test_the_fingerprint_follows_names_pixels_and_labels(tmp_path: Path) -> None:
    picture(tmp_path / "x" / "a.png")
    fingerprints = {load_dataset(f"folder:{tmp_path}").fingerprint}
    picture(tmp_path / "x" / "a.png", (254, 0, 0))
    fingerprints.add(load_dataset(f"folder:{tmp_path}").fingerprint)
    (tmp_path / "x" / "a.png").rename(tmp_path / "x" / "b.png")
    fingerprints.add(load_dataset(f"folder:{tmp_path}").fingerprint)
    assert len(fingerprints) == 3


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "no folder at"),
        (lambda p: p.mkdir(), "no pictures in .*; known endings: .*jpg"),
        (lambda p: (p / "cat").mkdir(parents=True), "no pictures in"),
        (
            lambda p: [picture(p / split / "cat" / "a.png") for split in ("val", "train")],
            "holds the splits train, val; name one: folder:.*photos/train",
        ),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, make, words: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=words):
        load_dataset(f"folder:{tmp_path / 'photos'}")


def test_a_file_that_changes_after_it_was_named_is_refused(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (4, 4), colour).save(tmp_path / f"{name}.png")
    dataset = load_dataset(f"folder:{tmp_path}")
    named = dataset.fingerprint
    Image.new("RGB", (4, 4), "green").save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"b.png .* changed while it was in use"):
        dataset.image(1)
    assert dataset.image(0).shape == (3, 4, 4)
    assert load_dataset(f"folder:{tmp_path}").fingerprint != named
