"""A certificate holds whatever batch an image is in, also for networks whose rounding errors are large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from patchcleanser import ChallengerMasking, DoubleMasking, TorchClassifier
from patchcleanser.errors import NotAFunctionError
from soundness.constructed import MASKS, THREAT, Constructed, company, constructed, is_unsteady, labels, painted

COMPANY = [0, 1, 4, 2, 35]
"""How many others an image comes with."""
CHUNKS = [None, None, 2, 5, 1]
"""The limit on masked images at a time. It decides the shape of batches, so it is the same in certify and predict."""


def defense(kind: type[DoubleMasking], network: Constructed, chunk: int | None) -> DoubleMasking:
    """A new one for each question, as another process would have."""
    return kind(TorchClassifier(network.module), THREAT, masks=MASKS, chunk=chunk)


def among(image: Tensor, companions: int, at: int) -> Tensor:
    """The image at one place of a batch."""
    images = company(companions)
    return torch.cat([images[:at], image[None], images[at:]])


def certified(kind: type[DoubleMasking], network: Constructed, seed: int) -> bool:
    """Whether the clean image is certified, in a batch that depends on the seed."""
    companions = COMPANY[seed // 4 % len(COMPANY)]
    at = seed % (companions + 1)
    images = among(network.image, companions, at)
    try:
        return defense(kind, network, chunk_of(seed)).certify(images, [0] * len(images))[at].certified
    except NotAFunctionError:  # a refusal is no certificate
        return False


def chunk_of(seed: int) -> int | None:
    return CHUNKS[seed // 20 % len(CHUNKS)]


def answers(kind: type[DoubleMasking], network: Constructed, image: Tensor, chunk: int | None) -> Iterator[str]:
    """What an image is answered in batches of several sizes."""
    for companions in COMPANY:
        at = companions // 2
        try:
            yield str(defense(kind, network, chunk).predict(among(image, companions, at))[at].label)
        except NotAFunctionError as error:
            yield str(error)


def wrong(kind: type[DoubleMasking], number: int) -> tuple[int, list[tuple[int, str]]]:
    """How many networks' images were certified, and the seeds of those that were answered otherwise than 0 then."""
    count, failures = 0, []
    for seed in range(number):
        network = constructed(seed)
        if not is_unsteady(network) or not certified(kind, network, seed):
            continue
        count += 1
        for image in (network.image, painted(network.image, network.trigger)):
            failures += [(seed, answer) for answer in answers(kind, network, image, chunk_of(seed)) if answer != "0"]
    return count, failures


def test_labels_of_these_networks_depend_on_the_batch_in_torch_itself() -> None:
    networks = [constructed(seed) for seed in range(40)]
    assert sum(is_unsteady(network) for network in networks) >= 10
    assert any(len(labels(network, 5)) > 1 for network in networks)  # five equal images in one batch


@pytest.mark.parametrize("kind", [DoubleMasking, ChallengerMasking])
def test_no_batch_changes_the_label_of_a_certified_image(kind: type[DoubleMasking]) -> None:
    count, failures = wrong(kind, 24)
    assert count >= 3
    assert not failures, f"{len(failures)} wrong labels of {count} certified images"


@pytest.mark.slow
def test_no_batch_changes_the_label_of_a_certified_image_of_thousands() -> None:
    count, failures = wrong(DoubleMasking, 3000)
    assert count >= 375
    assert not failures, f"{len(failures)} wrong labels of {count} certified images"
