"""Multi-label masking: what it takes, what it refuses, and how many inputs it classifies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import CallableClassifier, ChallengerMasking, DoubleMasking, Threat, TorchClassifier
from patchcleanser.core.label_table import UNMASKED
from patchcleanser.core.multilabel import certify_classes
from patchcleanser.core.results import Case
from patchcleanser.defenses.multilabel_masking import MultiLabelMasking
from patchcleanser.errors import CoverError, InputError, LabelError, OutputError

THREAT = Threat.square(2)


def quarters(images: Tensor) -> Tensor:
    """A score for each quarter of the image: how much brighter than 0.3 it is."""
    means = nn.functional.avg_pool2d(images.mean(1, keepdim=True), 8)
    return means.flatten(1) - 0.3


def model() -> CallableClassifier:
    return CallableClassifier(quarters, array="torch")


def image_of(*bright: int) -> Tensor:
    image = torch.zeros(3, 16, 16)
    for number in bright:
        row, column = divmod(number, 2)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 1.0
    return image


def test_the_classes_that_are_there_are_answered_and_certified() -> None:
    defense = MultiLabelMasking(model(), THREAT, masks=6)
    images = torch.stack([image_of(0, 3), image_of(), image_of(0, 1, 2, 3)])
    assert [v.present for v in defense.predict(images)] == [(0, 3), (), (0, 1, 2, 3)]
    certificates = defense.certify(images, [[0, 3], [], [0, 1, 2, 3]])
    assert [c.certified for c in certificates] == [(0, 3), (), (0, 1, 2, 3)]
    assert [(c.true_positives, c.false_positives, c.false_negatives) for c in certificates] == [
        (2, 0, 0),
        (0, 0, 0),
        (4, 0, 0),
    ]
    assert {c.failing_placement for c in certificates} == {None}


def test_all_classes_share_the_passes_of_one_label() -> None:
    defense = MultiLabelMasking(model(), Threat.square(1), masks=6)
    (certificate,), (verdict,) = defense.certify(image_of(0)[None], [[0]]), defense.predict(image_of(0)[None])
    assert certificate.classifications == 666
    assert (verdict.classifications, set(verdict.cases)) == (36, {Case.AGREED})


def test_only_rows_of_masks_that_disagree_for_some_class_are_computed() -> None:
    defense = MultiLabelMasking(model(), Threat.square(1), masks=6, threshold=0.66)
    (verdict,) = defense.predict(image_of(0)[None])
    (examined,) = defense.examine(image_of(0)[None], [[0]])
    ones = examined.table.decisions[:36]
    rows = int((ones != (2 * ones.sum(0) >= 36)).any(1).sum())
    assert 0 < rows < 36
    assert verdict.classifications == 36 + 35 * rows - rows * (rows - 1) // 2
    assert (verdict.present, verdict.cases) == (examined.verdict.present, examined.verdict.cases)


def test_the_answer_is_that_of_the_defended_scores() -> None:
    defense = MultiLabelMasking(model(), THREAT, masks=4, threshold=[0.45, 0.5, 0.55, 0.6])
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.3, 1.2, 6).view(
        -1, 1, 1, 1
    )
    for examined in defense.examine(images.clamp(0, 1), [[0]] * 6):
        present = np.flatnonzero(examined.bounds.defended >= defense.score_thresholds)
        assert examined.verdict.present == tuple(present)


def test_bools_and_numbers_name_the_same_classes() -> None:
    defense = MultiLabelMasking(model(), THREAT, masks=4)
    (by_number,) = defense.certify(image_of(0, 2)[None], [[0, 2]])
    for truth in (np.array([[True, False, True, False]]), torch.tensor([[True, False, True, False]])):
        assert defense.certify(image_of(0, 2)[None], truth) == [by_number]


def test_probabilities_and_logits_give_the_same_answers() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8)).eval()
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    logits = MultiLabelMasking(TorchClassifier(network), THREAT, masks=3)
    sigmoid = TorchClassifier(nn.Sequential(*network, nn.Sigmoid()).eval())
    shares = MultiLabelMasking(sigmoid, THREAT, masks=3)
    assert (logits.scores, shares.scores) == ("logits", "probabilities")
    assert [v.present for v in logits.predict(images)] == [v.present for v in shares.predict(images)]
    assert 0 < sum(len(v.present) for v in logits.predict(images)) < 32


def test_classes_that_do_not_count_are_left_out() -> None:
    full, part = (MultiLabelMasking(model(), THREAT, masks=4, classes=c) for c in (None, [3, 1]))
    images = torch.stack([image_of(0, 3), image_of(1, 2)])
    assert [v.present for v in full.predict(images)] == [(0, 3), (1, 2)]
    assert [v.present for v in part.predict(images)] == [(0,), (1,)]  # by their places in the list
    assert part.as_module()(images).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    (certificate,) = part.certify(images[:1], [[0]])
    assert (certificate.present, certificate.certified) == ((0,), (0,))
    with pytest.raises(InputError, match="classes are distinct numbers from 0, got"):
        MultiLabelMasking(model(), THREAT, classes=[1, 1])
    with pytest.raises(InputError, match="has 4 classes, got class 4"):
        MultiLabelMasking(model(), THREAT, masks=2, classes=[4]).predict(images)


def test_each_class_may_have_a_threshold_of_its_own() -> None:
    defense = MultiLabelMasking(model(), THREAT, masks=4, threshold=[0.9, 0.5, 0.5, 0.5])
    assert [v.present for v in defense.predict(image_of(0, 1)[None])] == [(1,)]


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_a_score_at_its_threshold_is_present_in_answers_and_in_certificates(kind: Any) -> None:
    at = np.float32(0.0 if kind == "logits" else 0.5)
    scores = torch.tensor([at, np.nextafter(at, np.float32(-1)), np.nextafter(at, np.float32(1))])
    constant = CallableClassifier(lambda x: scores.expand(len(x), 3), array="torch")
    defense = MultiLabelMasking(constant, Threat.square(2), masks=3, scores=kind)
    image = torch.zeros(1, 3, 8, 8)
    assert defense.predict(image)[0].present == (0, 2)
    for truth in ([0, 2], [1]):
        (examined,) = defense.examine(image, [truth])
        certificate, missed = examined.certificate, [c for c in (0, 2) if c not in truth]
        assert examined.verdict.present == (0, 2)
        assert certificate.certified == tuple(c for c in (0, 2) if c in truth)
        assert certificate.possible == tuple(missed)
        for counts in examined.counts(defense.score_thresholds[None]).values():
            assert (counts.true[0], counts.false[0]) == (2 - len(missed), len(missed))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_end_certify_and_no_prediction(value: float) -> None:
    def corrupt(images: Tensor) -> Tensor:
        return torch.where(images[:, :1, 0, 0] > 0.9, value, quarters(images))

    defense = MultiLabelMasking(CallableClassifier(corrupt, array="torch"), Threat.square(2), masks=3)
    image = torch.zeros(1, 3, 16, 16)
    image[..., 0, 0] = 1.0
    assert len(defense.predict(image)) == 1
    with pytest.raises(OutputError, match="NaN or infinite"):
        defense.certify(image, np.zeros((1, 4), dtype=bool))


def test_a_table_whose_masks_do_not_cover_the_threat_is_refused() -> None:
    defense = MultiLabelMasking(model(), Threat.square(2), masks=4)
    (examined,) = defense.examine(image_of(0)[None], [[0]])
    with pytest.raises(CoverError, match="does not cover"):
        certify_classes(examined.table, Threat.square(12), examined.truth)


def test_the_map_counts_weak_classes_where_masks_hide_what_is_needed() -> None:
    defense = MultiLabelMasking(model(), THREAT, masks=6, threshold=0.63)  # a bright quarter scores 0.7, or 0.67 of 1
    (certificate,) = defense.certify(image_of(0)[None], [[0]], maps=True)
    counts = (certificate.weak or {})[2, 2]
    assert counts.shape == (15, 15)
    assert counts[0, 0] == 1
    assert counts[13, 13] == counts.min()
    assert certificate.failing_placement is not None


def test_the_module_has_ones_for_all_classes_that_are_present() -> None:
    module = MultiLabelMasking(model(), THREAT, masks=4).as_module()
    assert module(torch.stack([image_of(0, 3), image_of()])).tolist() == [[1, 0, 0, 1], [0, 0, 0, 0]]


def test_a_batch_of_images_and_single_ones_have_the_same_scores() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 5)).eval()
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    defense = MultiLabelMasking(TorchClassifier(network), THREAT, masks=3)
    together = defense.examine(images, [[0]] * 5)
    for image, examined in zip(images, together, strict=True):
        (alone,) = defense.examine(image[None], [[0]])
        assert np.array_equal(alone.table.scores[:UNMASKED], examined.table.scores[:UNMASKED])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "above 0 and below 1, got 0.0"),
        ({"threshold": [0.5, 1.0]}, "above 0 and below 1"),
        ({"scores": "log"}, "'logits' or 'probabilities', got 'log'"),
        ({"precision": "fast"}, "use precision='exact', got 'fast'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MultiLabelMasking(model(), THREAT, **options)


def test_thresholds_that_are_not_one_for_each_class_are_refused() -> None:
    known = CallableClassifier(quarters, array="torch", classes=4)
    with pytest.raises(InputError, match="one for each of 4, got 3"):
        MultiLabelMasking(known, THREAT, threshold=[0.5] * 3)
    with pytest.raises(InputError, match="there are 4 classes and there are 3 thresholds"):
        MultiLabelMasking(model(), THREAT, threshold=[0.5] * 3, masks=2).certify(image_of(0)[None], [[0]])
    with pytest.raises(InputError, match="there are 4 classes and there are 3 thresholds"):
        MultiLabelMasking(model(), THREAT, threshold=[0.5] * 3, masks=2).predict(image_of(0)[None])


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ([[4]], "from 0 to 3, got .4."),
        ([[-1]], "from 0 to 3"),
        ([[True] * 3], "there are 4 classes, and the true ones are given for 3"),
        ([0], "a list of class numbers or of bools, got 0"),
        ([["dog"]], "a list of class numbers or of bools"),
        ([[0], [1]], "true classes of 2 images for 1 image"),
    ],
)
def test_true_classes_that_cannot_be_are_refused(truth: Any, message: str) -> None:
    with pytest.raises(LabelError, match=message):
        MultiLabelMasking(model(), THREAT, masks=2).certify(image_of(0)[None], truth)


def test_scores_that_are_no_probabilities_are_refused_where_they_should_be() -> None:
    with pytest.raises(OutputError, match="use scores='logits'"):
        MultiLabelMasking(model(), THREAT, masks=2, scores="probabilities").certify(image_of(0)[None], [[0]])
    logarithms = CallableClassifier(quarters, array="torch", outputs="probabilities")
    with pytest.raises(InputError, match="takes logarithms; leave it out"):
        MultiLabelMasking(logarithms, THREAT)
    sigmoid = TorchClassifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Sigmoid()).eval())
    with pytest.raises(InputError, match="ends in a sigmoid; use scores='probabilities'"):
        MultiLabelMasking(sigmoid, THREAT, scores="logits")


def test_other_defenses_still_take_one_label_only() -> None:
    for defense in (DoubleMasking, ChallengerMasking):
        with pytest.raises(LabelError):
            defense(model(), THREAT, masks=2).certify(image_of(0)[None], [[0, 1]])
