"""The defenses of local scores on examples that can be counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import CallableClassifier, Threat, TorchClassifier
from patchcleanser.defenses import (
    BagCert,
    ClippedBagNet,
    IntervalBounds,
    PatchGuard,
    PatchGuardPlusPlus,
    PatchGuardSmoothing,
    Smoothing,
)
from patchcleanser.errors import ImageError, InputError, LabelError
from patchcleanser.networks.interval import IntervalNet

DOT = Threat.square(1)


class Shown(nn.Module):
    """Local logits that are told: every pixel is a place, whose value picks a column of `logits` [classes, values]."""

    field, jump = 1, 1

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.register_buffer("logits", torch.tensor(logits))

    def local(self, images: Tensor) -> Tensor:
        values = (images[:, 0] * 10).round().long().clamp(0, self.logits.shape[1] - 1)
        return self.logits[:, values].transpose(0, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.local(images).mean((2, 3))


def shown(logits: list[list[float]]) -> TorchClassifier:
    return TorchClassifier(Shown(logits).eval(), classes=len(logits))


def pixels(*values: int) -> Tensor:
    """One image of one row; each pixel names a column of logits."""
    return torch.tensor(values).float().view(1, 1, 1, -1) / 10


def voter(image: Tensor) -> Tensor:
    """For views of one visible pixel: dark ones vote for class 0, bright ones for class 1, gray ones for none."""
    value = image[:, 0, 0].max(1).values + image[:, 0, 0].min(1).values - 0.5  # the others show the mask colour, 0.5
    return 20 * torch.stack([0.4 - value, value - 0.6, torch.zeros_like(value)], 1)


@pytest.mark.parametrize(("zeros", "ones", "wins"), [(5, 5, 0), (4, 5, 1), (6, 4, 0)])
def test_the_class_with_the_most_views_wins_and_of_equals_the_smallest(zeros: int, ones: int, wins: int) -> None:
    image = torch.tensor([0.0] * zeros + [1.0] * ones).view(1, 1, 1, -1)
    defense = Smoothing(CallableClassifier(voter, array="torch"), DOT, keep=1)
    (verdict,) = defense.predict(image)
    assert verdict.label == wins
    assert verdict.classifications == zeros + ones + 1


@pytest.mark.parametrize(
    ("zeros", "ones", "label", "certified"),
    [
        (6, 4, 0, True),  # one view can go over: 5 against 5, and class 0 wins ties
        (4, 6, 1, False),  # class 1 loses ties
        (4, 7, 1, True),
        (5, 4, 0, False),
    ],
)
def test_smoothing_asks_for_twice_the_reached_views_and_one_more_where_ties_are_lost(
    zeros: int, ones: int, label: int, certified: bool
) -> None:
    image = torch.tensor([0.0] * zeros + [1.0] * ones).view(1, 1, 1, -1)
    (certificate,) = Smoothing(CallableClassifier(voter, array="torch"), DOT, keep=1).certify(image, [label])
    assert certificate.certified is certified
    assert (certificate.failing_placement is None) is certified


def test_two_patches_cost_smoothing_twice_as_much() -> None:
    image = torch.zeros(1, 1, 1, 4)
    model = CallableClassifier(voter, array="torch")
    margins = [Smoothing(model, Threat.square(1, count=k), keep=1).certify(image, [0])[0].margin for k in (1, 2, 3)]
    assert margins == [3, 1, -1]  # 4 - 2k + 1


def test_clipped_logits_are_summed_and_a_reached_place_is_taken_at_its_worst() -> None:
    defense = ClippedBagNet(shown([[2.0, -2.0], [-2.0, 2.0]]), DOT, scale=1.0, shift=0.0)
    (certificate,) = defense.certify(pixels(0, 0, 0, 1), [0])
    lead = 2 * math.tanh(2.0)
    assert certificate.margin == pytest.approx(3 * lead - lead - (lead + 2), abs=1e-3)  # a loyal place goes to -2
    assert certificate.certified is False
    assert defense.certify(pixels(0, 0, 0, 0), [0])[0].certified


def test_votes_of_places_are_counted_and_a_place_may_vote_for_several_classes_or_none() -> None:
    defense = BagCert(shown([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]]), DOT)
    (examination,) = defense.examine(pixels(0, 0, 0, 1, 2, 3), [0])
    assert examination.verdict.label == 0
    # 4 votes against 2; of 3 - 1 without a loyal place, the place itself may turn.
    assert examination.certificate.margin == pytest.approx(2 - 1 - 1)
    assert not examination.certificate.certified
    assert examination.undefended == 0


def test_patchguard_takes_the_best_window_of_each_class_away() -> None:
    loud = shown([[1.0, 0.0], [0.0, 99.0]])
    (plain,), (masked,) = (
        BagCert(loud, DOT).examine(pixels(0, 0, 0, 1), [0]),
        PatchGuard(loud, DOT).predict(pixels(0, 0, 0, 1)),
    )
    assert plain.undefended == 1  # one place shouts
    assert masked.label == 0  # and is taken away: 2 against 0
    (certificate,) = PatchGuard(loud, DOT).certify(pixels(0, 0, 0, 0), [0])
    assert certificate.margin == pytest.approx(4 - 1 - 1, abs=1e-3)


def test_patchguard_on_smoothing_counts_how_sure_the_views_are() -> None:
    def confidence(images: Tensor) -> Tensor:  # of class 0 by 0.9, or where a pixel is bright by 0.4
        first = torch.where(images.amax((1, 2, 3)) > 0.5, 0.4, 0.9)
        return torch.stack([first, 1 - first], 1).log()

    model = CallableClassifier(confidence, array="torch")
    image = torch.tensor([0.0] * 6 + [1.0] * 2).view(1, 1, 1, -1)
    own, other = 6 * 0.9 + 2 * 0.4, 6 * 0.1 + 2 * 0.6
    (certificate,) = PatchGuardSmoothing(model, DOT, keep=1).certify(image, [0])
    assert certificate.margin == pytest.approx(own - 0.9 - 0.9 - (other - 0.1), abs=1e-3)  # a patch on a dark pixel
    (certificate,) = PatchGuardSmoothing(model, DOT, keep=1, ratio=0.2).certify(image, [0])
    assert certificate.margin == pytest.approx(own - 0.9 - 0.9 - (other - 0.1) / 0.8, abs=1e-3)
    (answer,) = PatchGuardSmoothing(model, DOT, keep=1).predict(image)
    assert answer.label == 0


def test_patchguard_plus_plus_raises_an_alert_where_a_hidden_window_changes_the_label() -> None:
    model = shown([[3.0, 0.0], [0.0, 20.0]])
    defense = PatchGuardPlusPlus(model, DOT, threshold=0.6)
    quiet, shouted = defense.predict(torch.cat([pixels(0, 0, 0, 0), pixels(0, 0, 0, 1)]))
    assert (quiet.label, quiet.alert) == (0, False)
    assert (shouted.label, shouted.alert, shouted.reporters) == (1, True, (3,))
    (certificate,) = defense.certify(pixels(0, 0, 0, 0), [0])
    assert certificate.detection_certified
    assert defense.as_module()(pixels(0, 0, 0, 1)).argmax(1).tolist() == [2]  # the alert is a class of its own


def test_bounds_of_a_linear_network_are_exact() -> None:
    net = IntervalNet(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
        net[1].bias.copy_(torch.tensor([0.0, 1.5]))
    defense = IntervalBounds(TorchClassifier(net.eval(), classes=2), DOT)
    (certificate,) = defense.certify(torch.ones(1, 1, 1, 4), [0])
    assert certificate.certified
    assert certificate.margin == pytest.approx(4 - 1 - 1.5, abs=1e-3)  # one pixel from 1 to 0
    (certificate,) = IntervalBounds(defense.classifier, Threat.rectangle(1, 3)).certify(torch.ones(1, 1, 1, 4), [0])
    assert not certificate.certified
    assert certificate.failing_placement is not None


@pytest.mark.parametrize("kind", [Smoothing, BagCert, IntervalBounds])
def test_images_and_labels_are_checked_as_in_other_defenses(kind: Any) -> None:
    models: dict[Any, Any] = {
        Smoothing: CallableClassifier(voter, array="torch"),
        BagCert: shown([[1.0], [0.0], [0.0]]),
        IntervalBounds: TorchClassifier(IntervalNet(nn.Flatten(), nn.Linear(4, 3)).eval(), classes=3),
    }
    options = {"keep": 1} if kind is Smoothing else {}
    defense = kind(models[kind], DOT, **options)
    image = torch.zeros(1, 1, 1, 4)
    with pytest.raises(LabelError, match=r"2 labels for 1 image$"):
        defense.certify(image, [0, 1])
    with pytest.raises(LabelError, match="1 label for at least 2 images"):
        defense.certify(iter([image[0], image[0]]), [0])
    with pytest.raises(LabelError, match="label 7 is out of range"):
        defense.certify(image, [7])
    with pytest.raises(ImageError, match=r"pixels lie in \[0, 1\]"):
        defense.predict(image + 2)
    with pytest.raises(InputError, match="no map of positions"):
        defense.certify(image, [0], maps=True)


def test_a_place_that_answers_nan_is_no_evidence_and_silences_nobody() -> None:
    model = shown([[1.0, math.nan, -math.inf], [0.0, math.nan, math.inf]])
    for kind in (ClippedBagNet, PatchGuard, BagCert):
        (verdict,) = kind(model, DOT).predict(pixels(0, 0, 0, 1))
        assert verdict.label == 0
    (verdict,) = PatchGuard(model, DOT).predict(pixels(0, 0, 0, 2))
    assert verdict.label == 0


def test_smoothing_needs_a_threshold_since_its_proof_counts_whole_votes() -> None:
    with pytest.raises(InputError, match="a confidence threshold lies in"):
        Smoothing(CallableClassifier(voter, array="torch"), Threat.square(2), threshold=None)  # type: ignore[arg-type]
