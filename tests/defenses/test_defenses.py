"""The defenses on real networks: shapes, batching, modules, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser import (
    CallableClassifier,
    ChallengerMasking,
    DoubleMasking,
    MaskSet,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
)
from patchcleanser.core.algorithms import double_masking
from patchcleanser.core.masks import PerAxis
from patchcleanser.defenses.clipped_bagnet import ClippedBagNet
from patchcleanser.errors import CoverError, InputError, MaskError


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet.r160_in1k", pretrained=False, num_classes=5).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(6, 3, 40, 40, generator=torch.Generator().manual_seed(1))


def test_verdicts_and_certificates_equal_the_slow_way(network: nn.Module, images: Tensor) -> None:
    threat = Threat.square(8)
    defense = DoubleMasking(TorchClassifier(network), threat, masks=3)
    masks = MaskSet.build(threat, image=(40, 40), masks=3)
    visible = torch.from_numpy(masks.visible())
    for image, verdict in zip(images, defense.predict(images), strict=True):

        def label(i: int, j: int, image: Tensor = image) -> int:
            masked = torch.where(visible[i] & visible[j], image, torch.tensor(0.5))
            with torch.inference_mode():
                return int(network(masked[None]).argmax())

        n = len(masks)
        slow = double_masking([label(i, i) for i in range(n)], lambda i, f=label, n=n: [f(i, j) for j in range(n)])
        assert (verdict.label, verdict.case, verdict.one_mask_labels) == (slow.label, slow.case, slow.one_mask_labels)
        (certificate,) = defense.certify(image[None], [verdict.label])
        assert certificate.certified == all(label(i, j) == verdict.label for i in range(n) for j in range(i, n))


def test_images_of_different_sizes_come_in_one_list_and_in_any_order(network: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    pictures = [torch.rand(3, h, w, generator=generator) for h, w in [(40, 60), (33, 33), (40, 60), (64, 48)]]
    model = TorchClassifier(network, Preprocessing(resize=48, crop=(40, 40), mean=(0.5,) * 3, std=(0.2,) * 3))
    defense = DoubleMasking(model, Threat.share(0.03), masks=(3, 2))
    together = defense.predict(pictures)
    alone = [defense.predict([picture])[0] for picture in pictures]
    assert together == alone
    assert defense.predict(pictures[::-1]) == together[::-1]
    assert defense.predict(picture for picture in pictures) == together  # a stream


@pytest.mark.parametrize("make", [DoubleMasking, ChallengerMasking])
def test_as_module_scores_the_defended_label_highest(network: nn.Module, images: Tensor, make: type) -> None:
    defense = make(network, Threat.square(6), masks=2)
    module = defense.as_module()
    assert isinstance(module, nn.Module)
    scores = module(images)
    assert scores.shape == (6, 5)
    assert scores.argmax(1).tolist() == [v.label for v in defense.predict(images)]


def test_a_defended_label_has_no_gradient_and_says_so(network: nn.Module, images: Tensor) -> None:
    module = DoubleMasking(network, Threat.square(6), masks=2).as_module()
    wanting = images[:1].clone().requires_grad_()
    scores = module(wanting)
    assert torch.equal(scores.detach(), module(images[:1]))
    with pytest.raises(InputError, match=r"no gradient; attack with patchcleanser\.attacks\.AdaptiveAttack"):
        scores.sum().backward()
    with torch.no_grad():
        assert not module(wanting).requires_grad


def test_as_module_gives_an_alert_a_column_of_its_own(images: Tensor) -> None:
    def corner(x: Tensor) -> Tensor:  # an opinion that any mask over the corner changes
        bright = x[:, :, :4, :4].mean((1, 2, 3)) > 0.9
        return torch.stack([bright.float(), 1 - bright.float()], 1) * 9

    shown = images.clone()
    shown[:3, :, :4, :4] = 1
    defense = MinorityReports(CallableClassifier(corner, array="torch"), Threat.square(6), masks=4)
    module = defense.as_module()
    assert module(shown).argmax(1).tolist() == [2, 2, 2, 1, 1, 1]
    assert [v.alert for v in defense.predict(shown)] == [True] * 3 + [False] * 3


def test_a_hand_made_mask_set_is_accepted_only_if_it_covers(network: nn.Module, images: Tensor) -> None:
    good = MaskSet.build(Threat.square(9), image=(40, 40), masks=3)
    defense = DoubleMasking(network, Threat.square(8), mask_set=good)
    assert len(defense.predict(images[:1])[0].one_mask_labels) == 9
    with pytest.raises(CoverError, match="does not cover the threat"):
        DoubleMasking(network, Threat.square(11), mask_set=good)
    with pytest.raises(MaskError, match="for images of 40×40 px, got 41×40 px"):
        defense.predict(torch.rand(1, 3, 41, 40))
    with pytest.raises(MaskError, match="not both"):
        DoubleMasking(network, Threat.square(8), mask_set=good, masks=3)


def test_certified_images_need_the_whole_table_and_hopeless_ones_little(images: Tensor) -> None:
    def constant(x: Tensor) -> Tensor:
        return torch.tensor([[0.0, 1.0]]).repeat(len(x), 1)

    defense = DoubleMasking(CallableClassifier(constant, array="torch"), Threat.square(5), masks=4)
    (right,), (wrong,) = defense.certify(images[:1], [1]), defense.certify(images[:1], [0])
    assert (right.certified, right.row_certified, right.classifications, right.failing_pair) == (True, True, 136, None)
    assert (wrong.certified, wrong.row_certified, wrong.classifications) == (False, False, 16)
    assert wrong.failing_pair == (0, 0)


def test_the_map_shows_where_an_image_is_weak() -> None:
    """A classifier that reads one pixel is weak exactly where a mask over it is needed."""

    def one_pixel(x: Tensor) -> Tensor:
        bright = (x[:, 0, 0, 0] > 0.9).float()
        return torch.stack([bright, 1 - bright], 1)

    defense = DoubleMasking(CallableClassifier(one_pixel, array="torch"), Threat.square(4), masks=3)
    (certificate,) = defense.certify(torch.ones(1, 1, 16, 16), [0], maps=True)
    # Every row has mask 0, which hides the pixel: no position is safe.
    assert not certificate.certified
    assert certificate.positions is not None
    assert not certificate.positions[4, 4].any()
    assert certificate.failing_placement is not None


@pytest.mark.parametrize("threshold", [-0.1, 1.1])
def test_thresholds_are_probabilities(network: nn.Module, threshold: float) -> None:
    with pytest.raises(InputError, match=r"a confidence threshold lies in \[0, 1\]"):
        MinorityReports(network, Threat.square(3), threshold=threshold)


def test_detection_is_reported_as_detection(network: nn.Module, images: Tensor) -> None:
    defense = MinorityReports(network, Threat.square(6), masks=2, threshold=0)
    undefended = network(images).argmax(1).tolist()
    verdicts = defense.predict(images)
    assert [v.label for v in verdicts] == undefended
    certificates = defense.certify(images, undefended)
    for verdict, certificate in zip(verdicts, certificates, strict=True):
        assert certificate.detection_certified == (not verdict.alert)
        assert not hasattr(certificate, "certified")


def test_images_of_every_size_do_not_fill_the_memory_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.defenses.mask_defense.CACHED_SIZES", 4)
    defense = DoubleMasking(CallableClassifier(lambda x: x.mean((2, 3))), Threat.square(2), masks=2)
    sets = [defense.mask_set((side, 9)) for side in range(5, 25)]
    assert len(defense.mask_sets.built) <= 4
    assert [masks.image for masks in sets] == [(side, 9) for side in range(5, 25)]
    assert defense.mask_set((5, 9)) == sets[0]


def test_a_mask_that_hides_the_whole_image_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    classifier = CallableClassifier(lambda x: x.mean((2, 3)), array="torch", fingerprint="colours")
    for masks in (1, 2):
        DoubleMasking(classifier, Threat.square(3), masks=masks).predict(torch.rand(2, 3, 8, 8))
    (record,) = caplog.records
    assert "a mask hides the whole image of 8×8 px" in record.getMessage()


@pytest.mark.parametrize(("masks", "warned"), [(100, True), ((3, 33), True), (28, False), (None, False)])
def test_more_masks_than_a_patch_has_places_are_warned_of_once(
    masks: PerAxis, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    defense = DoubleMasking(CallableClassifier(lambda x: x.mean((2, 3))), Threat.square(5), masks=masks)
    built = [defense.mask_set(size) for size in ((32, 32), (33, 33))]
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(records) == warned
    if warned:
        number = len(built[0])
        assert "places of a patch in an image of 32×32 px" in caplog.text
        assert f": {number:,} masks are used, and a certificate tries all {number * (number + 1) // 2:,}" in caplog.text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: DoubleMasking(f, "5", mask=3), "DoubleMasking: .* 'mask'; did you mean masks?"),
        (lambda f: ChallengerMasking(f, "5", sed=3), "ChallengerMasking: .* 'sed'; did you mean seed?"),
        (
            lambda f: ChallengerMasking(f, "5", foo=3),
            "ChallengerMasking: .* 'foo'; its options are seed, coarse",
        ),
        (lambda f: ClippedBagNet(f, "5", threshold=1), "ClippedBagNet: .*; its options are scale, shift"),
        (lambda f: DoubleMasking(clasifier=f, threat="5"), "DoubleMasking: .*did you mean classifier?"),
        (
            lambda f: DoubleMasking(f),
            "DoubleMasking: missing a required argument: 'threat'; write .*, '2%'",
        ),
        (lambda f: DoubleMasking(f, "5", 3), "DoubleMasking: too many positional arguments; .*options by name"),
    ],
)
def test_wrong_arguments_are_told_by_the_class_that_the_user_wrote(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(TypeError, match=rf"^{words}"):
        make(lambda x: x.mean((2, 3)))


def test_a_defense_shows_its_own_options() -> None:
    assert list(signature(DoubleMasking).parameters)[:4] == ["classifier", "threat", "coarse", "masks"]
