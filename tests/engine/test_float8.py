"""A network in eight bits: near what it is, for clean images in whole blocks, and its labels are the exact ones."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_dataset
from patchcleanser.engine.fast.backends import Backend, UnusableError
from patchcleanser.engine.fast.calibration import ErrorBounds
from patchcleanser.engine.fast.cascade import FastEngine
from patchcleanser.engine.fast.float8 import backend as room
from patchcleanser.engine.fast.float8.backend import Float8Backend, seen_inputs
from patchcleanser.engine.fast.float8.layers import EightLinear, Short, apart, is_fused, shortened
from patchcleanser.engine.fast.half import Graph, HalfPrecisionBackend, halved
from patchcleanser.engine.fast.split import TripleTf32Backend
from patchcleanser.engine.masking import LabelRequest
from patchcleanser.errors import OutputError

NETWORKS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"img_size": 32, "embed_dim": 256, "num_heads": 4, "depth": 2},
    "vit_base_patch16_clip_224": {"img_size": 32, "depth": 2},
    "mixer_s16_224": {"img_size": 32},
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10, **NETWORKS[name]).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.05)  # type: ignore[operator]
    return module


def photos(number: int) -> Tensor:
    dataset = load_dataset("sample")
    return torch.stack([dataset.image(i) for i in range(number)])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_in_eight_bits_says_nearly_what_it_says_in_float32(name: str) -> None:
    module, inputs = network(name), photos(16)
    with torch.inference_mode():
        exact = module(inputs)
        half = halved(copy.deepcopy(module))(inputs.half()).float()
        short = apart(halved(copy.deepcopy(module)))
        seen = seen_inputs(short, inputs.half())
        short = shortened(
            short, {name: Short.of(short.get_submodule(name), one) for name, one in seen.items()}, fused=False
        )
        found = short(inputs.half()).float()
    layers = [part for part in short.modules() if isinstance(part, EightLinear)]
    assert len(layers) >= 4
    spread = float((exact - exact.mean(0)).std())
    assert 0 < (found - exact).abs().max() < spread  # images are told apart
    assert (half - exact).abs().max() < (found - exact).abs().max()


class Mostly(nn.Module):
    """Does most of its work in convolutions, and has a large linear layer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.head = nn.Conv2d(3, 64, 7), nn.Linear(64, 256), nn.Linear(256, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.wide(self.conv(inputs).mean((2, 3))))
        return outputs


@pytest.mark.parametrize("module", [nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), Mostly()])
def test_networks_whose_work_is_elsewhere_are_refused_once(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = TorchClassifier(module.eval())
    way, tries = Float8Backend(classifier, HalfPrecisionBackend(classifier)), []
    monkeypatch.setattr(room, "block_size", lambda numbers: 8)
    inner = room.seen_inputs
    monkeypatch.setattr(room, "seen_inputs", lambda *given: (tries.append(1), inner(*given))[1])
    for _ in range(2):
        with pytest.raises(UnusableError, match="do too little of the work"):
            way.logits(photos(4))
    assert tries == [1]


def taught(module: Any, images: Tensor) -> nn.Module:
    """With a last layer that tells three kinds of images apart by brightness: most labels have no other near them."""
    with torch.no_grad():
        features = module.forward_head(module.forward_features(images), pre_logits=True)
        wanted = 10 * nn.functional.one_hot(images.mean((1, 2, 3)).argsort().argsort() * 3 // len(images), 10).float()
        centred = features - features.mean(0)
        inner = centred.T @ centred + 300 * torch.eye(features.shape[1])
        module.head.weight.copy_(torch.linalg.solve(inner, centred.T @ wanted).T)
        module.head.bias.copy_(wanted.mean(0) - module.head.weight @ features.mean(0))
    return module


@pytest.fixture
def defense(monkeypatch: pytest.MonkeyPatch) -> DoubleMasking:
    """Certifies by eight bits, then half precision, then exactly."""
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.FEW_LABELS", 4)
    monkeypatch.setattr("patchcleanser.engine.fast.float8.backend.block_size", lambda numbers: 64)
    classifier = TorchClassifier(taught(network("vit_small_patch16_224"), photos(60)), classes=10)
    found = DoubleMasking(classifier, Threat.square(5), masks=3, precision="fast")
    copied = HalfPrecisionBackend(classifier)
    found.engine.candidates = [[Float8Backend(classifier, copied), copied], [copied]]
    monkeypatch.setattr(Float8Backend, "resolution", 0.0)  # of a network of chance every label would be doubtful
    monkeypatch.setattr(Float8Backend, "max_uncertain_share", 0.9)
    return found


def labels_of(defense: DoubleMasking, images: Tensor) -> np.ndarray:
    return np.stack([e.table.labels for e in defense.examine(images, [0] * len(images), maps=True)])


def counted(monkeypatch: pytest.MonkeyPatch, *kinds: type[Backend]) -> dict[str, list[int]]:
    """How many inputs each way was given, call by call."""
    sizes: dict[str, list[int]] = {kind.__name__: [] for kind in kinds}
    for kind in kinds:

        def logits(self: Backend, inputs: Tensor, inner: Any = kind.logits) -> Tensor:
            sizes[type(self).__name__].append(len(inputs))
            return inner(self, inputs)

        monkeypatch.setattr(kind, "logits", logits)
    return sizes


def test_labels_are_the_exact_ones_and_doubtful_ones_go_step_by_step(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    labels = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, Float8Backend)
    assert [type(stage.backend) for stage in defense.engine.calibration.stages[1:]] == [HalfPrecisionBackend]
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    assert (labels == labels_of(exact, images)).all()
    assert defense.engine.stats.settled["HalfPrecisionBackend"] > 20
    assert 0 < defense.engine.stats.rechecked < defense.engine.stats.settled["HalfPrecisionBackend"]


def test_few_pairs_at_a_time_go_by_half_precision(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend, HalfPrecisionBackend)
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)
    monkeypatch.setattr(FastEngine, "_probe_sometimes", lambda self, pairs, logits, backend: None)
    labels_of(defense, images[:1])  # 46 pairs
    assert sizes["Float8Backend"] == []
    assert sizes["HalfPrecisionBackend"]
    labels_of(defense, images[:8])
    assert sizes["Float8Backend"]
    assert min(sizes["Float8Backend"]) >= 64


def test_attacked_images_never_go_by_eight_bits(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend, HalfPrecisionBackend)
    verdicts = defense.predict(images)
    assert sizes["Float8Backend"] == []
    assert sizes["HalfPrecisionBackend"]
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3).predict(images)
    assert [verdict.label for verdict in verdicts] == [verdict.label for verdict in exact]


def test_where_too_many_labels_are_doubtful_half_precision_is_first(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float8Backend, "max_uncertain_share", 0.0)
    images = photos(24)
    labels = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, HalfPrecisionBackend)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    assert (labels == labels_of(exact, images)).all()


def test_a_wrong_label_in_eight_bits_is_caught_by_the_audit(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.zeros(len(fast), dtype=torch.bool))
    images = photos(24)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)
    logits = Float8Backend.logits
    monkeypatch.setattr(Float8Backend, "logits", lambda self, inputs: 100 * logits(self, inputs).roll(1, 1))
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    assert (labels == labels_of(exact, images)).all()


def test_changed_weights_are_noticed(defense: DoubleMasking) -> None:
    way = defense.engine.candidates[0][0]
    way.logits(photos(2))
    with torch.no_grad():
        next(defense.classifier.module.parameters()).mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match="changed since it was calibrated"):
        way.logits(photos(2))


def test_where_there_is_no_room_half_precision_goes_on(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)
    sizes = counted(monkeypatch, HalfPrecisionBackend)

    def full(self: EightLinear, inputs: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(EightLinear, "forward", full)
    assert (labels_of(defense, images) == labels_of(exact, images)).all()
    assert sizes["HalfPrecisionBackend"]
    assert not defense.engine.calibration.given_up
    assert defense.engine.runner.chunk == 512


def test_a_finer_step_that_no_longer_is_as_it_was_compared_is_left_out(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, calls = photos(24), []
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda subjects: None)

    def changed(self: HalfPrecisionBackend, inputs: Tensor) -> Tensor:
        calls.append(len(inputs))
        if len(calls) == 1:
            raise UnusableError("there is no room for what pairs share")
        return torch.zeros(len(inputs), 10)  # as if by other kernels

    monkeypatch.setattr(HalfPrecisionBackend, "logits", changed)
    labels = labels_of(defense, images)
    assert len(calls) == 1
    assert (labels == labels_of(DoubleMasking(defense.classifier, Threat.square(5), masks=3), images)).all()


def test_what_overflows_in_eight_bits_counts_as_doubtful_and_goes_by_half_precision(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    logits = Float8Backend.logits

    def overflown(self: Float8Backend, inputs: Tensor) -> Tensor:
        found = logits(self, inputs)
        found[1::8] = torch.nan
        return found

    monkeypatch.setattr(Float8Backend, "logits", overflown)
    labels = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, Float8Backend)
    assert (labels == labels_of(DoubleMasking(defense.classifier, Threat.square(5), masks=3), images)).all()
    assert defense.engine.stats.rechecked < 0.05 * defense.engine.stats.labels
    share = defense.engine.calibration.stages[0].bounds.uncertain_share
    monkeypatch.setattr(Float8Backend, "max_uncertain_share", share - 0.05)  # less than with what overflows
    defense.engine.reset()
    labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, HalfPrecisionBackend)


def test_a_copy_of_the_way_is_made_with_the_sizes_it_was_compared_with(defense: DoubleMasking) -> None:
    images = photos(64)
    way = defense.engine.candidates[0][0]
    before = way.logits(images)
    other = copy.deepcopy(way)
    other.logits(0.01 * images)  # makes it again
    assert (other.logits(images) == before).all()


def test_memory_that_was_given_back_changes_no_answer(defense: DoubleMasking) -> None:
    images = photos(64)
    way = defense.engine.candidates[0][0]
    before = way.logits(images)
    defense.engine.exact.empty_caches()
    assert way._copy is None  # type: ignore[attr-defined]
    assert (way.logits(0.01 * images) != before).any()  # makes it again
    assert (way.logits(images) == before).all()


def test_a_way_that_was_compared_with_other_kernels_is_refused(defense: DoubleMasking) -> None:
    way = defense.engine.candidates[0][0]
    way.logits(photos(64))
    other = copy.deepcopy(way)
    other._fused = True  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match="kernels that are not for this device"):
        other.logits(photos(64))


class Recorded:
    """Plays back what it was made of, as a CUDA graph does, or cannot be made."""

    made: ClassVar[list[torch.Size]] = []
    error: ClassVar[Exception | None] = None

    def __init__(self, copied: TorchClassifier, inputs: Tensor) -> None:
        if self.error is not None:
            raise self.error
        self.copied, self.shape = copied, inputs.shape
        self.made.append(inputs.shape)

    def __call__(self, inputs: Tensor) -> Tensor:
        assert inputs.shape == self.shape
        return 1 + self.copied.checked_logits(inputs)  # so that it is seen who answered


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    monkeypatch.setattr(room, "Graph", Recorded)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(Recorded, "error", None)
    return Recorded


def test_blocks_of_another_size_are_not_played_back(recorded: type[Recorded]) -> None:
    classifier = TorchClassifier(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 10)).eval())
    block, other = torch.rand(4, 3, 32, 32), torch.rand(4, 3, 48, 48)
    answers = room._on_a_gpu(classifier, block, False)
    torch.testing.assert_close(answers(block), 1 + classifier.checked_logits(block))
    torch.testing.assert_close(answers(other), classifier.checked_logits(other))
    assert recorded.made == [block.shape]


@pytest.mark.parametrize(
    "error", [RuntimeError("capture failed"), OutputError("the model failed"), UnusableError("no")]
)
def test_what_cannot_be_recorded_is_asked_each_time(
    error: Exception, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "error", error)
    classifier = TorchClassifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)).eval())
    block = torch.rand(4, 3, 2, 2)
    torch.testing.assert_close(room._on_a_gpu(classifier, block, False)(block), classifier.checked_logits(block))


@pytest.mark.parametrize("known", [False, True])
def test_where_kernels_of_our_own_fail_torchs_are_used_unless_others_were_compared(
    known: bool, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "error", RuntimeError("capture failed"))
    inputs = photos(8).half()
    with torch.inference_mode():
        module = apart(halved(network("vit_small_patch16_224")))
        shorts = {n: Short.of(module.get_submodule(n), one) for n, one in seen_inputs(module, inputs).items()}
        plain = shortened(copy.deepcopy(module), shorts, fused=False)
        fused = TorchClassifier(shortened(module, shorts, fused=True))
        assert is_fused(fused.module)
        if known:
            with pytest.raises(UnusableError):  # Triton's are for GPUs
                room._on_a_gpu(fused, inputs, known)
        else:
            answers = room._on_a_gpu(fused, inputs, known)
            assert not is_fused(fused.module)
            torch.testing.assert_close(answers(inputs), plain(inputs).float())


def test_a_graph_refuses_inputs_of_another_shape() -> None:
    graph = object.__new__(Graph)
    graph._inputs = torch.zeros(4, 3, 8, 8)
    with pytest.raises(ValueError, match=r"of inputs \(4, 3, 8, 8\), got \(4, 1, 8, 8\)"):
        graph(torch.zeros(4, 1, 8, 8))


def test_no_way_is_prepared_that_no_piece_is_large_enough_for(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = counted(monkeypatch, Float8Backend)
    defense.engine.runner.chunk, defense.engine.runner.fixed_chunk = 63, True
    defense.calibrate(photos(24))
    assert sizes["Float8Backend"] == []
    assert isinstance(defense.engine.calibration.stages[0].backend, HalfPrecisionBackend)


def test_uploads_that_are_certified_never_go_by_eight_bits(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend)
    (group,) = defense._groups(images)
    defense.engine.compute(
        [LabelRequest(subject, subject.table.rows(range(9))) for subject in group]
    )  # as the service does
    assert sizes["Float8Backend"] == []


def test_where_half_precision_fails_for_an_image_that_was_sent_it_is_computed_exactly(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(TripleTf32Backend):
        def logits(self, inputs: Tensor) -> Tensor:
            logits = super().logits(inputs)
            return logits if self.right else -100 * logits

        right = True

    (float8, half), _ = defense.engine.candidates
    finest = Wrong(defense.classifier)  # type: ignore[arg-type]
    defense.engine.candidates = [[float8, half, finest], [half, finest]]
    images = photos(24)
    defense.calibrate(images)
    assert [type(stage.backend) for stage in defense.engine.calibration.stages[1:]] == [HalfPrecisionBackend, Wrong]

    def unusable(self: HalfPrecisionBackend, inputs: Tensor) -> Tensor:
        raise UnusableError("the same image got fast logits 7 apart")

    monkeypatch.setattr(HalfPrecisionBackend, "logits", unusable)
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 0.0)  # which would catch it
    finest.right = False
    verdicts = defense.predict(images)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3).predict(images)
    assert [verdict.label for verdict in verdicts] == [verdict.label for verdict in exact]
    assert defense.engine.calibration.given_up
