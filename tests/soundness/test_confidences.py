"""A detection certificate holds in every batch, also where logits are so large that confidences move with the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchcleanser import MinorityReports, TorchClassifier
from soundness.constructed import HEADS, MASKS, OWN, SIDE, THREAT, Pixel, company, painted

CLASSES, UNITS = 16, 256
DARK = [(row, column) for row in OWN for column in OWN]
"""For each mask a pixel that it alone hides."""

BATCHES = [(0, None), (4, 1), (1, 2), (7, None)]
"""How many others an image comes with, and how many masked images are classified at once."""

IMAGE = torch.ones(1, SIDE, SIDE)


def confident(seed: int, size: float) -> nn.Module:
    """A network whose logits are about as large as `size`: class 0 leads by 1, or class 1 where a pixel is black.

    No mask changes its logits, but the batch does: the two leading ones are long sums of different terms.
    """
    draw = torch.Generator().manual_seed(seed)
    body, head = nn.Linear(SIDE**2, UNITS), HEADS[seed % len(HEADS)](UNITS, CLASSES)
    with torch.no_grad():
        for layer in (body, head):
            layer.weight.zero_()
            layer.bias.zero_()
        body.bias.copy_(torch.rand(UNITS, generator=draw))
        body.bias[: len(DARK)] = 1
        for unit, (row, column) in enumerate(DARK):
            body.weight[unit, row * SIDE + column] = -4
        head.weight[:2, len(DARK) :] = torch.rand(2, UNITS - len(DARK), generator=draw)
        network = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head).eval()
        head.weight[:2] *= size / network(IMAGE[None])[0, :2, None]
        head.weight[1, : len(DARK)] = 0.1 * size
        first, second = network(IMAGE[None])[0, :2].tolist()
        head.bias[0] = second - first + 1.0
    return network


def defense(network: nn.Module, threshold: float, chunk: int | None) -> MinorityReports:
    """A new one, as another process would have."""
    return MinorityReports(TorchClassifier(network), THREAT, masks=MASKS, threshold=threshold, chunk=chunk)


def highest_threshold(network: nn.Module, companions: int, chunk: int | None) -> float:
    """The highest threshold at which the image is certified, in a batch with others."""
    low, high = 0.5, 1.0
    images = torch.cat([IMAGE[None], company(companions)])
    for _ in range(18):
        middle = (low + high) / 2
        certificate = defense(network, middle, chunk).certify(images, [0] * len(images))[0]
        low, high = (middle, high) if certificate.detection_certified else (low, middle)
    return low


def silently_wrong(network: nn.Module, threshold: float, pixel: Pixel, chunk: int | None) -> int:
    """In how many batches an image with a black pixel passes as class 1 without an alert."""
    failures = 0
    for companions, _ in BATCHES:
        images = torch.cat([painted(IMAGE, pixel)[None], company(companions)])
        verdict = defense(network, threshold, chunk).predict(images)[0]
        failures += verdict.label != 0 and not verdict.alert
    return failures


@pytest.mark.parametrize("size", [1000.0, 30_000.0])
def test_no_batch_takes_the_alert_from_a_certified_image(size: float) -> None:
    failures = 0
    for seed in range(4):
        network = confident(seed, size)
        companions, chunk = BATCHES[seed % len(BATCHES)]
        threshold = highest_threshold(network, companions, chunk)
        assert threshold > 0.6
        failures += sum(silently_wrong(network, threshold, pixel, chunk) for pixel in DARK[::4])
    assert not failures, f"{failures} attacked images were answered wrongly without an alert"
