"""A patch that makes rounding errors large cannot keep a certified image, or its neighbours, from being answered."""

from __future__ import annotations

import pytest

from patchcleanser import ChallengerMasking, DoubleMasking, TorchClassifier
from patchcleanser.errors import PatchCleanserError
from soundness.constructed import MASKS, THREAT, Constructed, company, constructed, painted


def defense(kind: type[DoubleMasking], network: Constructed) -> DoubleMasking:
    """A new one, as another process would have."""
    return kind(TorchClassifier(network.module), THREAT, masks=MASKS)


def refusals(kind: type[DoubleMasking], number: int, companions: int) -> tuple[int, list[str]]:
    """How many images were certified, and what came instead of label 0 when a patch opened the gate."""
    count, failures = 0, []
    for seed in range(number):
        network = constructed(seed, excess=1e8, by_masks=False)
        images = company(companions + 1)
        images[0] = network.image
        if not all(c.certified for c in defense(kind, network).certify(images, [0] * len(images))):
            continue
        count += 1
        images[0] = painted(network.image, network.gate[0])
        try:
            labels = [verdict.label for verdict in defense(kind, network).predict(images)]
            failures += [] if not any(labels) else [f"{seed}: {labels}"]
        except PatchCleanserError as error:
            failures.append(f"{seed}: {error}")
    return count, failures


@pytest.mark.parametrize("companions", [0, 5])
@pytest.mark.parametrize("kind", [DoubleMasking, ChallengerMasking])
def test_a_patch_that_opens_large_terms_cannot_silence_a_certified_image(
    kind: type[DoubleMasking], companions: int
) -> None:
    count, failures = refusals(kind, 12, companions)
    assert count >= 10
    assert not failures, f"{len(failures)} of {count} certified images were not answered: {failures[0]}"
