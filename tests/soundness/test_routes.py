"""A certificate holds by whatever route an image comes: after other sizes, beside hostile images, by the service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Preprocessing, Threat, TorchClassifier
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.errors import NotAFunctionError
from patchcleanser.service.access import Capacity
from patchcleanser.service.batching import ScheduledImage, Scheduler
from soundness.constructed import (
    GATE,
    MASKS,
    OWN,
    THREAT,
    UNITS,
    Constructed,
    Pixel,
    company,
    constructed,
    painted,
)
from soundness.test_fast_certificates import needs_half, steep_case


class NanWhereBlack(nn.Module):
    """Class 0 of every image without a black pixel, and NaN of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3)) + torch.where(x.amin((1, 2, 3)) == 0, torch.nan, 0.0)
        return torch.stack([mean + 1, self.offset + 0 * mean], 1)


class Viewed(nn.Module):
    """Flattens with view(), which works with channels last where one pixel is left, so at 32 px and not at 64 px."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 37, 3, padding=1), nn.Conv2d(37, 53, 3, padding=1)
        self.head = nn.Linear(53, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.avg_pool2d(self.second(self.first(x).relu()).relu(), 32)
        return self.head(features.view(len(features), -1).view(len(features), 53, -1).mean(2))


class Routed(nn.Module):
    """A constructed network whose head is an expert, asked about the images of a batch that open the gate, in parts."""

    def __init__(self, network: Constructed, *, declared: bool, parts: int = 1) -> None:
        super().__init__()
        *body, self.head = network.module
        self.body, self.plain = nn.Sequential(*body), nn.Linear(UNITS, self.head.out_features)
        self.varying_shapes, self.parts = declared, parts
        with torch.no_grad():
            self.plain.weight.copy_(self.head.weight)
            self.plain.bias.copy_(self.head.bias)
            self.plain.weight[:, GATE + 1 :] = 0

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        logits, open_ = self.plain(features), features[:, GATE] > 0
        if open_.any():
            logits[open_] = torch.cat([self.head(part) for part in features[open_].tensor_split(self.parts)])
        return logits


class WeakAtTwo(nn.Module):
    """A network with one more class, which wins where two pixels are hidden and a third one is dark."""

    def __init__(self, network: nn.Module, hidden: tuple[Pixel, Pixel], dark: Pixel) -> None:
        super().__init__()
        self.network, self.hidden, self.dark = network, hidden, dark

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x)
        wins = x[:, 0, self.dark[0], self.dark[1]] < 0.8
        for row, column in self.hidden:
            wins &= x[:, 0, row, column] == 0.5
        return logits + 64 * nn.functional.one_hot(2 * wins.long(), 3) * wins[:, None]


def margins(defense: DoubleMasking, image: Tensor) -> np.ndarray:
    return defense.examine([image], [0], maps=True)[0].table.margins[:-1]


def served(defense: DoubleMasking, images: Iterable[Tensor], flow: Any, *, strict: bool) -> list[Any]:
    """What the service's scheduler answers."""
    scheduler, capacity = Scheduler(defense.engine, together=8), Capacity(images=1000)
    (reservation,) = capacity.reserve("", {"images": 1})
    scheduled = [ScheduledImage(defense.image_state(image), flow, strict, reservation) for image in images]
    try:
        return [future.result(60) for future in scheduler.submit(scheduled)]
    finally:
        scheduler.close()


def test_an_image_of_another_size_changes_no_bit_of_later_labels() -> None:
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    other = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(2))
    defense = DoubleMasking(TorchClassifier(Viewed().eval()), Threat.square(4), masks=3)
    before = margins(defense, image)
    defense.predict([other])
    np.testing.assert_array_equal(margins(defense, image), before)


class InPlace(Classifier):
    """Divides the image by its mean in place, so that a patch changes every pixel that `prepare` is given."""

    def prepare(self, images: Tensor) -> Tensor:
        images /= images.mean((1, 2, 3), keepdim=True)
        return images

    def logits(self, inputs: Tensor) -> Tensor:
        share = ((inputs > 0.03) & (inputs < 0.3)).float().mean((1, 2, 3))
        return torch.stack([share - 0.1, 0.1 - share], 1)

    @property
    def weights(self) -> str:
        return "in place"


def test_a_preparation_that_works_in_place_changes_no_image_before_it_is_masked() -> None:
    def defense() -> DoubleMasking:
        return DoubleMasking(InPlace(Preprocessing(), classes=2), Threat.square(3), masks=3)

    clean = torch.full((1, 3, 9, 9), 0.02)
    (certificate,) = defense().certify(clean, [0])
    attacked = clean.clone()
    attacked[..., 3:6, 3:6] = 1.0
    assert certificate.row_certified
    assert defense().predict(attacked)[0].label == 0


def test_a_network_that_says_its_shapes_vary_gets_the_same_bits_beside_any_image() -> None:
    certified = 0
    for seed in range(0, 120, 3):
        network = constructed(seed)
        defense = DoubleMasking(TorchClassifier(Routed(network, declared=True).eval()), THREAT, masks=MASKS)
        certified += defense.certify(network.image[None], [0])[0].certified
        beside = torch.stack([network.image, painted(network.image, network.gate[0]), *company(3)])
        among = defense.examine(beside, [0] * len(beside), maps=True)[0].table.margins[:-1]
        np.testing.assert_array_equal(among, margins(defense, network.image))
    assert certified >= 10


def test_an_image_without_finite_logits_takes_no_answer_from_its_neighbours() -> None:
    defense = DoubleMasking(TorchClassifier(NanWhereBlack().eval()), Threat.square(2), masks=3)
    image = torch.full((3, 16, 16), 0.8)
    hostile = image.clone()
    hostile[:, 0, 0] = hostile[:, -1, -1] = 0.0  # no single mask hides both
    assert defense.certify([image], [0])[0].certified
    assert [verdict.label for verdict in defense.predict([image, hostile, image])] == [0, 0, 0]


def test_a_patch_that_makes_logits_nan_cannot_silence_a_certified_image_in_the_service() -> None:
    defense = DoubleMasking(TorchClassifier(NanWhereBlack().eval()), Threat.square(16))
    image = torch.full((3, 224, 224), 0.8)
    assert defense.certify([image], [0])[0].certified
    image[:, -4:, -4:] = 0.0
    (verdict,) = served(defense, [image], defense.verdict_flow, strict=False)
    assert verdict.label == 0


@needs_half
def test_the_service_certifies_by_exact_labels_though_it_predicts_by_fast_ones() -> None:
    network, image = steep_case(0)
    defense = DoubleMasking(TorchClassifier(network), THREAT, masks=MASKS, precision="fast")
    defense.calibrate(company(16))
    assert defense.engine.ready
    images = [image, *company(15)]
    first, *rest = served(defense, images, lambda table: defense.certificate_flow(table, 0), strict=True)
    assert not first.certified
    assert all(certificate.unconfirmed == 0 for certificate in (first, *rest))


@needs_half
@pytest.mark.parametrize("seed", range(6))
def test_maps_of_confirmed_runs_are_those_of_exact_ones(seed: int) -> None:
    """Of an image that is not certified, too: some of its positions are said to be proved safe."""
    network, image = steep_case(seed)
    places = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[2:5].tolist()
    dark, first, second = ((OWN[place // 3], OWN[place % 3]) for place in places)
    network = WeakAtTwo(network, (first, second), dark).eval()
    images = torch.cat([image[None], company(39)])
    exact, confirmed = (
        DoubleMasking(TorchClassifier(network), THREAT, masks=MASKS, **options).certify(images, [0] * 40, maps=True)
        for options in ({}, {"precision": "fast", "confirm": "all"})
    )
    assert not exact[0].row_certified
    for reference, certificate in zip(exact, confirmed, strict=True):
        assert reference.positions is not None
        assert certificate.positions is not None
        assert all((certificate.positions[size] <= safe).all() for size, safe in reference.positions.items())


def test_hostile_pixels_cannot_make_fast_predictions_raise() -> None:
    """The network gathers images, so the bits of one depend on the others; certify may refuse it, predict may not."""
    answered = 0
    for seed in range(0, 80, 4):
        network = constructed(seed, excess=1e5, by_masks=False)
        classifier = TorchClassifier(Routed(network, declared=False, parts=8).eval())
        defense = DoubleMasking(classifier, THREAT, masks=MASKS, precision="fast")
        try:
            defense.calibrate(company(16))
        except NotAFunctionError:
            continue
        images = torch.cat([painted(network.image, network.gate[0])[None], company(7)])
        answered += len(defense.predict(images)) == 8
    assert answered >= 10
