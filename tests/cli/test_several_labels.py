"""Networks of several labels: trained by a command, taken as a start, and refused where one label is meant."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from patchcleanser import DoubleMasking, load_classifier
from patchcleanser.errors import ClassifierError, InputError
from patchcleanser.training.artifacts import write_model

from .conftest import Command

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
QUICK = ("--set", "batch=10", "--set", "epochs=1", "--set", "holdout=0.2", "--device", "cpu")


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Halves of two colours each, of three."""
    contents, lists = [], []
    for number in range(40):
        pair = sorted({number % 3, (number // 3) % 3})
        picture = Image.new("RGB", (32, 32), list(COLOURS.values())[pair[0]])
        picture.paste(list(COLOURS.values())[pair[-1]], (16, 0, 32, 32))
        file = io.BytesIO()
        picture.save(file, "PNG")
        contents.append({"bytes": file.getvalue()})
        lists.append(pair)
    table = pa.table({"image": contents, "labels": pa.array(lists, pa.list_(pa.int32()))})
    table = table.replace_schema_metadata({"class_names": json.dumps(list(COLOURS))})
    parquet.write_table(table, tmp_path / "halves.parquet")
    picture.save(tmp_path / "halves.png")
    return f"parquet:{tmp_path / 'halves.parquet'}"


@pytest.fixture
def trained(run: Command, data: str, tmp_path: Path) -> str:
    words = ("train", "--recipe", "multilabel", "--model", "zoo:tiny?classes=3", "--data", data, *QUICK)
    done = run(*words, "--out", str(tmp_path / "net"))
    assert done.code == 0, done.err
    assert "mean average precision, held out: " in done.out
    return f"trained:{tmp_path / 'net'}"


def test_the_card_says_that_a_network_is_multi_label_its_classes_and_threshold(trained: str) -> None:
    card = json.loads((Path(trained.removeprefix("trained:")) / "card.json").read_text())
    assert (card["task"], card["threshold"], card["classes"]) == ("multilabel", 0.0, ["red", "green", "blue"])
    assert card["recipe"]["loss"] == "binary"
    assert "mean average precision" in card["criterion"]
    for spec in (trained, f"mirror:{trained}", f"mean:{trained},mirror:{trained}"):
        classifier = load_classifier(spec, device="cpu")
        assert (classifier.threshold, classifier.names) == (0.0, ("red", "green", "blue"))
    assert load_classifier("zoo:tiny", device="cpu").threshold is None
    with pytest.raises(InputError, match="same number of classes"):
        load_classifier(f"mean:{trained},zoo:tiny", device="cpu")


def test_no_defense_of_one_label_takes_it(trained: str) -> None:
    for spec in (trained, f"mirror:{trained}"):
        with pytest.raises(ClassifierError, match="card says that it is multi-label, but DoubleMasking certifies one"):
            DoubleMasking(load_classifier(spec, device="cpu"), "2%")


@pytest.mark.parametrize(
    "words",
    [
        "certify --data sample --patch 5 --limit 2",
        "predict halves.png --patch 5",
        "attack --data sample --patch 5 --limit 2",
        "price --data sample --patch 5 --limit 2",
        "train --data sample --out out",
        "harden --images sample --out out",
    ],
)
def test_commands_of_one_label_refuse_it_in_one_sentence(trained: str, words: str, run: Command) -> None:
    command, *options = words.split()
    done = run(command, "--model", trained, "--device", "cpu", *options)
    assert done.code == 2
    assert "error: the network's card says that it is multi-label, but " in done.err
    assert "use it in certify --task multilabel" in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_it_is_no_teacher_of_one_label(trained: str, run: Command) -> None:
    words = ("train", "--model", "net:tiny?classes=10", "--data", "sample", *QUICK, "--out", "out")
    done = run(*words, "--teacher", trained, "--set", "teacher_weight=0.5")
    assert done.code == 2
    assert "multi-label, but a teacher here gives one label" in done.err


def test_it_is_a_start_for_other_classes_or_for_one_label(
    trained: str, data: str, run: Command, tmp_path: Path
) -> None:
    begun = load_classifier(f"{trained}?classes=10", device="cpu")
    assert (begun.threshold, begun.names) == (None, None)
    label = run("train", "--model", f"{trained}?classes=10", "--data", "sample", *QUICK, "--out", str(tmp_path / "a"))
    assert label.code == 0, label.err
    assert load_classifier(f"trained:{tmp_path / 'a'}", device="cpu").threshold is None
    part = ("--data", f"{data}?without=red")
    refused = run("train", "--recipe", "multilabel", "--model", trained, *part, *QUICK, "--out", str(tmp_path / "b"))
    assert (refused.code, "the network has 3 classes, the data has 2" in refused.err) == (2, True)
    two = ("--model", f"{trained}?classes=2", *part, "--out", str(tmp_path / "b"))
    assert run("train", "--recipe", "multilabel", *two, *QUICK).code == 0
    assert load_classifier(f"trained:{tmp_path / 'b'}", device="cpu").names == ("green", "blue")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--recipe", "multilabel", "--data", "sample"), "images with several labels are coco:PATH"),
        (("--recipe", "paper"), "several labels for each image; train with --recipe multilabel"),
    ],
)
def test_a_recipe_takes_only_its_own_kind_of_data(
    options: tuple[str, ...], words: str, data: str, run: Command
) -> None:
    done = run("train", "--model", "net:tiny?classes=3", "--data", data, *options, *QUICK, "--out", "out")
    assert done.code == 2
    assert words in done.err


def test_a_card_without_a_threshold_is_refused(tmp_path: Path) -> None:
    network = load_classifier("net:tiny?classes=3", device="cpu")
    card = {"model": "net:tiny?classes=3", "preprocessing": {}, "task": "multilabel"}
    write_model(network.module, tmp_path, card)  # type: ignore[attr-defined]
    with pytest.raises(ClassifierError, match="is not a model card: 'threshold'"):
        load_classifier(f"trained:{tmp_path}", device="cpu")
