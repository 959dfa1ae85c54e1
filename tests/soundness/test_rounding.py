"""Certificates leave room for rounding, and networks that are not what they claim are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import CallableClassifier, Threat, TorchClassifier
from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.defenses import BagCert, ClippedBagNet, IntervalBounds, PatchGuard, PatchGuardPlusPlus, Smoothing
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.local_defense import ImageScores
from patchcleanser.errors import ClassifierError, InputError
from patchcleanser.networks.bagnet import BagNet, bagnet
from patchcleanser.networks.interval import IntervalNet

DOT = Threat.square(1)


class Told(nn.Module):
    """Every pixel is a place; where it is bright, the local logits of that place are as told [classes, H, W]."""

    field, jump = 1, 1

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def local(self, images: Tensor) -> Tensor:
        return self.logits * (images > 0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.local(images).mean((2, 3))


def told(logits: Tensor) -> tuple[TorchClassifier, Tensor]:
    """A classifier, and the image of which it says so."""
    return TorchClassifier(Told(logits).eval(), classes=len(logits)), torch.ones(1, 1, *logits.shape[1:])


def test_a_vote_that_another_batch_may_not_give_is_not_counted_on() -> None:
    # Logits of 1,000 are known to about 0.01, and here the vote hangs on 0.001.
    near = CallableClassifier(lambda x: torch.tensor([[1000.001, 1000.0]]).expand(len(x), 2), array="torch")
    defense = Smoothing(near, DOT, keep=1, threshold=0.5)
    image = torch.zeros(1, 1, 1, 9)
    assert defense.predict(image)[0].label == 0
    assert not defense.certify(image, [0])[0].certified
    clear = CallableClassifier(lambda x: torch.tensor([[1001.0, 1000.0]]).expand(len(x), 2), array="torch")
    assert Smoothing(clear, DOT, keep=1, threshold=0.5).certify(image, [0])[0].certified


def test_confidence_that_another_batch_may_not_reach_is_not_counted_on() -> None:
    # A third class makes the scores large, so that 0.41 may be 0.32, and the confidence below the threshold.
    logits = torch.tensor([0.41, 0.0, -9000.0])[:, None, None].expand(3, 1, 6)
    model, image = told(logits)
    assert not PatchGuardPlusPlus(model, DOT, threshold=0.6).certify(image, [0])[0].detection_certified
    assert PatchGuardPlusPlus(model, DOT, threshold=0.5).certify(image, [0])[0].detection_certified


@pytest.mark.parametrize("kind", [PatchGuard, PatchGuardPlusPlus, ClippedBagNet, BagCert])
def test_nothing_is_certified_against_a_patch_that_reaches_everything(kind: type[Defense[Any, Any]]) -> None:
    options = {"threshold": 0.0} if kind is PatchGuardPlusPlus else {}
    for seed in range(40):
        logits = torch.rand(3, 3, 7, generator=torch.Generator().manual_seed(seed))
        logits[0] += 5
        model, image = told(logits)
        (certificate,) = kind(model, Threat.rectangle(3, 7), **options).certify(image, [0])
        assert not (certificate.detection_certified if kind is PatchGuardPlusPlus else certificate.certified)


@pytest.mark.parametrize(("lead", "certified"), [(1e-9, False), (float("nan"), False), (1e-3, True)])
def test_a_lead_within_the_rounding_of_sums_or_no_number_proves_nothing(lead: float, certified: bool) -> None:
    class Led(BagCert):
        def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
            return torch.full((1, 1), lead)

    model, image = told(torch.ones(2, 1, 4))
    (certificate,) = Led(model, DOT).certify(image, [0])
    assert certificate.certified == certified == (certificate.margin > 0)
    assert (certificate.failing_placement is None) == certified


def test_bounds_hold_the_exact_ones_where_large_numbers_cancel() -> None:
    for seed in range(40):
        torch.manual_seed(seed)
        net = IntervalNet(nn.Flatten(), nn.Linear(60, 3))
        nn.init.normal_(net[1].weight, std=1e4)
        low = torch.rand(1, 1, 6, 10)
        high = (low + (torch.rand_like(low) < 0.1)).clamp(max=1)
        with torch.inference_mode():
            bounds = net.behind(low, high, torch.tensor([0]))[0]
            weight, bias = (t.double() for t in (net[1].weight, net[1].bias))
            apart = weight - weight[0]
            worst = torch.where(apart > 0, apart * high.double().flatten(), apart * low.double().flatten()).sum(1)
            exact = worst + bias - bias[0]
        assert bounds[0] == 0
        assert (bounds[1:] >= exact[1:]).all()


def test_bounds_that_overflow_prove_nothing() -> None:
    net = IntervalNet(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[3e38], [-3e38]]).expand(2, 4))
        net[1].bias.copy_(torch.tensor([1.0, 0.0]))
    defense = IntervalBounds(TorchClassifier(net.eval(), classes=2), DOT)
    image = torch.zeros(1, 1, 1, 4)
    assert defense.predict(image)[0].label == 0
    (certificate,) = defense.certify(image, [0])
    assert not certificate.certified
    assert certificate.failing_placement is not None


def test_bounds_hold_for_dilated_and_grouped_convolutions_and_refuse_other_padding() -> None:
    torch.manual_seed(0)
    net = IntervalNet(
        nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )
    low = torch.rand(1, 2, 6, 6)
    high = low + 0.3
    with torch.inference_mode():
        behind = net.behind(low, high, torch.tensor([1]))[0]
        logits = net(low + 0.3 * torch.rand(500, 2, 6, 6))
    assert (logits - logits[:, 1:2] <= behind).all()
    mirrored = IntervalNet(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(72, 3))
    with pytest.raises(ClassifierError, match="padded by zeros, got 'reflect'"):
        mirrored.behind(low, high, torch.tensor([1]))


class Mixing(nn.Module):
    """A layer that lets every place know of the whole image."""

    def forward(self, features: Tensor) -> Tensor:
        return features * features.mean((2, 3), keepdim=True).sigmoid()


@pytest.mark.parametrize("change", ["whole image", "group norm", "padding", "field"])
def test_a_network_that_sees_more_than_it_says_is_refused(change: str) -> None:
    torch.manual_seed(0)
    net: BagNet = bagnet(3, field=5, width=8, depth=2)  # type: ignore[assignment]
    if change == "whole image":
        net.stem.append(Mixing())
    elif change == "group norm":
        net.stem[1] = nn.GroupNorm(2, 8)
    elif change == "padding":
        net.stem[0].padding = (1, 1)
        net.field = 3  # so that the number of places is the one it says
    else:
        net.stem.insert(0, nn.Conv2d(3, 3, 3, padding=1))  # the field is 7 now, for as many places
    with pytest.raises(InputError, match="depend on more than their receptive field"):
        BagCert(TorchClassifier(net.eval(), classes=3), DOT).predict(torch.rand(1, 3, 16, 16))
