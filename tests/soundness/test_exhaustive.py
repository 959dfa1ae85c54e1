"""An attacker that tries everything, against every certificate we give.

Images are tiny and pixels take few values, so every patch content at every position can be
tried. Classifiers are random functions of the pixels they see, thousands of them. A certified
image that some patch fools would be a hole in the theorem, the code, or the masks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from patchcleanser import (
    CallableClassifier,
    ChallengerMasking,
    DoubleMasking,
    MaskSet,
    MinorityReports,
    Preprocessing,
    Threat,
    Window,
)
from patchcleanser.core.geometry import Size
from patchcleanser.defenses.defense import Defense

TRUE = 0
VALUES = (0.0, 1.0)


class RandomFunction:
    """A random function of all pixels, as hostile as a function can be.

    Views of the clean image (under whatever masks) get label TRUE with probability `loyalty`,
    else 1 or 2. Everything else, so whatever lets one pixel of a patch be seen, gets label 1
    nine times in ten. Pixels are hashed: what leaks past a mask is noticed.
    """

    def __init__(self, seed: int, loyalty: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randint(1, 2**61, (4096,), generator=generator) | 1
        self.loyalty = loyalty
        self.views: set[int] | None = set()

    def learn(self, defense: Defense[Any, Any], image: Tensor) -> None:
        """Remember every view of the clean image that this defense can ask for."""
        self.views, views = None, set()
        self.recorded_views = views
        defense.certify(image[None], [TRUE], maps=True)
        self.views = views

    def __call__(self, images: Tensor) -> Tensor:
        cells = (images.flatten(1) * 1000).round().long() + 7
        mixed = (cells * self.keys[: cells.shape[1]]).sum(1)
        for shift, key in ((29, 0x3F58476D1CE4E5B9), (32, 0x14D049BB133111EB)):
            mixed = (mixed ^ (mixed >> shift)) * key
        if self.views is None:
            self.recorded_views |= set(mixed.tolist())
        clean = torch.tensor([self.views is None or code in self.views for code in mixed.tolist()])
        draw = ((mixed >> 20) & 0xFFFF).double() / 65536
        confidence = 1 + 3 * ((mixed >> 45) & 0xFF).double() / 255  # confidences between 0.58 and 0.97
        wrong = 1 + ((mixed >> 40) & 1)
        label = torch.where(draw < self.loyalty, 0, wrong)
        label = torch.where(clean | (draw > 0.9), label, 1)
        return torch.nn.functional.one_hot(label, 3) * confidence[:, None]


def attacked(image: Tensor, threat: Threat) -> Tensor:
    """The image under every content at every placement of the threat's patches."""
    size: Size = (image.shape[1], image.shape[2])
    room = threat.room(size)
    stamps = []
    for shape in threat.shapes(size):
        for top in range(room.top, room.bottom - shape[0] + 1):
            for left in range(room.left, room.right - shape[1] + 1):
                for content in itertools.product(VALUES, repeat=shape[0] * shape[1]):
                    stamps.append((top, left, torch.tensor(content).view(shape)))
    copies = []
    for chosen in itertools.combinations_with_replacement(stamps, threat.count):
        copy = image.clone()
        for top, left, content in chosen:
            copy[:, top : top + content.shape[0], left : left + content.shape[1]] = content
        copies.append(copy)
    return torch.stack(copies).unique(dim=0)


@dataclass(frozen=True)
class Setting:
    name: str
    threat: Threat
    image: Size
    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    loyalty: float = 0.94
    classifiers: int = 250


def redundant(threat: Threat, image: Size) -> MaskSet:
    """More masks than needed, so that the row certificate differs from two-mask correctness."""
    return MaskSet(image, tuple(m for k in (2, 3) for m in MaskSet.build(threat, image=image, masks=k).masks))


BAND = Threat.rectangle(1, 2)
SETTINGS = [
    Setting("rectangle", BAND, (3, 4), {"masks": 2}),
    Setting("square", Threat.square(2), (4, 4), {"masks": 2}, classifiers=60),
    Setting("every position its own mask", Threat.rectangle(1, 2), (1, 5), {"stride": 1}),
    Setting("more masks than needed", BAND, (1, 6), {"mask_set": redundant(BAND, (1, 6))}, loyalty=0.9),
    Setting("two patches", Threat.square(1, count=2), (2, 3), {"masks": (1, 3)}, loyalty=0.97, classifiers=200),
    Setting("three patches", Threat.square(1, count=3), (1, 4), {"masks": (1, 3)}, loyalty=0.96, classifiers=150),
    Setting("any rectangle of 2 px", Threat.any_rectangle(2), (3, 3), {"masks": 2}, loyalty=0.97),
    Setting("a region", Threat.square(1, region=Window(1, 1, 2, 2)), (3, 4), {"masks": 2}),
    Setting(
        "source grid, bilinear resize",
        BAND,
        (3, 4),
        {"masks": 2},
        Preprocessing(resize=(5, 7), interpolation="bilinear", mean=(0.3,), std=(0.5,)),
    ),
    Setting(
        "source grid, bicubic resize of the short side and crop",
        BAND,
        (3, 5),
        {"masks": 2},
        Preprocessing(resize=6, crop=(5, 5), interpolation="bicubic", mean=(0.3,), std=(0.5,)),
    ),
    Setting("input grid", Threat.rectangle(1, 2, grid="input"), (3, 4), {"masks": 2}),
]
DEFENSES = {
    "double-masking": lambda model, s: DoubleMasking(model, s.threat, **s.options),
    "challenger": lambda model, s: ChallengerMasking(model, s.threat, **s.options),
    "challenger, random order": lambda model, s: ChallengerMasking(model, s.threat, seed=5, **s.options),
}
COARSE_SETTINGS = [
    Setting("rectangle", BAND, (3, 4), {"masks": 3}, loyalty=0.97),
    Setting("more masks than needed", BAND, (1, 6), {"mask_set": redundant(BAND, (1, 6))}, loyalty=0.94),
    Setting("two patches", Threat.square(1, count=2), (2, 3), {"masks": (1, 3)}, loyalty=0.98, classifiers=200),
    Setting("any rectangle of 2 px", Threat.any_rectangle(2), (3, 3), {"masks": 3}, loyalty=0.985),
    Setting("a region", Threat.square(1, region=Window(1, 1, 2, 3)), (3, 4), {"masks": 3}, loyalty=0.97),
    Setting(
        "source grid, bilinear resize",
        BAND,
        (3, 4),
        {"masks": 3},
        Preprocessing(resize=(5, 7), interpolation="bilinear", mean=(0.3,), std=(0.5,)),
        loyalty=0.97,
    ),
    Setting("input grid", Threat.rectangle(1, 2, grid="input"), (3, 4), {"masks": 3}, loyalty=0.97),
]
COARSE_DEFENSES = {
    "double-masking": lambda model, s: DoubleMasking(model, s.threat, coarse=2, **s.options),
    "challenger": lambda model, s: ChallengerMasking(model, s.threat, coarse=2, **s.options),
}


ENOUGH = pytest.mark.parametrize("enough", [12, pytest.param(1000, marks=pytest.mark.slow, id="all")])
"""How many claims are attacked; a few in the fast tests."""


def survey(setting: Setting, make: Any, claim: Any, enough: int = 1000) -> dict[bool, list[bool]]:
    """For each random classifier: did the claim hold, and did any patch change the answer?

    Stops after `enough` claims that held and as many images without one that were fooled.
    """
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(0)
    for seed in range(setting.classifiers):
        function = RandomFunction(seed, setting.loyalty)
        model = CallableClassifier(function, setting.preprocessing, array="torch", classes=3)
        defense: Defense[Any, Any] = make(model, setting)
        image = torch.randint(0, 2, (1, *setting.image), generator=generator).float()
        function.learn(defense, image)
        verdicts = defense.predict(attacked(image, setting.threat))
        fooled = any(not getattr(v, "alert", False) and v.label != TRUE for v in verdicts)
        outcomes[claim(defense, image)].append(fooled)
        if len(outcomes[True]) >= enough and sum(outcomes[False]) >= enough:
            break
    return outcomes


def row_certified(defense: Defense[Any, Any], image: Tensor) -> bool:
    (certificate,) = defense.certify(image[None], [TRUE])
    assert certificate.row_certified or not certificate.certified
    return bool(certificate.row_certified)


@ENOUGH
@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_certified_images_survive_every_patch(setting: Setting, defense: str, enough: int) -> None:
    outcomes = survey(setting, DEFENSES[defense], row_certified, enough)
    assert len(outcomes[True]) >= 10  # certificates were given
    assert not any(outcomes[True])  # and every one of them held
    assert sum(outcomes[False]) >= 10  # while the attacker does fool what is not certified


@ENOUGH
@pytest.mark.parametrize("defense", COARSE_DEFENSES)
@pytest.mark.parametrize("setting", COARSE_SETTINGS, ids=lambda s: s.name)
def test_certified_images_survive_every_patch_after_a_coarse_round(setting: Setting, defense: str, enough: int) -> None:
    outcomes = survey(setting, COARSE_DEFENSES[defense], row_certified, enough)
    assert len(outcomes[True]) >= 10
    assert not any(outcomes[True])
    assert sum(outcomes[False]) >= 10


def test_the_row_certificate_certifies_images_that_two_mask_correctness_does_not() -> None:
    setting = SETTINGS[3]
    more = 0
    for seed in range(setting.classifiers):
        function, image = RandomFunction(seed, setting.loyalty), torch.ones(1, *setting.image)
        model = CallableClassifier(function, array="torch", classes=3)
        defense = DoubleMasking(model, setting.threat, **setting.options)
        function.learn(defense, image)
        (certificate,) = defense.certify(image[None], [TRUE])
        more += certificate.row_certified and not certificate.certified
    assert more >= 5


@ENOUGH
@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_images_certified_for_detection_are_never_wrong_silently(threshold: float, enough: int) -> None:
    setting = Setting("detection", BAND, (3, 4), {"masks": 2}, loyalty=0.94)

    def claim(defense: Defense[Any, Any], image: Tensor) -> bool:
        return bool(defense.certify(image[None], [TRUE])[0].detection_certified)

    outcomes = survey(
        setting, lambda m, s: MinorityReports(m, s.threat, threshold=threshold, **s.options), claim, enough
    )
    assert len(outcomes[True]) >= 10
    assert not any(outcomes[True])
    assert sum(outcomes[False]) >= 10


# The same attacker must break certificates that are wrong on purpose, or it proves nothing.


def one_mask_only(defense: Defense[Any, Any], image: Tensor) -> bool:
    """Unsound: claims a certificate when the one-mask labels alone are right."""
    return set(defense.predict(image[None])[0].one_mask_labels) == {TRUE}


def test_the_attacker_breaks_a_certificate_from_one_mask_labels_alone() -> None:
    outcomes = survey(SETTINGS[0], DEFENSES["double-masking"], one_mask_only)
    assert any(outcomes[True])


def test_the_attacker_breaks_a_certificate_that_forgets_the_coarse_labels() -> None:
    def fine_certificate(defense: Defense[Any, Any], image: Tensor) -> bool:
        return row_certified(DoubleMasking(defense.classifier, defense.threat, masks=3), image)

    outcomes = survey(COARSE_SETTINGS[0], COARSE_DEFENSES["double-masking"], fine_certificate)
    assert any(outcomes[True])


def test_the_attacker_breaks_masks_that_are_a_pixel_too_small() -> None:
    def careless(model: CallableClassifier, setting: Setting) -> DoubleMasking:
        smaller = Threat.square(1)  # masks for a smaller patch than the attacker's
        return DoubleMasking(model, smaller, masks=2)

    outcomes = survey(SETTINGS[0], careless, row_certified)
    assert any(outcomes[True])


def test_the_attacker_breaks_an_input_grid_certificate_for_a_patch_on_the_source() -> None:
    """SPEC trap 1: a 1×2 patch enlarged twofold is not a 2×4 patch; resampling spreads it."""
    setting = Setting(
        "spread by resizing",
        BAND,
        (3, 4),
        preprocessing=Preprocessing(resize=(6, 8), interpolation="bicubic"),
        loyalty=0.97,
    )

    def careless(model: CallableClassifier, setting: Setting) -> DoubleMasking:
        return DoubleMasking(model, Threat.rectangle(2, 4, grid="input"), masks=2)

    outcomes = survey(setting, careless, row_certified)
    assert any(outcomes[True])


def test_the_attacker_breaks_one_patch_certificates_with_two_patches() -> None:
    setting = Setting("two against one", Threat.square(1, count=2), (2, 3), loyalty=0.97, classifiers=150)
    outcomes = survey(setting, lambda m, _: DoubleMasking(m, Threat.square(1), masks=(1, 3)), row_certified)
    assert any(outcomes[True])
