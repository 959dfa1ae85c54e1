"""Attacks on classes of multi-label images: they break what is not certified, and nothing that is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import CallableClassifier, Threat, TorchClassifier
from patchcleanser.attacks.flip_classes import FlipResult, attack_classes, one_class
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.defenses.multilabel_masking import MultiLabelMasking

SIZE, CLASSES = 24, 6
SETTINGS = AttackSettings(iterations=25, locations=3)


def network() -> nn.Module:
    """Each class sees its own colours in the whole image, some of them strongly."""
    torch.manual_seed(0)
    head = nn.Linear(3, CLASSES)
    head.weight.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [4, 4, -4], [-3, -3, -3], [5, -5, 0]])
    head.bias.data = torch.tensor([-3.5, -3.5, -3.5, -1.5, 5.0, 0.2])
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    colours = torch.rand(6, 3, 1, 1, generator=generator)
    return list((colours + 0.1 * torch.rand(6, 3, SIZE, SIZE, generator=generator)).clamp(0, 1))


def results_of(defense: MultiLabelMasking) -> list[FlipResult]:
    truths = (network()(torch.stack(images())) >= 0).numpy()  # what the network says is taken to be true
    return list(attack_classes(defense, images(), list(truths), SETTINGS))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_no_certified_class_or_count_is_beaten_and_other_classes_are_turned(sigmoid: bool) -> None:
    module = nn.Sequential(*network(), nn.Sigmoid()).eval() if sigmoid else network()
    results = results_of(MultiLabelMasking(TorchClassifier(module), Threat.square(6), masks=4))
    assert sum(result.certified for result in results) >= 6
    assert not [result for result in results if result.broken]
    others = [result for result in results if not result.certified]
    assert sum(result.undefended_wrong for result in others) >= 2
    assert sum(result.defended_wrong for result in others) >= 1


def test_without_gradients_patches_are_searched_at_random() -> None:
    module = network()
    defense = MultiLabelMasking(CallableClassifier(module, array="torch"), Threat.square(6), masks=4)
    results = results_of(defense)
    assert not [result for result in results if result.broken]
    assert any(result.undefended_wrong for result in results)


def test_the_attacker_turns_classes_that_are_wrongly_called_certified() -> None:
    """A certificate for smaller patches: the same attack refutes it."""
    defense = MultiLabelMasking(TorchClassifier(network()), Threat.square(6), masks=4)
    weaker = MultiLabelMasking(TorchClassifier(network()), Threat.square(2), masks=4)
    truths = (network()(torch.stack(images())) >= 0).numpy()
    certificates = weaker.certify(images(), truths)
    claims = [
        {*c.certified, *range(CLASSES)} - {*c.present}.difference(c.certified) - {*c.possible} for c in certificates
    ]
    results = list(attack_classes(defense, images(), list(truths), SETTINGS))
    assert any(result.defended_wrong and result.label in claims[result.image] for result in results)


def test_one_class_is_answered_as_the_network_answers_it() -> None:
    batch = torch.stack(images())
    scores = network()(batch)
    for share in (0.5, 0.8):
        defense = MultiLabelMasking(TorchClassifier(network()), Threat.square(6), masks=2, threshold=share)
        for place in range(CLASSES):
            logits = one_class(defense, place).logits(batch)
            assert torch.equal(logits.argmax(1).bool(), scores[:, place].sigmoid() > share)
