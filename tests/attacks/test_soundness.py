"""Random networks, random images, every defense and kind of threat: what is certified is never fooled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import (
    ChallengerMasking,
    DoubleMasking,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
    Window,
)
from patchcleanser.attacks import AdaptiveAttack
from patchcleanser.attacks.patch_attack import AttackSettings

DEFENSES = {"double-masking": DoubleMasking, "challenger": ChallengerMasking, "minority": MinorityReports}
THREATS = [
    Threat.square(3),
    Threat.square(2, count=2, region=Window(4, 4, 5, 5)),
    Threat.any_rectangle(6, region=Window(3, 3, 8, 7)),
    Threat.square(2, region=Window(1, 2, 9, 8)),
    Threat.square(3, grid="input"),
]


def random_network(seed: int) -> TorchClassifier:
    """Colours count most, shapes some: right under most masks, wrong under a few."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(6 * 2 * 2, 4))
    net[4].weight.data *= 12
    prepared = Preprocessing(resize=(16, 16), interpolation="bilinear", mean=(0.5,) * 3, std=(0.25,) * 3)
    return TorchClassifier(net.eval(), prepared)


def pictures(number: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    flat = torch.rand(number, 3, 1, 1, generator=draw)
    return list((flat + 0.15 * torch.randn(number, 3, 14, 14, generator=draw)).clamp(0, 1))


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", DEFENSES)
def test_certified_images_survive_the_adaptive_attack(name: str, threat: Threat) -> None:
    certified, fooled = 0, 0
    for seed in range(2):
        model, images = random_network(seed), pictures(9, seed)
        with torch.no_grad():
            labels = [int(model.logits(model.prepare(image[None])).argmax()) for image in images]
        defense = DEFENSES[name](model, threat, masks=4 if threat.count == 1 else 2)
        attack = AdaptiveAttack(defense, AttackSettings(iterations=6, locations=2, seed=seed))
        for result in attack.challenge(images, labels):
            assert not result.contradiction
            certified += result.certified
            fooled += result.fooled
    assert certified >= 2
    assert fooled >= 2
