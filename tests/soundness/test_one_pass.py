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

from patchcleanser import DoubleMasking, Preprocessing, Threat, TorchClassifier, Window
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNCERTAIN, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.mask_defense import MaskSets
from patchcleanser.defenses.one_pass import HeadEngine, OnePass, OnePassEngine, Pooled
from patchcleanser.engine.masking import ImageState, PairBatch
from patchcleanser.errors import InputError
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling

from . import test_local as local
from .test_exhaustive import RandomFunction, attacked
from .test_local import CLASSES, DOT, LINE, TRUE, Hostile, RandomBag, narrower, survey


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


class Understated(nn.Module):
    """A convolution of `left + 3 + right` px that says it sees the 3 px in the middle."""

    field = 3

    def __init__(self, jump: int, left: int, right: int) -> None:
        super().__init__()
        self.jump, self.edges = jump, (left, right, left, right)
        self.convolution = nn.Conv2d(3, 2, left + 3 + right, jump)

    def local(self, images: Tensor) -> Tensor:
        scores: Tensor = self.convolution(nn.functional.pad(images, self.edges))
        return scores


@pytest.mark.parametrize("jump", [1, 2, 3])
@pytest.mark.parametrize("side", [10, 11, 12, 13])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 1)])
def test_a_field_that_is_larger_by_a_pixel_is_found_wherever_positions_lie(
    side: int, jump: int, left: int, right: int
) -> None:
    torch.manual_seed(side)
    network = VisiblePooling(Understated(jump, left, right)).eval()
    defense = OnePass(TorchClassifier(network, Preprocessing(), classes=2), DOT, masks=2)
    if left or right:
        with pytest.raises(InputError, match="local logits depend on more than their receptive field of 3 px"):
            defense.predict(torch.rand(1, 3, side, side))
    else:
        assert defense.predict(torch.rand(1, 3, side, side))


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


# With a head: any function of the visible features, so random ones of all of them, to the last thousandth.


class RandomHead(nn.Module):
    """A random function of all of its inputs; those of the clean image are loyal, all others speak for class 1."""

    def __init__(self, seed: int, loyalty: float) -> None:
        super().__init__()
        self.function = RandomFunction(seed, loyalty)

    def forward(self, features: Tensor) -> Tensor:
        return self.function(features).float()


class RandomSplit(nn.Module):
    """A trunk whose features are Hostile functions of the pixels they see, and a random head."""

    def __init__(self, trunk: RandomBag, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head, self.field, self.jump = trunk, head, trunk.field, trunk.jump

    def features(self, images: Tensor) -> Tensor:
        return self.trunk.local(images)


@dataclass(frozen=True)
class HeadSetting(Setting):
    """A defense by one pass of a trunk, and a head for each label."""

    def outcomes(self) -> dict[bool, list[bool]]:
        """For each random network: was the image certified, and did any patch change the answer?"""
        outcomes: dict[bool, list[bool]] = {True: [], False: []}
        generator = torch.Generator().manual_seed(0)
        for seed in range(self.networks):
            image = torch.randint(0, 2, (1, *self.image), generator=generator).float()
            defense = self.learnt(seed, image)
            (certificate,) = defense.certify(image[None], [TRUE])
            verdicts = defense.predict(attacked(image, self.threat))
            outcomes[certificate.row_certified].append(any(verdict.label != TRUE for verdict in verdicts))
        return outcomes

    def learnt(self, seed: int, image: Tensor) -> Defense[Any, Any]:
        """The defense around a random network that knows the clean image."""
        hostile, head = Hostile(seed, 0.8, self.loud), RandomHead(seed, self.loyalty)
        module = VisibleFeatures(RandomSplit(RandomBag(hostile, self.field, self.jump), head)).eval()
        defense = self.make(TorchClassifier(module, classes=CLASSES), self.threat, **self.options)
        defense.predict(image[None])  # the probe's painted images are not to be learnt
        hostile.learning = True
        head.function.learn(defense, image)
        hostile.learning = False
        return defense


def headed(name: str, threat: Threat, image: Size, field: int, jump: int = 1, **changes: Any) -> HeadSetting:
    common: dict[str, Any] = {"make": OnePass, "loyalty": 0.93, "networks": 24}
    return HeadSetting(name, threat=threat, image=image, field=field, jump=jump, **{**common, **changes})


HEADED = [
    headed("fields of 1 px", LINE, (3, 6), 1, options={"masks": 3}, loyalty=0.97),
    headed("fields of 2 px", DOT, (5, 6), 2, options={"masks": 3}),
    headed("a square of 2 px", Threat.square(2), (4, 7), 2, options={"masks": (1, 3)}),
    headed("strides", LINE, (7, 9), 3, 2, options={"masks": (2, 3)}),
    headed("two patches", Threat.square(1, count=2), (2, 5), 1, options={"masks": (1, 3)}, loyalty=0.85),
    headed("any rectangle of 2 px", Threat.any_rectangle(2), (4, 4), 1, options={"masks": 2}, loyalty=0.9),
    headed("the input grid", Threat.square(1, grid="input"), (5, 6), 2, options={"masks": 3}),
    headed("features of huge size", DOT, (5, 6), 2, options={"masks": 3}, loud=1e30),
    headed("features that are infinite", DOT, (5, 6), 2, options={"masks": 3}, loud=float("inf")),
    headed("features that are NaN", DOT, (5, 6), 2, options={"masks": 3}, loud=float("nan")),
]


@pytest.mark.parametrize("case", HEADED, ids=lambda s: s.name)
def test_images_certified_with_a_head_survive_every_patch(case: HeadSetting) -> None:
    outcomes = case.outcomes()
    assert len(outcomes[True]) >= 5
    assert not any(outcomes[True])
    assert sum(outcomes[False]) >= 5


class ShowingEngine(HeadEngine):
    """Says which features are hidden, and shows them all the same."""

    def masked_inputs(self, pairs: PairBatch, dtype: torch.dtype | None = None) -> Tensor:
        features = torch.stack([self.source.map(pairs.images[i].pixels[None])[0] for i in pairs.which])
        return torch.cat([features, super().masked_inputs(pairs)[:, -1:]], 1)


class MultiplyingEngine(HeadEngine):
    """Multiplies hidden features by 0 instead of replacing them."""

    def masked_inputs(self, pairs: PairBatch, dtype: torch.dtype | None = None) -> Tensor:
        module, inputs = self.source.module.network, super().masked_inputs(pairs)
        features = torch.stack([module.features(pairs.images[i].pixels[None])[0] for i in pairs.which])
        return torch.cat([features * (1 - inputs[:, -1:]), inputs[:, -1:]], 1)


class Showing(OnePass):
    engine_class: type[HeadEngine] = ShowingEngine

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.engine = self.engine_class(self.classifier, grid=self.threat.grid)  # type: ignore[arg-type]


class Multiplying(Showing):
    engine_class = MultiplyingEngine


WEAKENED_HEADED = [
    headed("hidden features are shown", DOT, (5, 6), 2, options={"masks": 3}, make=Showing),
    headed("hidden features are multiplied", DOT, (5, 6), 2, options={"masks": 3}, make=Multiplying, loud=float("nan")),
    headed("masks of pixels hide features of 2 px", DOT, (5, 6), 2, options={"masks": 3}, make=SmallFootprint),
    headed("a mask a pixel too small", Threat.square(2), (4, 7), 2, options={"masks": (1, 3)}, make=PixelMasks),
]


@pytest.mark.parametrize("case", WEAKENED_HEADED, ids=lambda s: s.name)
def test_the_attacker_breaks_a_weakened_form_with_a_head(case: HeadSetting) -> None:
    assert any(case.outcomes()[True])


def test_multiplied_features_that_are_finite_do_not_break_so_it_is_nan_that_does() -> None:
    outcomes = headed("finite", DOT, (5, 6), 2, options={"masks": 3}, make=Multiplying).outcomes()
    assert len(outcomes[True]) >= 5
    assert not any(outcomes[True])


@pytest.mark.parametrize("case", HEADED, ids=lambda s: s.name)
def test_labels_with_a_head_are_those_of_double_masking_with_the_same_network(case: HeadSetting) -> None:
    image = torch.rand(1, *case.image).round()
    defense: Any = case.learnt(3, image)
    slow = DoubleMasking(defense.classifier, case.threat, mask_set=defense.mask_set(case.image))
    images = torch.cat([image[None], torch.rand(3, 1, *case.image).round()])
    labels: set[int] = set()
    for ours, theirs in zip(
        defense.examine(images, [0] * 4, maps=True), slow.examine(images, [0] * 4, maps=True), strict=True
    ):
        assert (ours.table.labels == theirs.table.labels).all()
        assert (ours.table.margins == theirs.table.margins).all()  # to the last bit
        labels |= set(ours.table.labels.tolist())
    assert len(labels) > 1


class Leaking(RandomSplit):
    """Features that move by a hundred thousandth of the image's mean, as if kernels rounded by what is beside them."""

    def features(self, images: Tensor) -> Tensor:
        return super().features(images) + 1e-5 * images.mean((1, 2, 3), keepdim=True)


def test_a_trunk_that_rounds_by_what_is_beside_a_feature_is_refused() -> None:
    network = Leaking(RandomBag(Hostile(0, 0.8, 3.0), 2, 1), RandomHead(0, 0.9))
    defense = OnePass(TorchClassifier(VisibleFeatures(network).eval(), classes=CLASSES), DOT, masks=3)
    with pytest.raises(
        InputError, match=r"features depend on more than their receptive field of 2 px: .* \(see net:split\)"
    ):
        defense.predict(torch.rand(1, 1, 5, 6))


class InPlace(nn.Module):
    """Halves of pixels as features and as local logits, which are written where the pixels lie."""

    field = jump = 1

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def features(self, images: Tensor) -> Tensor:
        return images.mul_(0.5)

    local = features


@pytest.mark.parametrize("wrapper", [VisiblePooling, VisibleFeatures])
def test_a_network_that_writes_into_its_input_is_not_taken_for_one_that_sees_too_much(wrapper: Any) -> None:
    defense = OnePass(TorchClassifier(wrapper(InPlace()).eval(), Preprocessing()), DOT, masks=2)
    image = torch.tensor([0.2, 0.9, 0.5])[:, None, None].expand(3, 6, 6)
    assert [defense.predict([image])[0].label for _ in range(2)] == [1, 1]


class CorruptFeatures(Corrupt):
    """The same values as two features, and a head of two layers."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2))

    def features(self, images: Tensor) -> Tensor:
        return self.local(images)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e30])
def test_features_that_are_hidden_leave_no_trace_in_the_head_whatever_they_are(value: float) -> None:
    defense = OnePass(
        TorchClassifier(VisibleFeatures(CorruptFeatures(value)).eval(), classes=2), Threat.square(2), masks=3
    )
    clean, patched = torch.zeros(1, 9, 9), torch.zeros(1, 9, 9)
    patched[:, 3:5, 5:7] = 1.0
    tables = []
    for image in (clean, patched):
        state = defense.image_state(image)
        unions = np.arange(len(state.table.mask_set.unions))
        defense.engine.write(*_with_logits(defense, state, unions), strict=False)  # type: ignore[attr-defined]
        tables.append(state.table)
    first, second = tables
    masks = first.mask_set
    hiding = [i for i, (window,) in enumerate(masks.masks) if window.contains(Window(3, 5, 2, 2))]
    unions = np.unique(masks.unions.index[hiding])
    assert len(unions) >= 9
    assert (first.labels[unions] == second.labels[unions]).all()
    assert (first.margins[unions] == second.margins[unions]).all()  # to the last bit
    assert not np.array_equal(first.margins[:-1], second.margins[:-1])


def _with_logits(defense: OnePass, state: ImageState, unions: Any) -> tuple[PairBatch, Tensor]:
    pairs = PairBatch.of([state], [unions])
    with torch.inference_mode():
        return pairs, defense.engine.logits(pairs)  # type: ignore[attr-defined]
