"""The attacker that tries everything, against certificates from a single pass of the network.

Networks are random functions of small fields, and every place that sees the patch may say anything. Each content of a
patch at each position is tried, and certificates weakened on purpose must break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Threat, TorchClassifier, Window
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNCERTAIN, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.mask_defense import MaskSets
from patchcleanser.defenses.one_pass import OnePass, OnePassEngine, Pooled
from patchcleanser.engine.masking import ImageState
from patchcleanser.errors import InputError
from patchcleanser.networks.visible_pooling import VisiblePooling

from . import test_local as local
from .test_local import CLASSES, DOT, LINE, Hostile, RandomBag, narrower, survey


@dataclass(frozen=True)
class Setting(local.Setting):
    """A defense by one pass, whose networks have receptive fields of `field` px."""

    loud: float = 90.0

    def built(self, seed: int) -> tuple[Defense[Any, Any], Hostile]:
        hostile = Hostile(seed, self.loyalty, self.loud)
        module = VisiblePooling(RandomBag(hostile, self.field, self.jump)).eval()
        return self.make(TorchClassifier(module, classes=CLASSES), self.threat, **self.options), hostile


def setting(name: str, threat: Threat, image: Size, field: int, jump: int = 1, **changes: Any) -> Setting:
    common: dict[str, Any] = {"make": OnePass, "loyalty": 0.8, "networks": 60}
    return Setting(name, threat=threat, image=image, field=field, jump=jump, **{**common, **changes})


SETTINGS = [
    setting("fields of 1 px", LINE, (3, 6), 1, options={"masks": 3}),
    setting("fields of 2 px", DOT, (6, 7), 2, options={"masks": 3}),
    setting("a square of 2 px", Threat.square(2), (5, 9), 2, options={"masks": (2, 4)}, networks=40),
    setting("strides", LINE, (7, 13), 3, 2, options={"masks": (2, 4)}, loyalty=0.75),
    setting("strides, and masks at every pixel", LINE, (7, 9), 3, 2, options={"stride": 1}, loyalty=0.75),
    setting("a stride of masks", DOT, (6, 6), 2, options={"stride": 2}),
    setting("a region", Threat.square(1, region=Window(0, 0, 3, 3)), (4, 5), 2, options={"masks": 2}, loyalty=0.65),
    setting("two patches", Threat.square(1, count=2), (2, 7), 1, options={"masks": (1, 7)}, loyalty=0.7, networks=40),
    setting("any rectangle of 2 px", Threat.any_rectangle(2), (6, 6), 1, options={"masks": 4}),
    setting("the input grid", Threat.square(1, grid="input"), (5, 6), 2, options={"masks": 3}, loyalty=0.75),
]


@pytest.mark.parametrize("case", SETTINGS, ids=lambda s: s.name)
def test_certified_images_survive_every_patch(case: Setting) -> None:
    outcomes = survey(case)
    assert len(outcomes[True]) >= 5  # certificates were given
    assert not any(outcomes[True])  # and every one of them held
    assert sum(outcomes[False]) >= 5  # while the attacker does fool what is not certified


class SmallFootprint(OnePass):
    """Takes the fields of its scores for a pixel smaller than they are, when it hides them and when it builds masks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        fields = self.engine.source.receptive_fields  # type: ignore[attr-defined]
        self.engine.source.receptive_fields = lambda size: narrower(fields(size))  # type: ignore[attr-defined]


class SubtractingEngine(OnePassEngine):
    """Subtracts what is hidden from the sum of all scores, in floating point."""

    def pooled(self, images: list[ImageState]) -> Pooled:  # type: ignore[override]
        local = self.source.module.local(torch.stack([image.pixels for image in images])).flatten(2).transpose(1, 2)
        visible = self._visible_scores(images[0].table.mask_set, local.device).float()
        sums = local.sum(1, keepdim=True) - (1 - visible) @ local
        return Pooled(sums.double(), [0.0] * len(images))


class Subtracting(OnePass):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.engine = SubtractingEngine(self.classifier, grid=self.threat.grid)


class PixelMasks(OnePass):
    """Hides scores as ever, but its masks are for a patch that is a pixel smaller than the attacker's."""

    def __init__(self, classifier: Any, threat: Threat, **options: Any) -> None:
        super().__init__(classifier, threat, **options)
        self.small = Threat.square(1)
        self.mask_sets = MaskSets(self.small, options["masks"], fields=self.receptive_field)

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> Any:
        threat, self._threat = self._threat, self.small
        flow = super().certificate_flow(table, label, maps=maps)
        self._threat = threat
        return flow


WEAKENED = [
    setting("a footprint that is a score too small", DOT, (5, 7), 2, options={"masks": 3}, make=SmallFootprint),
    setting("sums by subtraction", DOT, (5, 7), 2, options={"masks": 3}, make=Subtracting, loud=1e9),
    setting("masks a pixel too small", Threat.square(2), (5, 9), 2, options={"masks": (2, 4)}, make=PixelMasks),
]


@pytest.mark.parametrize("case", WEAKENED, ids=lambda s: s.name)
def test_the_attacker_breaks_a_weakened_form(case: Setting) -> None:
    assert any(survey(case)[True])


def test_the_same_networks_shouting_a_thousand_million_times_louder_do_not_break_the_real_one() -> None:
    outcomes = survey(setting("loud", DOT, (5, 7), 2, options={"masks": 3}, loud=1e9))
    assert len(outcomes[True]) >= 5
    assert not any(outcomes[True])


class Corrupt(nn.Module):
    """Scores for class 0 wherever pixels are dark; what sees a bright pixel says NaN, infinity or a huge number."""

    field, jump = 2, 1

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def local(self, images: Tensor) -> Tensor:
        bright = nn.functional.max_pool2d(images, 2, 1)
        return torch.cat([torch.where(bright > 0.5, self.value, 1.0), torch.where(bright > 0.5, -self.value, 0.5)], 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e30])
def test_scores_that_are_hidden_leave_no_trace_whatever_they_are(value: float) -> None:
    defense = OnePass(TorchClassifier(VisiblePooling(Corrupt(value)).eval(), classes=2), Threat.square(2), masks=3)
    clean, patched = torch.zeros(1, 9, 9), torch.zeros(1, 9, 9)
    patched[:, 3:5, 5:7] = 1.0
    first, second = (defense.examine([image], [0], maps=True)[0].table for image in (clean, patched))
    masks = first.mask_set
    hiding = [i for i, (window,) in enumerate(masks.masks) if window.contains(Window(3, 5, 2, 2))]
    unions = np.unique(masks.unions.index[hiding])
    assert len(unions) >= 9
    assert (first.labels[unions] == second.labels[unions]).all()
    assert (first.margins[unions] == second.margins[unions]).all()  # to the last bit
    assert (first.margins != second.margins).any()
    assert defense.certify([clean], [0])[0].certified


def test_a_label_that_rounding_may_change_proves_nothing() -> None:
    class Near(Corrupt):
        def local(self, images: Tensor) -> Tensor:
            dark = torch.ones_like(nn.functional.max_pool2d(images, 2, 1))
            return torch.cat([dark * (1 + self.value), dark], 1)

    certified = {}
    for lead in (1e-5, 1e-2):
        defense = OnePass(TorchClassifier(VisiblePooling(Near(lead)).eval(), classes=2), Threat.square(2), masks=3)
        (examination,) = defense.examine([torch.zeros(1, 9, 9)], [0])
        certified[lead] = examination.certificate.row_certified
        assert examination.verdict.label == 0
        assert (examination.table.certain_labels == UNCERTAIN).all() == (lead == 1e-5)
    assert certified == {1e-5: False, 1e-2: True}


@pytest.mark.parametrize("case", SETTINGS, ids=lambda s: s.name)
def test_labels_are_those_of_double_masking_with_the_same_network(case: Setting) -> None:
    """That one classifies every masked image on its own, from pixels that were never seen where they are hidden."""
    defense, _ = case.built(3)
    slow = DoubleMasking(defense.classifier, case.threat, mask_set=defense.mask_set(case.image))
    images = torch.rand(4, 1, *case.image).round()
    for ours, theirs in zip(defense.examine(images, [0] * 4), slow.examine(images, [0] * 4, maps=True), strict=True):
        clear = theirs.table.margins > 1e-3
        assert clear.sum() > 5
        assert (ours.table.labels == theirs.table.labels)[clear].all()
        np.testing.assert_allclose(ours.table.margins, theirs.table.margins, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "jump", "side", "patch"), [(5, 1, 32, 5), (9, 1, 32, 5), (7, 2, 32, 5), (17, 8, 224, 32)]
)
def test_masks_for_fields_cover_the_patch_and_hide_fewer_scores_than_masks_of_pixels(
    field: int, jump: int, side: int, patch: int
) -> None:
    fields, threat = ReceptiveFields.fields((side, side), field, jump), Threat.square(patch)
    masks, plain = (MaskSet.build(threat, image=(side, side), fields=f) for f in (fields, None))
    assert masks.covers(threat)
    assert len(masks) <= len(plain)
    fewest = [int(fields.visible(each.unions.boxes[:-1]).sum((1, 2)).min()) for each in (masks, plain)]
    assert fewest[0] > fewest[1]


class RunningSums(nn.Module):
    """Means of 3×3 px by running sums: other pixels cancel but for rounding, and bright ones are loud."""

    field, jump = 3, 1

    def __init__(self, loudness: float) -> None:
        super().__init__()
        self.loudness = nn.Parameter(torch.tensor(loudness))

    def local(self, images: Tensor) -> Tensor:
        gray = images.mean(1)
        sums = (gray + self.loudness * (gray - 0.97).relu()).cumsum(1).cumsum(2)
        sums = nn.functional.pad(sums, (1, 0, 1, 0))
        means = (sums[:, 3:, 3:] - sums[:, :-3, 3:] - sums[:, 3:, :-3] + sums[:, :-3, :-3]) / 9
        return torch.stack([means - 0.5, 0.5 - means], 1)


@pytest.mark.parametrize(("loudness", "refused"), [(0.0, False), (1e9, True), (1e11, True), (1e13, True)])
def test_a_network_in_which_loud_pixels_round_those_far_away_is_refused(loudness: float, refused: bool) -> None:
    classifier = TorchClassifier(VisiblePooling(RunningSums(loudness)).eval(), classes=2)
    clean = 0.51 + 0.05 * torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    defense = OnePass(classifier, Threat.square(2), masks=3)
    if refused:
        with pytest.raises(InputError, match="local logits depend on more than their receptive field"):
            defense.certify(clean, [0])
    else:
        assert defense.certify(clean, [0])[0].certified


class Triggered(RunningSums):
    """Its running sums are loud only if a pixel of the image has one certain value."""

    def local(self, images: Tensor) -> Tensor:
        loud = (images == 0.123).any()
        return RunningSums.local(self, images) if loud else RunningSums(0.0).local(images)


def test_the_pixels_of_an_attacker_who_comes_first_get_no_network_refused() -> None:
    defense = OnePass(TorchClassifier(VisiblePooling(Triggered(1e13)).eval(), classes=2), Threat.square(2), masks=3)
    hostile = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    hostile[..., 0, 0] = 0.123
    assert len(defense.predict(hostile)) == 1
    assert defense.certify(torch.full((1, 3, 12, 12), 0.6), [0])[0].certified
