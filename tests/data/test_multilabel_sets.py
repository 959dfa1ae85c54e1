"""Images with several labels: four layouts, unknown classes, and a network's names for them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from patchcleanser.data import load_dataset
from patchcleanser.data.multilabel_sets import MultiLabelDataset, load_multilabel
from patchcleanser.errors import DataError, InputError, TrustError


def picture(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 20), (200, 30, 30)).save(path)
    return path.read_bytes()


def coco(root: Path) -> str:
    for name in ("a.png", "b.png", "c.png"):
        picture(root / "val2017" / name)
    box = {"bbox": [10, 5, 20, 10]}
    content = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(["a.png", "b.png", "c.png"])],
        "categories": [{"id": 1, "name": "person"}, {"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {"image_id": 0, "category_id": 18, **box},
            {"image_id": 0, "category_id": 18, **box},
            {"image_id": 0, "category_id": 1, **box},
            {"image_id": 1, "category_id": 1, **box, "iscrowd": 1},
        ],
    }
    path = root / "annotations" / "instances_val2017.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return f"coco:{path}"


def voc(root: Path) -> str:
    for number, names in enumerate([("aeroplane", "person"), ("sofa",)]):
        picture(root / "JPEGImages" / f"{number}.jpg")
        xml = root / "Annotations" / f"{number}.xml"
        xml.parent.mkdir(parents=True, exist_ok=True)
        corners = "<bndbox><xmin>10</xmin><ymin>5</ymin><xmax>30</xmax><ymax>15</ymax></bndbox>"
        entries = "".join(f"<object><name>{name}</name>{corners}</object>" for name in names)
        xml.write_text(f"<annotation><size><width>40</width><height>20</height></size>{entries}</annotation>")
    listed = root / "ImageSets" / "Main" / "test.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("0\n")
    return f"voc:{root}"


def yolo(root: Path) -> str:
    labels = root / "labels" / "train"
    labels.mkdir(parents=True)
    for name, lines in {"a": ["9 17 0.5 0.5 0.5 0.5", "9 1 0.5 0.5 0.5 0.5"], "b": []}.items():
        picture(root / "images" / "train" / f"{name}.png")
        (labels / f"{name}.txt").write_text("\n".join(lines))
    return f"yolo:{root}/images/train"


def parquet_file(path: Path, labels: object, classes: object = ("ant", "bee"), **columns: object) -> str:
    content = picture(path.with_suffix(".png"))
    table = pa.table({"image": [{"bytes": content, "path": "a.png"}] * 3, "labels": labels, **columns})
    parquet.write_table(table.replace_schema_metadata({"class_names": json.dumps(classes)}), path)
    return f"parquet:{path}"


@pytest.mark.parametrize(
    ("layout", "classes", "targets"),
    [
        (coco, ("dog", "person"), [[1, 1], [0, 1], [0, 0]]),  # a crowd of persons shows persons
        (voc, ("aeroplane", "person", "sofa"), [[1, 1, 0], [0, 0, 1]]),
        (yolo, ("cat", "person"), [[1, 1], [0, 0]]),
    ],
)
def test_an_image_shows_the_classes_of_its_boxes(layout, classes, targets, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    address = layout(tmp_path)
    dataset = load_multilabel(address)
    assert (dataset.classes, dataset.targets.astype(int).tolist()) == (classes, targets)
    assert dataset.origin == {"data": address}
    image, row = dataset[-1]
    assert image.shape == (3, 20, 40)
    assert row.tolist() == dataset.targets[-1].tolist()


def test_parquet_files_hold_a_list_of_class_numbers_for_each_image(tmp_path: Path) -> None:
    address = parquet_file(tmp_path / "x.parquet", [[1, 0], [], [1]], ["ant", "bee", "cat"])
    dataset = load_multilabel(address)
    assert dataset.targets.tolist() == [[True, True, False], [False] * 3, [False, True, False]]
    assert dataset.classes == ("ant", "bee", "cat")  # a class of no image stays
    assert dataset.id(2) == "x.parquet:2:a.png"
    assert dataset.image(2).shape == (3, 20, 40)
    assert repr(dataset) == "<MultiLabelDataset x.parquet: 3 images, 3 classes, 1.00 labels an image>"


def test_class_names_of_lists_are_read_where_hugging_face_puts_them(tmp_path: Path) -> None:
    parquet_file(tmp_path / "x.parquet", [[0], [], [1]])
    table = parquet.read_table(tmp_path / "x.parquet")
    feature = {"feature": {"_type": "ClassLabel", "names": ["n", "y"]}, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"labels": feature}}})}
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "x.parquet")
    assert load_multilabel(f"parquet:{tmp_path}").classes == ("n", "y")


@pytest.mark.parametrize(
    ("labels", "classes", "words"),
    [
        ([[0], [2], []], ["ant", "bee"], r"row 1 of x.parquet has the labels \[2\]; they go from 0 to 1"),
        ([[0], [-1], []], ["ant", "bee"], r"row 1 of x.parquet has the labels \[-1\]"),
        ([[0], [None], []], ["ant", "bee"], "row 1 of x.parquet has the labels"),
        ([[0], None, []], ["ant", "bee"], "row 1 of x.parquet has the labels None"),
        ([[0], [1], []], [], "names no classes"),
        ([0, 1, 1], ["ant", "bee"], "has int64 in 'labels'; wanted are lists of whole numbers"),
        ([["a"], [], []], ["ant", "bee"], "wanted are lists of whole numbers"),
    ],
)
def test_damaged_lists_are_an_error_with_their_row(labels, classes, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    address = parquet_file(tmp_path / "x.parquet", labels, classes)
    with pytest.raises(DataError, match=words):
        load_multilabel(address)


def test_a_parquet_file_without_labels_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": [picture(tmp_path / "a.png")]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has no labels; wanted are lists"):
        load_multilabel(f"parquet:{tmp_path}")


def test_classes_that_are_left_out_have_no_column(tmp_path: Path) -> None:
    address = voc(tmp_path)
    dataset = load_multilabel(f"{address}?without=person, sofa")
    assert (dataset.classes, dataset.targets.tolist()) == (("aeroplane",), [[True], [False]])
    part = load_multilabel(f"{address}?test&without=person")
    assert (part.classes, part.origin) == (("aeroplane",), {"data": f"{address}?test&without=person"})
    lists = parquet_file(tmp_path / "x.parquet", [[0], [1], []])
    assert load_multilabel(f"{lists}?without=ant").targets.tolist() == [[False], [True], [False]]
    with pytest.raises(DataError, match=r"no class 'persn'.*did you mean person"):
        load_multilabel(f"{address}?without=persn")
    with pytest.raises(DataError, match=r"no class of x\.parquet is left"):
        load_multilabel(f"{lists}?without=ant,bee")


def test_classes_are_matched_with_a_networks_outputs_by_name(tmp_path: Path) -> None:
    dataset = load_multilabel(voc(tmp_path))
    part, outputs = dataset.shared_with(["dog", "couch", "zebra", "airplane"])
    assert (part.classes, outputs.tolist()) == (("couch", "airplane"), [1, 3])
    assert part.targets.tolist() == [[False, True], [True, False]]
    with pytest.raises(DataError, match="none of the classes of"):
        dataset.shared_with(["zebra"])


def test_a_choice_of_images_has_their_own_targets_and_another_fingerprint(tmp_path: Path) -> None:
    address = parquet_file(tmp_path / "x.parquet", [[0], [1], [0, 1]])
    dataset = load_multilabel(address)
    last = dataset.pick([2, 0])
    assert (last.targets.tolist(), last.id(0)) == ([[True, True], [True, False]], dataset.id(2))
    assert dataset.chosen(2, subset="first").targets.tolist() == [[True, False], [False, True]]
    assert dataset.chosen(None).fingerprint == dataset.fingerprint == load_multilabel(address).fingerprint
    changed = MultiLabelDataset(dataset.images, ~dataset.targets, dataset.classes)
    assert len({dataset.fingerprint, last.fingerprint, changed.fingerprint}) == 3


def test_targets_of_another_shape_are_refused() -> None:
    images = load_dataset("sample")
    with pytest.raises(DataError, match=r"300 images and 1 class, but targets bool \[300, 2\]"):
        MultiLabelDataset(images, np.zeros((300, 2), dtype=bool), ["ant"])


@pytest.mark.parametrize("address", ["coco:", "parquett:x", "photos"])
def test_an_address_of_no_layout_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_multilabel(address)


def test_an_address_elsewhere_that_a_file_names_needs_trust() -> None:
    with pytest.raises(TrustError, match="elsewhere"):
        load_multilabel("parquet:https://host/x.parquet", named_by="manifest.json")


def test_a_classifier_of_one_label_is_not_given_lists(tmp_path: Path) -> None:
    address = parquet_file(tmp_path / "x.parquet", [[0], [1], []])
    with pytest.raises(DataError, match="several labels for each image; train with --recipe multilabel"):
        load_dataset(address)
