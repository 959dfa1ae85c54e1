"""An attacker that tries everything, against certificates of objects, on detectors that are as hostile as can be.

Images are tiny and pixels take two values, so every content of every placement is tried. A detector is a random
function of the pixels that it sees. A certified object that some patch hides would be a hole in the theorem, the code
or the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchcleanser import Threat
from patchcleanser.core.detections import Boxes, Detections, pixel_window, promised_coverage
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.hiding import PLACES, Place, near_gap
from patchcleanser.defenses.object_seeker import ObjectSeeker, best_coverage, hidden
from patchcleanser.errors import NotAFunctionError
from soundness.test_exhaustive import attacked

PRUNE = 0.75


class RandomDetector:
    """Random boxes, from a hash of all pixels that can be seen.

    With probability `loyalty` a view of the clean image shows the object, its box a little off. Every other view shows
    boxes of both classes at random, among them large ones that cover others, and never the object.
    """

    classes = ("object", "other")
    device = torch.device("cpu")
    fingerprint = "random"

    def __init__(self, seed: int, truth: Boxes, loyalty: float) -> None:
        self.seed, self.truth, self.loyalty = seed, truth, loyalty
        self.clean: set[bytes] = set()
        self.memory: dict[bytes, Detections] = {}

    def __call__(self, image: Tensor) -> Detections:
        view = view_of(image)
        if view not in self.memory:
            self.memory[view] = self.detect(view, (image.shape[1], image.shape[2]))
        return self.memory[view]

    def detect(self, view: bytes, size: Size) -> Detections:
        random = np.random.default_rng([self.seed, *view])
        sides = np.array([size[1], size[0]] * 2)
        number = int(random.integers(0, 3))
        corners = np.sort(random.random((number, 2, 2)), axis=1).reshape(number, 4) * sides
        boxes = np.concatenate([corners, self.truth[None] + random.normal(0, 0.15, (1, 4))])
        labels = np.append(random.integers(0, 2, number), 0 if random.random() < self.loyalty else 1)
        if view not in self.clean:
            labels[-1] = 1
            if random.random() < 0.5:  # a box that covers just enough of the object's box to replace it
                boxes = np.concatenate([boxes, boxes[-1:] - [0, 0, 0.2 * (self.truth[2] - self.truth[0]), 0]])
                labels = np.append(labels, 0)
        return Detections(boxes, labels, np.full(len(boxes), 0.9))

    def learn(self, defense: ObjectSeeker, image: Tensor) -> None:
        """Remember the clean image, and every masked view of it."""
        masks = defense.mask_set((image.shape[1], image.shape[2])).masks
        self.clean = {view_of(image), *(view_of(hidden(image, mask)) for mask in masks)}


def view_of(image: Tensor) -> bytes:
    return (image[0] * 250).round().to(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Setting:
    name: str
    threat: Threat
    image: Size
    box: tuple[float, float, float, float]
    masks: int | tuple[int, int] | None = None
    lines: int = 0
    loyalty: float = 0.9
    detectors: int = 60


ANY = Threat.any_rectangle(share=1.0)
SETTINGS = [
    Setting("windows", Threat.rectangle(1, 2), (3, 5), (0.2, 0.0, 2.0, 2.0), masks=(2, 2)),
    Setting("windows, every position", Threat.square(1), (3, 4), (1.0, 0.5, 3.0, 2.5), masks=(3, 4)),
    Setting("every rectangle of 2 px", Threat.any_rectangle(2), (3, 4), (0.0, 0.0, 2.0, 1.6), masks=3),
    Setting("windows and half-planes", Threat.rectangle(1, 2), (2, 6), (0.0, 0.0, 2.0, 2.0), masks=2, lines=3),
    Setting("half-planes, any size", ANY, (1, 7), (0.0, 0.0, 2.0, 1.0), lines=6),
    Setting("a region", Threat.square(1, region=Window(0, 2, 3, 2)), (3, 5), (0.0, 0.0, 2.0, 3.0), masks=2),
]

Promises = dict[Place, float | None]
Claim = Callable[[ObjectSeeker, Tensor, Detections], Promises]


def distance(patch: Window, box: Window) -> int:
    """Pixels between two windows, the larger of rows and columns; -1 if they share a pixel."""
    rows = max(box.top - patch.bottom, patch.top - box.bottom)
    columns = max(box.left - patch.right, patch.left - box.right)
    return -1 if rows < 0 and columns < 0 else max(rows, columns)


def place_of(patch: Window, box: Window, image: Size) -> Place:
    gap = distance(patch, box)
    return "over" if gap < 0 else "near" if gap < near_gap(image) else "far"


def every_patch(setting: Setting) -> list[Window]:
    """Every placement of every rectangle that the threat means; for an area also the smaller ones."""
    height, width = setting.image
    room = setting.threat.room(setting.image)
    if setting.threat.shape == ANY.shape:
        limit = height * width
    else:
        limit = max(h * w for h, w in setting.threat.shapes(setting.image))
    shapes = [(h, w) for h in range(1, height + 1) for w in range(1, width + 1) if h * w <= limit]
    if not str(setting.threat.shape).startswith("any"):
        shapes = setting.threat.shapes(setting.image)
    return [
        Window(top, left, h, w)
        for h, w in shapes
        for top in range(room.top, room.bottom - h + 1)
        for left in range(room.left, room.right - w + 1)
    ]


def contents(image: Tensor, patch: Window) -> Tensor:
    """The image under every content of this patch."""
    return attacked(image[:1], Threat.rectangle(patch.height, patch.width, region=patch)).expand(-1, 3, -1, -1)


def certificate_of(defense: ObjectSeeker, image: Tensor, truth: Detections) -> Promises:
    (certificate,) = defense.certify(image, truth.boxes, truth.classes)
    return {place: getattr(certificate, place) for place in PLACES}


Outcome = tuple[Place, float, float]
"""The class of placements, the promised share, and the least that any patch leaves."""


def survey(
    setting: Setting, claim: Claim = certificate_of, make: Callable[..., ObjectSeeker] = ObjectSeeker
) -> list[Outcome]:
    """The outcomes of random detectors, for what the claim promises."""
    outcomes: list[Outcome] = []
    truth = Detections([setting.box], [0], [1.0])
    window = pixel_window(truth.boxes[0], setting.image)
    for seed in range(setting.detectors):
        detector = RandomDetector(seed, truth.boxes[0], setting.loyalty)
        defense = make(detector, setting.threat, masks=setting.masks, lines=setting.lines, prune=PRUNE)
        random = torch.Generator().manual_seed(seed)
        image = torch.randint(0, 2, (1, *setting.image), generator=random).float().expand(3, -1, -1).clone()
        detector.learn(defense, image)
        promised, answers = claim(defense, image, truth), {}
        least: dict[Place, float] = {}
        for patch in every_patch(setting):
            place = place_of(patch, window, setting.image)
            if promised[place]:
                for changed in contents(image, patch):
                    view = view_of(changed)
                    if view not in answers:
                        answers[view] = float(best_coverage(truth, defense.predict(changed))[0])
                    least[place] = min(least.get(place, 1.0), answers[view])
        outcomes += [(place, promised[place] or 0.0, share) for place, share in least.items()]
    return outcomes


def broken(outcomes: list[Outcome]) -> int:
    return sum(share < promise for _, promise, share in outcomes)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_no_patch_leaves_less_of_an_object_than_its_certificate_promises(setting: Setting) -> None:
    outcomes = survey(setting)
    assert len(outcomes) >= 10  # promises were made
    assert not broken(outcomes)


def test_promises_are_made_for_patches_over_near_and_far_from_an_object() -> None:
    assert {place for place, _, _ in survey(SETTINGS[0])} == set(PLACES)


# The same attacker must break certificates that are wrong on purpose, or it proves nothing.


def test_the_attacker_refutes_a_certificate_that_ignores_masked_detections() -> None:
    def from_base_boxes(defense: ObjectSeeker, image: Tensor, truth: Detections) -> Promises:
        """Unsound: the undefended detector shows the object, and no masked detection is looked at."""
        base = defense.examine(image, truth.boxes, truth.classes).base
        return dict.fromkeys(PLACES, promised_coverage(base, truth.boxes[0], 0, prune=PRUNE))

    assert broken(survey(SETTINGS[0], from_base_boxes)) >= 5


def test_the_attacker_breaks_a_certificate_that_forgets_what_pruning_may_take() -> None:
    def generous(defense: ObjectSeeker, image: Tensor, truth: Detections) -> Promises:
        """Unsound: takes a masked box to be in the answer as it is, but another one may replace it."""
        defense.prune = 1.0
        promised = certificate_of(defense, image, truth)
        defense.prune = PRUNE
        return promised

    assert broken(survey(SETTINGS[0], generous)) >= 1


def test_the_attacker_breaks_masks_that_are_a_pixel_too_small() -> None:
    def careless(detector: RandomDetector, threat: Threat, **options: Any) -> ObjectSeeker:
        return ObjectSeeker(detector, Threat.square(1), **options)

    assert broken(survey(SETTINGS[0], make=careless)) >= 1


def test_the_attacker_breaks_a_certificate_that_counts_one_mask_for_all_placements() -> None:
    def best_mask(defense: ObjectSeeker, image: Tensor, truth: Detections) -> Promises:
        """Unsound: some mask shows the object, whichever placements it hides."""
        promises = defense.examine(image, truth.boxes, truth.classes).promises
        return dict.fromkeys(PLACES, float(promises.max()))

    assert broken(survey(SETTINGS[0], best_mask)) >= 5


class Wavering:
    """Sees the same bright box twice under another class each time; nothing in dark images."""

    classes, device, fingerprint = ("a", "b"), torch.device("cpu"), "wavering"
    calls = 0

    def __call__(self, image: Tensor) -> Detections:
        self.calls += 1
        everything = Detections([[0, 0, 4, 4]], [self.calls % 2], [0.9])
        return everything if image.max() > 0.8 else everything.above(1.0)


def test_a_detector_whose_classes_change_is_refused_though_its_first_image_is_empty() -> None:
    defense = ObjectSeeker(Wavering(), Threat.square(2), masks=2)
    dark, bright = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
    assert defense.certify(dark, [[0, 0, 4, 4]], [0])
    with pytest.raises(NotAFunctionError, match="other boxes, classes or scores the second time"):
        defense.certify(bright, [[0, 0, 4, 4]], [0])


class InPlace:
    """Sees an object if the upper left pixel is ten times as bright as the mean, by which it divides its input."""

    classes, device, fingerprint = ("a",), torch.device("cpu"), "in place"

    def __call__(self, image: Tensor) -> Detections:
        image /= image.mean()
        return Detections([[0, 0, 2, 2]], [0], [0.9 if image[0, 0, 0] > 10 else 0.0])


def test_a_detector_that_writes_into_its_input_does_not_carry_the_patch_into_masked_images() -> None:
    defense = ObjectSeeker(InPlace(), Threat.square(2), masks=2)
    image = torch.zeros(3, 8, 8)
    image[:, 0, 0] = 0.1
    clean, truth = image.clone(), Detections([[0, 0, 2, 2]], [0], [1.0])
    promised = certificate_of(defense, image, truth)
    assert torch.equal(image, clean)
    for patch in every_patch(Setting("", Threat.square(2), (8, 8), (0, 0, 2, 2))):
        changed = image.clone()
        changed[(..., *patch.slices)] = 1.0
        share = promised[place_of(patch, Window(0, 0, 2, 2), (8, 8))] or 0.0
        assert best_coverage(truth, defense.predict(changed))[0] >= share
