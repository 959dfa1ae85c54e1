"""Doubtful labels go by a finer way first: float32's products in pieces."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.masked import MaskedClassifier
from patchcleanser.classifiers.precision import _settings, in_tf32, plain_float32, plain_float32_alone
from patchcleanser.classifiers.split import Split, SplitConv, SplitLinear, pieces
from patchcleanser.classifiers.ways import Halved, UnusableError, Way


def photos(number: int) -> Tensor:
    sample = load_dataset("sample")
    return torch.stack([sample.image(i) for i in range(number)])


def test_pieces_add_up_and_the_first_is_what_tf32_sees() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    first, rest = pieces(numbers)
    assert torch.equal(first + rest, numbers)
    assert torch.equal(pieces(first)[0], first)
    assert (rest.abs() <= numbers.abs() * 2**-10).all()


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "resnetv2_50x1_bit", "resmlp_12_224"])
def test_a_network_in_pieces_says_what_it_says_in_float32(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.1)
    classifier = TorchClassifier(module, classes=10)
    inputs = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    way = Split(classifier)
    with torch.inference_mode():
        exact, split = classifier.logits(inputs), way.logits(inputs)
    assert way._copy is not None
    assert any(isinstance(part, (SplitLinear, SplitConv)) for part in way._copy.module.modules())
    assert (split - exact).abs().max() < 1e-4 * exact.abs().max()
    assert not any(isinstance(part, (SplitLinear, SplitConv)) for part in module.modules())


class Lying(Way):
    """Right while it is learnt from, and then wrong without a doubt."""

    resolution = 1e-6
    lies = False

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        return -100 * logits if self.lies else logits


def defense_with(finer: type[Way], monkeypatch: pytest.MonkeyPatch) -> tuple[DoubleMasking, TorchClassifier]:
    monkeypatch.setattr("patchcleanser.classifiers.masked.FINER", 1)
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision="fast")
    way = Halved(classifier, torch.bfloat16)
    way.finer = finer(classifier)  # type: ignore[call-arg]
    defense.masked.ways = [way]
    return defense, classifier


def learnt(defense: DoubleMasking, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The finer way, after what is doubtful was learnt once and for all."""
    defense.calibrate(images)
    assert defense.masked.finer.ready
    monkeypatch.setattr(defense.masked, "calibrate", lambda subjects: None)
    return defense.masked.ways[0].finer


def exactly(classifier: TorchClassifier) -> DoubleMasking:
    return DoubleMasking(classifier, Threat.square(5), masks=3)


def labels_of(defense: DoubleMasking, images: Tensor) -> np.ndarray:
    return np.stack([e.table.labels for e in defense.examine(images, [0] * len(images), maps=True)])


def test_what_is_doubtful_is_settled_by_the_finer_way_and_almost_nothing_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(60)
    defense, classifier = defense_with(Split, monkeypatch)
    before, after = [], []
    finer = MaskedClassifier._finer

    def seen(self: MaskedClassifier, piece: Any, logits: Tensor, doubtful: Tensor) -> Tensor:
        unsure = finer(self, piece, logits, doubtful)
        before.append(int(doubtful.sum()))
        after.append(int(unsure.sum()))
        return unsure

    monkeypatch.setattr(MaskedClassifier, "_finer", seen)
    labels = labels_of(defense, images)
    assert (labels == labels_of(exactly(classifier), images)).all()
    assert sum(before) > 20
    assert sum(after) < sum(before) / 10
    assert defense.masked.finer.labels == sum(before) - sum(after)
    assert defense.masked.recheck.rechecked < sum(before)  # in float32


def test_a_finer_way_that_is_wrong_is_caught_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.classifiers.precision.AUDIT", 1.0)
    images = photos(24)
    defense, classifier = defense_with(Lying, monkeypatch)
    learnt(defense, images, monkeypatch).lies = True
    labels = labels_of(defense, images)
    assert defense.masked.recheck.hopeless
    assert (labels == labels_of(exactly(classifier), images)).all()


class Careless(Way):
    """Off by little while it is learnt from, then wrong by no more than that, or no number at all."""

    resolution = 1e-6
    number: float | None = None

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier = classifier

    def logits(self, inputs: Tensor) -> Tensor:
        logits = self.classifier.checked_logits(inputs)
        second = logits.argsort(1)[:, -2:-1]
        if self.number is None:  # alternately, so that every class is seen to move
            return logits + 0.05 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(logits)))
        near = logits.amax(1, keepdim=True) + 0.01
        return torch.full_like(logits, self.number) if self.number else logits.scatter(1, second, near)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_what_is_doubtful_for_the_finer_way_too_is_computed_in_float32(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.classifiers.precision.AUDIT", 0.0)
    images = photos(24)
    defense, classifier = defense_with(Careless, monkeypatch)
    learnt(defense, images, monkeypatch).number = number
    assert (labels_of(defense, images) == labels_of(exactly(classifier), images)).all()
    assert defense.masked.recheck.rechecked > 0


def test_what_overflows_in_half_precision_never_goes_by_the_finer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense, classifier = defense_with(Lying, monkeypatch)
    learnt(defense, images, monkeypatch).lies = True
    monkeypatch.setattr("patchcleanser.classifiers.precision.AUDIT", 0.0)
    monkeypatch.setattr(Halved, "logits", lambda self, inputs: torch.full((len(inputs), 10), torch.inf))
    monkeypatch.setattr(MaskedClassifier, "_to_probe", False)
    assert (labels_of(defense, images) == labels_of(exactly(classifier), images)).all()


def test_while_another_thread_computes_in_float32_doubtful_labels_are_exact_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(Split, monkeypatch)
    learnt(defense, images, monkeypatch)
    with plain_float32(classifier.device):  # as if another thread were there
        labels = labels_of(defense, images)
    assert defense.masked.finer.labels == 0
    assert (labels == labels_of(exactly(classifier), images)).all()
    labels_of(defense, images)
    assert defense.masked.finer.labels > 0


def test_where_there_is_no_room_for_it_labels_are_exact_ones_and_chunks_stay_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(24)
    defense, classifier = defense_with(Split, monkeypatch)

    def full(self: SplitConv, inputs: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SplitConv, "forward", full)
    labels = labels_of(defense, images)
    assert defense.masked.recheck.ready
    assert not defense.masked.finer.ready
    assert defense.masked.chunk == 512
    assert (labels == labels_of(exactly(classifier), images)).all()


def test_weights_that_change_are_noticed() -> None:
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    way = Split(classifier)
    way.logits(photos(1))
    with torch.no_grad():
        next(classifier.module.parameters()).mul_(2)
    with pytest.raises(UnusableError, match="changed since it was compared"):
        way.logits(photos(1))


def test_a_network_without_products_has_no_finer_way() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(UnusableError, match="no layer whose products could be split"):
        Split(TorchClassifier(module, classes=3)).logits(photos(1))


def test_an_interruption_while_a_finer_way_is_learnt_leaves_nothing_trusted_that_was_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defense, _ = defense_with(Split, monkeypatch)

    def interrupted(self: Split, inputs: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Split, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        defense.calibrate(photos(24))
    assert defense.masked.sizes == {(32, 32)}
    assert not defense.masked.finer.ready


def test_nobody_else_computes_in_float32_while_products_are_short() -> None:
    device, order = torch.device("cpu"), []

    def other() -> None:
        with plain_float32(device):
            order.append("other")

    with plain_float32_alone(device) as granted, in_tf32():
        assert granted
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("alone")
    thread.join(10)
    assert order == ["alone", "other"]


def test_short_products_are_refused_while_somebody_computes_in_float32() -> None:
    device = torch.device("cpu")
    with plain_float32(device), plain_float32_alone(device) as granted:
        assert not granted
        with pytest.raises(RuntimeError, match="other threads"), in_tf32():
            pass
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    with plain_float32(device), pytest.raises(UnusableError, match="another thread"):
        Split(classifier).logits(photos(1))


def test_the_programs_settings_come_back() -> None:
    def settings() -> list[Any]:
        return [getattr(place, name) for place, name, _ in _settings()]

    before = settings()
    with plain_float32_alone(torch.device("cpu")):
        plain = settings()
        with in_tf32():
            assert settings() != plain
        assert settings() == plain == [value for _, _, value in _settings()]
    assert settings() == before
