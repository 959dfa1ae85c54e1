"""The attacker that tries everything, against the certificates made of local scores.

Networks are random functions of what each of their places sees, as hostile as a function can be:
whatever holds a changed pixel speaks loudly for another class. Every patch content at every
position is tried, and certificates weakened on purpose must break.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import CallableClassifier, Preprocessing, Threat, TorchClassifier, Window
from patchcleanser.core.geometry import Size
from patchcleanser.core.receptive_fields import Footprint, ReceptiveFields
from patchcleanser.defenses import (
    BagCert,
    ClippedBagNet,
    IntervalBounds,
    PatchGuard,
    PatchGuardPlusPlus,
    PatchGuardSmoothing,
    Smoothing,
)
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.local_defense import ImageScores, summed_margin
from patchcleanser.errors import InputError
from patchcleanser.networks.builders import build_network
from patchcleanser.networks.interval import IntervalNet

from .test_exhaustive import attacked

TRUE = 0
CLASSES = 3


def hashed(cells: Tensor, seed: int) -> Tensor:
    """Rows of numbers [N, numbers] → a random number for each."""
    keys = torch.randint(1, 2**61, (cells.shape[1],), generator=torch.Generator().manual_seed(seed)) | 1
    mixed = (((cells * 1000).round().long() + 7) * keys).sum(1)
    for shift, key in ((29, 0x3F58476D1CE4E5B9), (32, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * key
    return mixed


class Hostile:
    """Scores [N, classes] of what is seen. Views of the clean image are loyal; all others speak for class 1, loudly."""

    def __init__(self, seed: int, loyalty: float, loud: float) -> None:
        self.seed, self.loyalty, self.loud = seed, loyalty, loud
        self.clean: set[int] = set()
        self.learning = False

    def __call__(self, cells: Tensor) -> Tensor:
        codes = hashed(cells, self.seed)
        if self.learning:
            self.clean |= set(codes.tolist())
        is_clean = torch.tensor([code in self.clean for code in codes.tolist()])
        draw = ((codes >> 20) & 0xFFFF).double() / 65536
        label = torch.where(draw < self.loyalty, TRUE, 1 + ((codes >> 40) & 1))
        label = torch.where(is_clean | (draw > 0.95), label, 1)
        loud = torch.where(is_clean, 1 + 2 * ((codes >> 45) & 0xFF).double() / 255, self.loud)
        signs = 2 * functional.one_hot(label, CLASSES) - 1
        return (signs * loud[:, None]).float()


class RandomBag(nn.Module):
    """A network of small receptive fields: every place is a Hostile function of the pixels it sees."""

    def __init__(self, hostile: Hostile, field: int, jump: int) -> None:
        super().__init__()
        self.hostile, self.field, self.jump = hostile, field, jump

    def local(self, images: Tensor) -> Tensor:
        cells = functional.unfold(images, self.field, stride=self.jump)
        down = (images.shape[2] - self.field) // self.jump + 1
        scores = self.hostile(cells.transpose(1, 2).flatten(0, 1))
        return scores.unflatten(0, (len(images), -1)).transpose(1, 2).unflatten(2, (down, -1))

    def forward(self, images: Tensor) -> Tensor:
        return self.local(images).mean((2, 3))


PLAIN = Preprocessing(fill=(0.5,))


@dataclass(frozen=True)
class Setting:
    name: str
    make: type[Defense[Any, Any]]
    threat: Threat
    image: Size
    options: dict[str, Any] = field(default_factory=dict)
    field: int = 0
    """Of the receptive fields; 0 shows whole ablated images to the classifier."""
    jump: int = 1
    preprocessing: Preprocessing = PLAIN
    loyalty: float = 0.65
    networks: int = 40

    def built(self, seed: int) -> tuple[Defense[Any, Any], Hostile]:
        hostile = Hostile(seed, self.loyalty, loud=90.0)
        if self.field:
            # The empty buffer tells the device; the module itself has no weights.
            classifier: Any = TorchClassifier(RandomBag(hostile, self.field, self.jump).eval(), classes=CLASSES)
        else:
            preprocessing = self.preprocessing
            classifier = CallableClassifier(
                lambda x: hostile(x.flatten(1)), preprocessing, array="torch", classes=CLASSES
            )
        return self.make(classifier, self.threat, **self.options), hostile


def survey(setting: Setting) -> dict[bool, list[bool]]:
    """For each random network: was the image certified, and did any patch change the answer?"""
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(0)
    for seed in range(setting.networks):
        defense, hostile = setting.built(seed)
        image = torch.randint(0, 2, (1, *setting.image), generator=generator).float()
        defense.predict(image[None])  # paints over parts of noise, and these are no views of a clean image
        hostile.learning = True
        defense.predict(image[None])
        hostile.learning = False
        (certificate,) = defense.certify(image[None], [TRUE])
        claimed = certificate.detection_certified if defense.may_alert else certificate.certified
        claimed |= getattr(certificate, "row_certified", False)
        verdicts = defense.predict(attacked(image, setting.threat))
        outcomes[claimed].append(any(v.label != TRUE and not getattr(v, "alert", False) for v in verdicts))
    return outcomes


LINE = Threat.rectangle(1, 2)
DOT = Threat.square(1)
STRONG = {"scale": 2.0, "shift": 0.0}
"""Clipping for the small logits of these networks."""
ENLARGED = Preprocessing(resize=(3, 13), interpolation="bilinear", fill=(0.5,))
SETTINGS = [
    Setting("DS, columns", Smoothing, LINE, (2, 9), {"keep": 1, "threshold": 0.3}),
    Setting("DS, rows", Smoothing, Threat.rectangle(2, 1), (9, 2), {"ablation": "rows", "keep": 1}),
    Setting("DS, blocks that go round", Smoothing, DOT, (4, 4), {"ablation": "blocks", "keep": 2}),
    Setting("DS, two patches", Smoothing, Threat.square(1, count=2), (1, 8), {"keep": 1}),
    Setting("DS, any rectangle of 2 px", Smoothing, Threat.any_rectangle(2), (2, 9), {"keep": 1}),
    Setting("DS, images that are enlarged", Smoothing, LINE, (2, 9), {"keep": 1}, preprocessing=ENLARGED),
    Setting("PG-DS", PatchGuardSmoothing, LINE, (2, 9), {"keep": 1}),
    Setting("PG-DS, wide bands", PatchGuardSmoothing, DOT, (2, 9), {"keep": 2, "ratio": 0.3}),
    Setting("CBN", ClippedBagNet, DOT, (4, 6), STRONG, field=2),
    Setting("CBN, a region", ClippedBagNet, Threat.square(1, region=Window(0, 0, 2, 2)), (4, 6), STRONG, field=2),
    Setting("CBN, two patches", ClippedBagNet, Threat.square(1, count=2), (3, 6), STRONG, field=1),
    Setting("BagCert", BagCert, DOT, (4, 6), field=2),
    Setting("BagCert, strides", BagCert, LINE, (7, 9), field=3, jump=2, loyalty=0.85),
    Setting("BagCert, any rectangle of 2 px", BagCert, Threat.any_rectangle(2), (5, 5), field=1),
    Setting("PG-BN", PatchGuard, DOT, (5, 6), field=2),
    Setting("PG-BN, strides", PatchGuard, LINE, (7, 9), field=3, jump=2, loyalty=0.8),
    Setting("PG-BN, only heavy windows", PatchGuard, DOT, (5, 6), {"ratio": 0.4}, field=2),
    Setting("PG-BN, any rectangle of 2 px", PatchGuard, Threat.any_rectangle(2), (4, 4), field=1),
    Setting("PatchGuard++", PatchGuardPlusPlus, DOT, (4, 5), {"threshold": 0.6}, field=2),
    Setting("PatchGuard++, strides", PatchGuardPlusPlus, LINE, (5, 7), {"threshold": 0.0}, field=3, jump=2),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_certified_images_survive_every_patch(setting: Setting) -> None:
    outcomes = survey(setting)
    assert len(outcomes[True]) >= 5  # certificates were given
    assert not any(outcomes[True])  # and every one of them held
    assert sum(outcomes[False]) >= 5  # while the attacker does fool what is not certified


# The same attacker must break certificates that are wrong on purpose, or it proves nothing.


class OneViewLess(Smoothing):
    """Counts one view less than the patch can reach."""

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        return super().worst_case_margin(image, label, footprint) + 2 * image.patches


def narrower(sight: ReceptiveFields) -> ReceptiveFields:
    """What a place sees, without its last row and column of pixels."""
    down, across = sight.down.copy(), sight.across.copy()
    for reached in (down, across):
        for row in reached:
            row[row.nonzero()[0][-1]] = False
    return ReceptiveFields(down, across)


def one_pixel_smaller(kind: type[Defense[Any, Any]]) -> type[Defense[Any, Any]]:
    """The defense with receptive fields, or bands, taken for one pixel smaller than they are."""

    class Careless(kind):  # type: ignore[misc,valid-type]
        def check_size(self, size: Size) -> None:
            super().check_size(size)
            fields, _ = self._fields[size]
            self._fields[size] = fields, narrower(fields).footprints(self.threat)

    return Careless


class Unclipped(ClippedBagNet):
    """Believes the bound of clipped logits for logits that are not."""

    def transform_scores(self, scores: Tensor) -> Tensor:
        return scores


class NoDrop(BagCert):
    """Forgets that a place can change sides, and counts only the vote it loses."""

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        return summed_margin(image, label, footprint, max_drop=0.0)


class NoSecondWindow(PatchGuard):
    """Forgets that the true class loses a window of its own."""

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        return super().worst_case_margin(image, label, footprint) + image.low[label].max()


class Unsure(PatchGuardPlusPlus):
    """Certifies at a lower confidence than alerts ask for."""

    def certificate(self, image: ImageScores, label: int) -> Any:
        threshold, self.threshold = self.threshold, 0.0
        certificate = super().certificate(image, label)
        self.threshold = threshold
        return certificate


WEAKENED = [
    Setting("DS: one view less", OneViewLess, LINE, (2, 9), {"keep": 1}),
    Setting("PG-DS: smaller bands", one_pixel_smaller(PatchGuardSmoothing), DOT, (2, 9), {"keep": 2}),
    Setting("CBN: unclipped", Unclipped, DOT, (4, 6), field=2),
    Setting("CBN: smaller fields", one_pixel_smaller(ClippedBagNet), DOT, (4, 6), STRONG, field=2),
    Setting("BagCert: no drop", NoDrop, DOT, (4, 6), field=2),
    Setting("BagCert: smaller fields", one_pixel_smaller(BagCert), DOT, (4, 6), field=2),
    Setting("PG-BN: one window only", NoSecondWindow, DOT, (4, 5), field=2),
    Setting("PG-BN: smaller fields", one_pixel_smaller(PatchGuard), DOT, (5, 6), field=2),
    Setting("PatchGuard++: unsure", Unsure, DOT, (4, 5), {"threshold": 0.98}, field=2),
    Setting("PatchGuard++: smaller fields", one_pixel_smaller(PatchGuardPlusPlus), DOT, (4, 5), field=2),
]


@pytest.mark.parametrize("setting", WEAKENED, ids=lambda s: s.name)
def test_the_attacker_breaks_a_weakened_certificate(setting: Setting) -> None:
    assert any(survey(setting)[True])


def random_bounded(seed: int, kind: type[IntervalNet], side: int = 4) -> TorchClassifier:
    """A small random network with bounds, its last layer made so that class TRUE is often ahead."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, 3, 2, 1, 1),
        nn.ReLU(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(3 * side * side, 6),
        nn.ReLU(),
        nn.Linear(6, CLASSES),
    ]
    nn.init.normal_(layers[-1].bias, std=0.3)
    return TorchClassifier(kind(*layers).eval(), Preprocessing(mean=(0.4,), std=(0.3,)), classes=CLASSES)


def bounded_survey(kind: type[IntervalNet], threat: Threat) -> dict[bool, list[bool]]:
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        defense = IntervalBounds(random_bounded(seed, kind), threat)
        image = torch.rand(1, 4, 4, generator=generator)
        label = defense.predict(image[None])[0].label
        (certificate,) = defense.certify(image[None], [label])
        fooled = any(v.label != label for v in defense.predict(attacked(image, threat)))
        outcomes[certificate.certified].append(fooled)
    return outcomes


@pytest.mark.parametrize("threat", [DOT, Threat.square(2), Threat.any_rectangle(2)], ids=str)
def test_images_certified_by_bounds_survive_every_patch(threat: Threat) -> None:
    outcomes = bounded_survey(IntervalNet, threat)
    assert len(outcomes[True]) >= 5
    assert not any(outcomes[True])
    assert sum(outcomes[False]) >= 5


class NarrowBoxes(IntervalNet):
    """Takes a patch for a tenth as strong as it is."""

    def behind(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        middle, half = (low + high) / 2, (high - low) / 20
        return super().behind(middle - half, middle + half, labels)


def test_the_attacker_breaks_bounds_for_a_tenth_of_the_colours() -> None:
    assert any(bounded_survey(NarrowBoxes, Threat.square(2))[True])


@pytest.mark.parametrize("kind", [PatchGuard, PatchGuardPlusPlus])
def test_two_patches_are_refused_where_the_proof_is_for_one(kind: type[Defense[Any, Any]]) -> None:
    setting = Setting("two", kind, Threat.square(1, count=2), (4, 4), field=2)
    with pytest.raises(Exception, match="is for one patch, got 2 patches of 1x1"):
        setting.built(0)


@pytest.mark.parametrize("kind", [ClippedBagNet, PatchGuard, BagCert, PatchGuardPlusPlus])
def test_receptive_fields_of_resized_images_are_refused_on_the_source_grid(kind: type[Defense[Any, Any]]) -> None:
    """Resizing spreads a patch, so fields counted on the input say nothing about the image as it came."""
    module = RandomBag(Hostile(0, 1.0, 1.0), 2, 1).eval()
    classifier = TorchClassifier(module, Preprocessing(resize=(8, 8)), classes=CLASSES)
    with pytest.raises(InputError, match="use a threat on the input grid"):
        kind(classifier, DOT).predict(torch.zeros(1, 1, 4, 4))
    (verdict,) = kind(classifier, Threat.square(1, grid="input")).predict(torch.zeros(1, 1, 4, 4))
    assert 0 <= verdict.label < CLASSES


@pytest.mark.parametrize("name", ["ablated", "smoothed-vit"])
def test_hidden_pixels_do_not_move_the_base_classifiers_of_smoothing(name: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"width": 24, "depth": 2} if name == "smoothed-vit" else {"channels": (8, 8, 8, 8)}
    network = build_network(name, options).eval()
    for weights in network.parameters():  # new ones have branches that are switched off
        nn.init.normal_(weights, std=0.2)
    hidden = torch.ones(1, 1, 32, 32)
    hidden[..., 10:14] = 0
    shown = torch.rand(1, 3, 32, 32) * (1 - hidden)
    with torch.inference_mode():
        # What Smoothing hides is one colour; the ResNet does not even see that.
        first = network(torch.cat([shown, hidden], 1))
        colours = shown + hidden * (0.7 if name == "ablated" else 0.0)
        assert torch.equal(network(torch.cat([colours, hidden], 1)), first)
        moved = shown + 0.5 * (1 - hidden)
        assert not torch.equal(network(torch.cat([moved, hidden], 1)), first)
