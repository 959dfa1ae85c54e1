"""Images with objects: three layouts as people have them, and what is wrong with a damaged one."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from patchcleanser.core.detections import Detections
from patchcleanser.data import load_dataset
from patchcleanser.data.object_sets import ObjectDataset, load_objects
from patchcleanser.errors import DataError, InputError

BOX = [10.0, 5.0, 30.0, 15.0]


def picture(path: Path, size: tuple[int, int] = (40, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 30)).save(path)


def coco(root: Path, pictures: str = "val2017", **changes: object) -> Path:
    for name in ("b.png", "a.png"):
        picture(root / pictures / name)
    content = {
        "images": [{"id": 2, "file_name": "b.png"}, {"id": 1, "file_name": "a.png"}],
        "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {"image_id": 2, "category_id": 18, "bbox": [10, 5, 20, 10], "iscrowd": 0},
            {"image_id": 2, "category_id": 17, "bbox": [0, 0, 5, 5], "iscrowd": 1},
            {"image_id": 1, "category_id": 17, "bbox": [0, 0, 0, 5]},
        ],
        **changes,
    }
    path = root / "annotations" / "instances_val2017.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("pictures", ["val2017", "images/val2017", "annotations", "elsewhere"])
def test_coco_annotations_are_read_wherever_their_pictures_lie(pictures: str, tmp_path: Path) -> None:
    path = coco(tmp_path, pictures)
    dataset = load_objects(f"coco:{path}", root=tmp_path / pictures if pictures == "elsewhere" else None)
    assert [dataset.id(index) for index in range(2)] == ["a.png", "b.png"]
    assert dataset.image(1).shape == (3, 20, 40)
    assert dataset.objects[1].boxes.tolist() == [BOX]  # without the crowd, and without boxes of no width
    assert [dataset.classes[label] for label in dataset.objects[1].classes] == ["dog"]
    assert len(dataset.objects[0]) == 0


def test_coco_pictures_that_are_not_there_are_an_error_with_the_folders_tried(tmp_path: Path) -> None:
    path = coco(tmp_path, "elsewhere")
    with pytest.raises(DataError, match="give their folder by --root"):
        load_objects(f"coco:{path}")


@pytest.mark.parametrize(
    "changes",
    [{"annotations": [{"image_id": 7}]}, {"images": 3}, {"categories": [{"id": "x", "name": "cat"}]}],
)
def test_a_damaged_coco_file_is_an_error_that_names_it(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not in the layout of COCO"):
        load_objects(f"coco:{coco(tmp_path, **changes)}")


def test_a_coco_file_may_not_name_pictures_outside_its_folder(tmp_path: Path) -> None:
    picture(tmp_path / "secret.png")
    path = coco(tmp_path, images=[{"id": 1, "file_name": "../secret.png"}, {"id": 2, "file_name": "b.png"}])
    with pytest.raises(DataError, match="lies outside"):
        load_objects(f"coco:{path}")


def voc(root: Path) -> Path:
    for name in ("000001", "000002"):
        picture(root / "JPEGImages" / f"{name}.jpg")
        xml = root / "Annotations" / f"{name}.xml"
        xml.parent.mkdir(parents=True, exist_ok=True)
        corners = "<xmin>10</xmin><ymin>5</ymin><xmax>30</xmax><ymax>15</ymax>"
        entry = f"<object><name>tvmonitor</name><bndbox>{corners}</bndbox></object>"
        xml.write_text(f"<annotation><size><width>40</width><height>20</height></size>{entry}</annotation>")
    listed = root / "ImageSets" / "Main" / "test.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("000002\n")
    return root


def test_pascal_voc_is_read_complete_or_by_its_lists(tmp_path: Path) -> None:
    root = voc(tmp_path / "VOC2007")
    assert len(load_objects(f"voc:{root}")) == 2
    dataset = load_objects(f"voc:{root}?test")
    assert (len(dataset), dataset.id(0), dataset.objects[0].boxes.tolist()) == (1, "000002.jpg", [BOX])
    with pytest.raises(DataError, match="cannot read"):
        load_objects(f"voc:{root}?val")


@pytest.mark.parametrize(("line", "name"), [("15 0.5 0.5 0.5 0.5", "cat"), ("9 17 0.5 0.5 0.5 0.5", "cat")])
def test_yolo_labels_have_the_classes_of_five_or_of_six_columns(line: str, name: str, tmp_path: Path) -> None:
    picture(tmp_path / "images" / "train" / "a.png")
    picture(tmp_path / "images" / "train" / "b.png")
    labels = tmp_path / "labels" / "train" / "a.txt"
    labels.parent.mkdir(parents=True)
    labels.write_text(line + "\n")
    dataset = load_objects(f"yolo:{tmp_path}/images/train")
    assert dataset.objects[0].boxes.tolist() == [BOX]
    assert dataset.classes == (name,)
    assert len(dataset.objects[1]) == 0  # no label file: no objects


def test_yolo_takes_the_root_of_its_folders_or_says_which_to_name(tmp_path: Path) -> None:
    root = tmp_path / "images" / "photos"  # a folder above has the name of the pictures', too
    for place in ("images/val", "labels/val"):
        (root / place).mkdir(parents=True)
    picture(root / "images" / "val" / "a.png")
    (root / "labels" / "val" / "a.txt").write_text("15 0.5 0.5 0.5 0.5")
    for named in (root, root / "images", root / "images" / "val"):
        assert load_objects(f"yolo:{named}").objects[0].boxes.tolist() == [BOX]
    picture(root / "images" / "train" / "b.png")
    with pytest.raises(DataError, match=r"has pictures in .*train and .*val; name one of these folders"):
        load_objects(f"yolo:{root}")
    with pytest.raises(DataError, match="in its folder images or below that; name the folder of the pictures"):
        load_objects(f"yolo:{tmp_path}")
    with pytest.raises(DataError, match=r"a\.txt is a file, not a folder"):
        load_objects(f"yolo:{root}/labels/val/a.txt")


def test_yolo_shares_are_those_of_the_picture_turned_upright(tmp_path: Path) -> None:
    path = tmp_path / "images" / "train" / "a.jpg"
    path.parent.mkdir(parents=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (80, 40)).save(path, exif=exif)
    labels = tmp_path / "labels" / "train" / "a.txt"
    labels.parent.mkdir(parents=True)
    labels.write_text("15 0.5 0.25 0.5 0.5")
    dataset = load_objects(f"yolo:{tmp_path}/images/train")
    assert dataset.image(0).shape == (3, 80, 40)
    assert dataset.objects[0].boxes.tolist() == [[10, 0, 30, 40]]


@pytest.mark.parametrize("line", ["-1 0.5 0.5 0.5 0.5", "99 0.5 0.5 0.5 0.5", "1 2 3", "cat 0.5 0.5 0.5 0.5"])
def test_a_damaged_label_file_is_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    picture(tmp_path / "images" / "train" / "a.png")
    labels = tmp_path / "labels" / "train" / "a.txt"
    labels.parent.mkdir(parents=True)
    labels.write_text(line)
    with pytest.raises(DataError, match=r"a\.txt is not in YOLO's layout"):
        load_objects(f"yolo:{tmp_path}/images/train")


def test_objects_take_a_detectors_numbers_by_name_and_others_are_left_out(tmp_path: Path) -> None:
    dataset = load_objects(f"voc:{voc(tmp_path)}")
    renumbered, missing = dataset.renumbered(["person", "tv"])
    assert (renumbered.objects[0].classes.tolist(), missing, renumbered.classes) == ([1], [], ("person", "tv"))
    with pytest.raises(DataError, match="none of the classes"):
        dataset.renumbered(["person", "zebra"])


def test_a_choice_of_images_has_their_own_objects_and_another_fingerprint(tmp_path: Path) -> None:
    dataset = load_objects(f"coco:{coco(tmp_path)}")
    last = dataset.chosen(1, subset="first")
    assert (len(last), last.objects[0].boxes.tolist()) == (1, dataset.objects[0].boxes.tolist())
    assert last.fingerprint != dataset.fingerprint
    moved = ObjectDataset(
        dataset.images, [Detections(o.boxes + 1, o.classes, np.ones(len(o))) for o in dataset.objects], dataset.classes
    )
    assert moved.fingerprint != dataset.fingerprint


@pytest.mark.parametrize("address", ["coco:", "kitti:folder", "photos"])
def test_an_address_of_no_layout_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_objects(address)


def test_a_classifier_is_not_given_objects_for_labels() -> None:
    with pytest.raises(DataError, match="--task detect"):
        load_dataset("coco:annotations.json")
