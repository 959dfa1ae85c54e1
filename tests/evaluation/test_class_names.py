"""Classes of data and model: the same by name, by number, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchcleanser import CallableClassifier
from patchcleanser.data import ArrayDataset
from patchcleanser.errors import DataError
from patchcleanser.evaluation.class_names import match_labels


def model(*names: str) -> CallableClassifier:
    classifier = CallableClassifier(lambda x: x, classes=len(names), fingerprint="none")
    classifier.names = names
    return classifier


def data(*names: str) -> ArrayDataset:
    number = len(names)
    return ArrayDataset("photos", np.zeros((number, 2, 2, 3), np.uint8), np.arange(number), names)


def test_names_that_differ_in_case_only_are_kept_apart() -> None:
    matched, note = match_labels(data("cardigan", "Pembroke"), model("Pembroke", "Cardigan", "cardigan"))
    assert matched.labels is not None
    assert matched.labels.tolist() == [2, 0]
    assert note == "classes are matched by name: cardigan is 2, Pembroke is 0"
    with pytest.raises(DataError, match="the class 'CARDIGAN' of photos is none of the classifier's"):
        match_labels(data("CARDIGAN"), model("Cardigan", "cardigan"))


def test_case_and_underscores_do_not_matter_where_a_name_is_the_only_one() -> None:
    matched, _ = match_labels(data("sea_lion"), model("cat", "Sea Lion"))
    assert matched.labels is not None
    assert matched.labels.tolist() == [1]
    assert matched.fingerprint != data("sea_lion").fingerprint


def nameless(classes: int) -> CallableClassifier:
    return CallableClassifier(lambda x: x, classes=classes, fingerprint="none")


def test_a_classifier_of_1000_nameless_classes_is_taken_for_imagenets_where_the_data_is_part_of_imagenet() -> None:
    matched, note = match_labels(data("golf ball", "tench"), nameless(1000))
    assert matched.labels is not None
    assert matched.labels.tolist() == [574, 0]
    assert note is not None
    assert "taken for ImageNet's" in note


@pytest.mark.parametrize(("names", "classes"), [(("golf ball", "my cat"), 1000), (("golf ball", "tench"), 999)])
def test_others_go_by_number_and_say_so(names: tuple[str, ...], classes: int) -> None:
    matched, note = match_labels(data(*names), nameless(classes))
    assert matched.labels is not None
    assert matched.labels.tolist() == [0, 1]
    assert note is not None
    assert "label 0 is taken for class 0" in note
    assert match_labels(data("golf ball", "tench"), nameless(1000), "number")[0].labels.tolist() == [0, 1]  # type: ignore[union-attr]


def test_a_classifier_that_does_not_say_how_many_classes_it_has_is_asked_about_an_image() -> None:
    shy = CallableClassifier(lambda x: torch.zeros(len(x), 1000), fingerprint="none")
    assert shy.classes is None
    matched, _ = match_labels(data("golf ball", "tench"), shy)
    assert matched.labels is not None
    assert matched.labels.tolist() == [574, 0]


def test_data_of_fewer_classes_than_a_nameless_classifier_gives_scores_are_noted() -> None:
    shy = CallableClassifier(lambda x: torch.zeros(len(x), 10), fingerprint="none")
    _, note = match_labels(data("cat", "dog"), shy)
    assert note == "the classifier has 10 classes and photos 2; label 0 is taken for class 0, and so on"
