"""Boxes around objects, digits cut by them, and Tiny-ImageNet, whose list holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchcleanser.core.geometry import Window
from patchcleanser.data import load_dataset
from patchcleanser.data.boxes import read_boxes
from patchcleanser.data.catalog import boxed_images, object_shares
from patchcleanser.data.torchvision_sets import square_around
from patchcleanser.errors import DataError

XML = """<annotation><filename>x</filename><size><width>{width}</width><height>{height}</height><depth>3</depth></size>
{objects}</annotation>"""
OBJECT = """<object><name>{name}</name><bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>
</object>"""


def write_boxes(path: Path, size: tuple[int, int], objects: list[tuple[str, tuple[int, int, int, int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    elements = "".join(OBJECT.format(*corners, name=name) for name, corners in objects)
    path.write_text(XML.format(height=size[0], width=size[1], objects=elements))


def test_boxes_that_overlap_count_once_and_are_clipped_to_the_picture(tmp_path: Path) -> None:
    write_boxes(tmp_path / "a.xml", (10, 20), [("n1", (0, 0, 10, 10)), ("n1", (5, 0, 15, 10)), ("n1", (-5, -5, 1, 99))])
    boxes = read_boxes(tmp_path / "a.xml")
    assert boxes.share == pytest.approx(0.75)
    assert boxes.windows[2] == Window(0, 0, 10, 1)
    write_boxes(tmp_path / "none.xml", (10, 20), [])
    assert read_boxes(tmp_path / "none.xml").share == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<annotation>", "is not a box file in the layout of Pascal VOC"),
        ("<annotation></annotation>", "it has no size/height"),
        (XML.format(height=4, width=4, objects="<object><name>a</name></object>"), "it has no bndbox/xmin"),
        (XML.format(height=4, width="wide", objects=""), "is not a box file"),
        (XML.format(height=0, width=4, objects=""), "says the picture has 0×4 px"),
    ],
)
def test_damaged_box_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(DataError, match=rf"a\.xml.*{words}|{words}"):
        read_boxes(tmp_path / "a.xml")


@pytest.mark.parametrize("place", ["bbox/val", "Annotations/CLS-LOC/val"])
def test_imagenet_s_box_files_are_found_by_the_image_s_name_however_it_is_stored(tmp_path: Path, place: str) -> None:
    write_boxes(tmp_path / place / "ILSVRC2012_val_00000293.xml", (100, 100), [("n01440764", (0, 0, 50, 50))])
    ids = ["n01440764/ILSVRC2012_val_00000293.JPEG", "val-0.parquet:7:ILSVRC2012_val_00000293.JPEG", "other.JPEG"]
    assert object_shares("imagenet", ids, tmp_path) == {ids[0]: 0.25, ids[1]: 0.25}
    assert list(boxed_images("imagenet", ids, tmp_path)) == [0, 1]


def test_boxes_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ILSVRC2012_bbox_val_v3\.tgz from https://image-net"):
        object_shares("imagenet", ["a"], tmp_path)
    with pytest.raises(DataError, match=r"there is no tiny-imagenet-200/val/val_annotations\.txt"):
        object_shares("tiny-imagenet", ["a"], tmp_path)
    with pytest.raises(DataError, match="cifar10 has no boxes; imagenet and tiny-imagenet have"):
        object_shares("cifar10", ["a"], tmp_path)


def tiny_imagenet(root: Path, lines: str) -> None:
    val = root / "tiny-imagenet-200" / "val"
    (val / "images").mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (64, 64), (100 * number, 0, 0)).save(val / "images" / f"val_{number}.JPEG")
    (val / "val_annotations.txt").write_text(lines)
    train = root / "tiny-imagenet-200" / "train" / "n02123394" / "images"
    train.mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(train / "n02123394_0.JPEG")


def test_tiny_imagenet_has_imagenet_s_names_and_boxes(tmp_path: Path) -> None:
    tiny_imagenet(tmp_path, "val_0.JPEG\tn02123394\t0\t0\t31\t63\nval_1.JPEG\tn01443537\t0\t0\t63\t63\n")
    val = load_dataset("tiny-imagenet", split="val", root=tmp_path)
    assert val.classes == ("goldfish", "Persian cat")
    assert val.labels is not None
    assert val.labels.tolist() == [1, 0]
    assert val.image(1)[0, 0, 0] == pytest.approx(100 / 255, abs=0.02)
    ids = [val.id(index) for index in range(2)]
    assert object_shares("tiny-imagenet", ids, tmp_path) == {"val_0.JPEG": 0.5, "val_1.JPEG": 1.0}
    train = load_dataset("tiny-imagenet", split="train", root=tmp_path)
    assert train.classes == ("Persian cat",)


@pytest.mark.parametrize("line", ["val_0.JPEG n02123394 0 0 31", "val_0.JPEG n02123394 a 0 31 31", "x"])
def test_a_damaged_list_of_tiny_imagenet_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    tiny_imagenet(tmp_path, f"val_1.JPEG\tn01443537\t0\t0\t63\t63\n{line}\n")
    with pytest.raises(DataError, match=r"line 2 of .*val_annotations\.txt is"):
        load_dataset("tiny-imagenet", split="val", root=tmp_path)


def test_a_class_that_imagenet_has_not_is_refused(tmp_path: Path) -> None:
    tiny_imagenet(tmp_path, "val_1.JPEG\tn00000001\t0\t0\t63\t63\n")
    with pytest.raises(DataError, match="names the class n00000001, which is none of ImageNet's"):
        load_dataset("tiny-imagenet", split="val", root=tmp_path)
    (tmp_path / "tiny-imagenet-200" / "train" / "n02123394").rename(tmp_path / "tiny-imagenet-200" / "train" / "cat")
    with pytest.raises(DataError, match="lies in class folders n01440764 to n15075141, got cat"):
        load_dataset("tiny-imagenet", split="train", root=tmp_path)


def house_numbers(root: Path) -> Path:
    """Number 2 with the digits 7 and 0 in red and green, and number 10 with one digit as high as the picture."""
    place = root / "images" / "test"
    place.mkdir(parents=True)
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[8:24, 10:18], pixels[8:24, 30:46] = (255, 0, 0), (0, 255, 0)
    Image.fromarray(pixels).save(place / "2.png")
    write_boxes(place / "2.xml", (40, 60), [("7", (10, 8, 18, 24)), ("10", (30, 8, 46, 24))])
    Image.new("RGB", (20, 12), (0, 0, 255)).save(place / "10.png")
    write_boxes(place / "10.xml", (12, 20), [("3", (2, 0, 8, 12))])
    return place


def test_digits_are_cut_as_squares_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    house_numbers(tmp_path)
    for _ in range(2):  # the second time from what was kept
        dataset = load_dataset("svhn", root=tmp_path)
        assert dataset.name == "svhn-digits-test"
        assert dataset.labels is not None
        assert dataset.labels.tolist() == [7, 0, 3]
        assert dataset.image(0).shape == (3, 32, 32)
    red = dataset.image(0)
    assert red[0, 16, 16] == 1  # the digit stands in the middle
    assert red[:, 16, 2].sum() == 0  # and what lies beside it is seen
    assert dataset.image(1)[1].min() == 1  # a square box is only resized
    assert (tmp_path / "images" / "test_digits.npz").is_file()


def test_digits_that_are_none_or_lack_their_picture_are_refused(tmp_path: Path) -> None:
    place = house_numbers(tmp_path)
    write_boxes(place / "10.xml", (12, 20), [("11", (2, 0, 8, 12))])
    with pytest.raises(DataError, match=r"names a digit '11'; digits are 1 to 9, and 10 for 0"):
        load_dataset("svhn", root=tmp_path)
    (place / "10.png").unlink()
    with pytest.raises(DataError, match=r"cannot read .*10\.png"):
        load_dataset("svhn", root=tmp_path)


def test_a_square_is_moved_inside_the_picture() -> None:
    assert square_around(Window(0, 55, 30, 5), (40, 60)) == Window(0, 30, 30, 30)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "flowers102"])
def test_a_known_dataset_may_lie_as_parquet_files(tmp_path: Path, name: str) -> None:
    from patchcleanser.data.catalog import SAMPLE

    (tmp_path / f"{name}-test1000-00000-of-00001.parquet").write_bytes(SAMPLE.read_bytes())
    assert load_dataset(name, root=tmp_path).fingerprint == _renamed_sample(tmp_path, name)


def _renamed_sample(root: Path, name: str) -> str:
    return load_dataset(f"parquet:{root}/{name}-test*.parquet").fingerprint
