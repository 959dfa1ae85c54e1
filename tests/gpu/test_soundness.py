"""The constructed networks of tests/soundness on a GPU: no batch decides a label, in float32 or confirmed."""

from __future__ import annotations

import pytest
import torch

from patchcleanser import DoubleMasking, TorchClassifier
from soundness.constructed import MASKS, THREAT, company, constructed, painted

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
        for others in (0, 1, 4, 35):
            attacked = torch.cat([painted(network.image, network.trigger)[None], company(others)])
            label = DoubleMasking(classifier, THREAT, masks=MASKS).predict(attacked)[0].label
            failures += [(seed, others)] if label != 0 else []
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
