"""The constructed networks of tests/soundness on a GPU: no batch decides a label, in float32 or confirmed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpu.always_float8 import AlwaysFloat8
from patchcleanser import DoubleMasking, TorchClassifier
from patchcleanser.engine.fast.half import HalfPrecisionBackend
from soundness.constructed import MASKS, SIDE, THREAT, Constructed, company, constructed, painted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NETWORKS = 300
OPTIONS = [{"precision": "exact"}, {"precision": "fast", "confirm": "all"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "confirmed"])
def test_no_batch_changes_the_label_of_a_certified_image_on_a_gpu(options: dict[str, str]) -> None:
    certified, failures = 0, []
    for seed in range(NETWORKS):
        network = constructed(seed)
        classifier = TorchClassifier(network.module.cuda())
        images = torch.cat([network.image[None], company(15)])
        defense = DoubleMasking(classifier, THREAT, masks=MASKS, **options)  # type: ignore[arg-type]
        if not defense.certify(images, [0] * len(images))[0].certified:
            continue
        certified += 1
        for companions in (0, 1, 4, 35):
            attacked = torch.cat([painted(network.image, network.trigger)[None], company(companions)])
            label = DoubleMasking(classifier, THREAT, masks=MASKS).predict(attacked)[0].label
            failures += [(seed, companions)] if label != 0 else []
    assert certified >= NETWORKS // 8
    assert not failures


def test_a_patch_that_opens_large_terms_cannot_silence_a_certified_image_on_a_gpu() -> None:
    for seed in range(20):
        network = constructed(seed, excess=1e8, by_masks=False)
        defense = DoubleMasking(TorchClassifier(network.module.cuda()), THREAT, masks=MASKS)
        images = torch.cat([network.image[None], company(5)])
        if not all(certificate.certified for certificate in defense.certify(images, [0] * 6)):
            continue
        images[0] = painted(network.image, network.gate[0])
        assert [verdict.label for verdict in defense.predict(images)] == [0] * 6


FEATURES = 256
"""FP8 needs layers that are at least this wide."""


def widened(network: Constructed) -> nn.Module:
    """The same network with zeros around the weights of its first layer."""
    flatten, body, relu, head = network.module
    wide, after = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, head.out_features)
    with torch.no_grad():
        for layer, weights in ((wide, body), (after, head)):
            layer.weight.zero_()
            layer.bias.zero_()
            layer.weight[: len(weights.weight), : weights.weight.shape[1]] = weights.weight
            layer.bias[: len(weights.bias)] = weights.bias
    return nn.Sequential(flatten, nn.ConstantPad1d((0, FEATURES - SIDE**2), 0.0), wide, relu, after).eval().cuda()


@pytest.mark.parametrize("seed", [3, 94])  # networks whose weights half precision can hold
def test_what_float8_certifies_and_float32_confirms_is_never_fooled(seed: int) -> None:
    network = constructed(seed)
    images = torch.cat([network.image[None], company(1023)])
    labels = [0] * len(images)
    fast = DoubleMasking(
        TorchClassifier(widened(network), classes=16), THREAT, masks=MASKS, precision="fast", confirm="all"
    )
    exact = DoubleMasking(fast.classifier, THREAT, masks=MASKS)
    copied = HalfPrecisionBackend(fast.classifier)  # type: ignore[arg-type]
    fast.engine.candidates = [[AlwaysFloat8(fast.classifier, copied), copied], [copied]]  # type: ignore[arg-type]
    fast.engine.hint_total_labels(10**13)  # so many that preparing FP8 pays for so small a network
    confirmed = [c.certified for c in fast.certify(images, labels)]
    proved = [c.certified for c in exact.certify(images, labels)]
    assert isinstance(fast.engine.calibration.stages[0].backend, AlwaysFloat8)
    assert not [number for number, claim in enumerate(confirmed) if claim and not proved[number]]
    assert any(confirmed) == any(proved)
    attacked = painted(network.image, network.trigger)[None]
    assert not confirmed[0] or exact.predict(attacked)[0].label == 0


@pytest.mark.parametrize("seed", range(8))
def test_predictions_replayed_from_a_cuda_graph_cannot_be_silenced_or_fooled(seed: int) -> None:
    network = constructed(seed, excess=1e8, by_masks=False)
    fast = DoubleMasking(TorchClassifier(network.module.cuda()), THREAT, masks=MASKS, precision="fast")
    images = torch.cat([network.image[None], company(255)])
    fast.calibrate(images)
    if not fast.certify(images[:1], [0])[0].certified:
        pytest.skip("this network's image is not certified")
    attacked = painted(network.image, network.gate[0])[None]
    assert [fast.predict(attacked)[0].label for _ in range(12)] == [0] * 12
