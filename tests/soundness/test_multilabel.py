"""An attacker that tries everything, against certificates of several classes at once.

Images are tiny and pixels take two values, so every content of every placement is tried. A classifier is a random
function of the pixels that it sees, and as hostile as can be: whatever lets a pixel of a patch be seen turns most
classes around. A bound that some patch beats would be a hole in the theorem, the code or the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchcleanser import CallableClassifier, MaskSet, Preprocessing, Threat, Window
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNMASKED
from patchcleanser.core.multilabel import Bools, ScoreBounds, Scores
from patchcleanser.defenses.multilabel_masking import MultiLabelExamination, MultiLabelMasking
from patchcleanser.errors import CoverError
from soundness.test_exhaustive import attacked

CLASSES = 5
TRUTH = np.array([True, True, True, False, False])


class RandomScores:
    """Random scores of each class, from a hash of all pixels that can be seen.

    A view of the clean image has each class right with probability `loyalty`. In every other view it is wrong nine
    times in ten, or NaN.
    """

    def __init__(self, seed: int, loyalty: float) -> None:
        self.seed, self.loyalty = seed, loyalty
        self.clean: set[bytes] | None = None
        self.memory: dict[bytes, list[float]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        views = (images[:, 0] * 250).round().to(torch.uint8).flatten(1).numpy()
        return torch.tensor([self.scores(view.tobytes()) for view in views])

    def scores(self, view: bytes) -> list[float]:
        if view not in self.memory:
            random = np.random.default_rng([self.seed, *view])
            right = random.random(CLASSES) < (self.loyalty if self.clean is None or view in self.clean else 0.1)
            scores = np.where(right == TRUTH, 1.0, -1.0) * (0.1 + random.random(CLASSES))
            if self.clean is not None and view not in self.clean and random.random() < 0.1:
                scores[random.integers(CLASSES)] = np.nan
            self.memory[view] = scores.tolist()
        return self.memory[view]

    def learn(self, defense: MultiLabelMasking, image: Tensor) -> MultiLabelExamination:
        """Examine the clean image; from now on all views that were not needed for it are hostile."""
        (examined,) = defense.examine(image[None], TRUTH[None], maps=True)
        self.clean = set(self.memory)
        return examined


@dataclass(frozen=True)
class Setting:
    name: str
    threat: Threat
    image: Size
    masks: int | tuple[int, int] = 2
    loyalty: float = 0.97
    classifiers: int = 40


SETTINGS = [
    Setting("1x2 px", Threat.rectangle(1, 2), (2, 5)),
    Setting("a square, every position", Threat.square(1), (2, 3), masks=(2, 3)),
    Setting("every rectangle of 2 px", Threat.any_rectangle(2), (3, 3)),
    Setting("a region", Threat.square(1, region=Window(0, 1, 2, 3)), (2, 5)),
    Setting("two patches", Threat.square(1, count=2), (1, 5), loyalty=0.99),
]

Right = Bools
"""[placements, classes] as a certificate computes it, in one of several ways."""
Claim = Callable[[MultiLabelMasking, MultiLabelExamination], Right]
Make = Callable[..., MultiLabelMasking]


def claimed(defense: MultiLabelMasking, examined: MultiLabelExamination) -> Right:
    return examined.bounds.placed(examined.hides).right(TRUTH, defense.score_thresholds)


def bounds_with(index: Any) -> Claim:
    """A certificate from other rows of the table: `index` takes that of the unions."""

    def claim(defense: MultiLabelMasking, examined: MultiLabelExamination) -> Right:
        scores: Scores = examined.table.scores[:UNMASKED]
        bounds = ScoreBounds.of(scores, index(examined.table.mask_set.unions.index))
        return bounds.placed(examined.hides).right(TRUTH, defense.score_thresholds)

    return claim


@dataclass(frozen=True)
class Outcome:
    """Of one classifier: what is promised, and the worst that any patch does."""

    promised: tuple[int, int]
    reached: tuple[int, int]
    """The fewest true positives, and the most false ones."""
    turned: int
    """Classes that are certified everywhere, and wrong in some attacked image."""
    certified: int

    @property
    def broken(self) -> bool:
        return self.reached[0] < self.promised[0] or self.reached[1] > self.promised[1] or self.turned > 0


def survey(setting: Setting, claim: Claim = claimed, make: Make = MultiLabelMasking) -> list[Outcome]:
    outcomes = []
    for seed in range(setting.classifiers):
        function = RandomScores(seed, setting.loyalty)
        model = CallableClassifier(function, Preprocessing(), array="torch", classes=CLASSES)
        defense = make(model, setting.threat, masks=setting.masks)
        random = torch.Generator().manual_seed(seed)
        image = torch.randint(0, 2, (1, *setting.image), generator=random).float().expand(3, -1, -1).clone()
        right = claim(defense, function.learn(defense, image))
        changed = attacked(image[:1], setting.threat).expand(-1, 3, -1, -1)
        answers = [list(verdict.present) for verdict in defense.predict(changed)]
        present = np.zeros((len(answers), CLASSES), dtype=bool)
        for row, numbers in zip(present, answers, strict=True):
            row[numbers] = True
        everywhere = right.all(axis=0)
        outcomes.append(
            Outcome(
                (int((right & TRUTH).sum(axis=1).min()), int((~right & ~TRUTH).sum(axis=1).max())),
                (int((present & TRUTH).sum(axis=1).min()), int((present & ~TRUTH).sum(axis=1).max())),
                int((everywhere & (present != TRUTH).any(axis=0)).sum()),
                int(everywhere.sum()),
            )
        )
    return outcomes


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_no_patch_beats_the_counts_or_turns_a_certified_class(setting: Setting) -> None:
    outcomes = survey(setting)
    assert sum(outcome.certified for outcome in outcomes) >= 20
    assert any(outcome.certified < CLASSES for outcome in outcomes)  # classes that are not certified lie beside them
    assert not [outcome for outcome in outcomes if outcome.broken]


def test_the_attacker_reaches_the_promised_counts_for_some_classifiers() -> None:
    outcomes = survey(SETTINGS[0])
    assert sum(0 < outcome.promised[0] == outcome.reached[0] for outcome in outcomes) >= 3
    assert sum(outcome.promised[1] == outcome.reached[1] > 0 for outcome in outcomes) >= 3


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2]], ids=lambda s: s.name)
def test_at_each_place_no_more_classes_are_turned_than_the_map_counts(setting: Setting) -> None:
    checked = 0
    for seed in range(12):
        function = RandomScores(seed, setting.loyalty)
        model = CallableClassifier(function, Preprocessing(), array="torch", classes=CLASSES)
        defense = MultiLabelMasking(model, setting.threat, masks=setting.masks)
        image = torch.zeros(3, *setting.image)
        weak = function.learn(defense, image).certificate.weak or {}
        for (height, width), counts in weak.items():
            for (top, left), count in np.ndenumerate(counts):
                patch = Threat.rectangle(height, width, region=Window(top, left, height, width))
                verdicts = defense.predict(attacked(image[:1], patch).expand(-1, 3, -1, -1))
                turned = {c for v in verdicts for c in range(CLASSES) if (c in v.present) != TRUTH[c]}
                assert len(turned) <= count
                checked += int(count < CLASSES)
    assert checked >= 50


# The same attacker must break certificates that are wrong on purpose, or it proves nothing.


def test_the_attacker_breaks_rows_without_the_last_mask() -> None:
    assert sum(outcome.broken for outcome in survey(SETTINGS[0], bounds_with(lambda index: index[:, :-1]))) >= 1


def test_the_attacker_breaks_a_certificate_from_one_mask_decisions_only() -> None:
    def diagonal(index: Any) -> Any:
        return np.diagonal(index)[:, None]

    assert sum(outcome.broken for outcome in survey(SETTINGS[0], bounds_with(diagonal))) >= 5


def test_the_attacker_breaks_masks_that_are_a_pixel_too_small() -> None:
    def careless(model: CallableClassifier, threat: Threat, **options: Any) -> MultiLabelMasking:
        return MultiLabelMasking(model, Threat.square(1), **options)

    wider = Setting("masks side by side", Threat.rectangle(1, 2), (1, 6))
    assert not [outcome for outcome in survey(wider) if outcome.broken]
    assert sum(outcome.broken for outcome in survey(wider, make=careless)) >= 5


def test_the_attacker_breaks_a_count_at_the_best_placement() -> None:
    def luckiest(defense: MultiLabelMasking, examined: MultiLabelExamination) -> Right:
        right = claimed(defense, examined)
        return right[[right.sum(axis=1).argmax()]]

    assert sum(outcome.broken for outcome in survey(SETTINGS[0], luckiest)) >= 1


def test_masks_of_the_users_own_must_cover() -> None:
    with pytest.raises(CoverError, match="does not cover the threat"):
        MultiLabelMasking(
            CallableClassifier(RandomScores(0, 1.0), array="torch", classes=CLASSES),
            Threat.square(2),
            mask_set=MaskSet.build(Threat.square(1), image=(3, 4), masks=2),
        )
