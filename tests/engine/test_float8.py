"""The FP8 backend: for clean images in whole blocks, and its labels are the exact ones."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import Tensor, nn

from engine.small_networks import float8_weights, labels_of, photos
from patchcleanser import DoubleMasking, Threat, TorchClassifier
from patchcleanser.engine.fast.backends import Backend, UnusableError
from patchcleanser.engine.fast.calibration import ErrorBounds
from patchcleanser.engine.fast.cascade import FastEngine
from patchcleanser.engine.fast.float8 import backend as float8_backend
from patchcleanser.engine.fast.float8.backend import Float8Backend
from patchcleanser.engine.fast.float8.layers import Float8Linear, split_mlps, to_float8, uses_triton
from patchcleanser.engine.fast.half import Graph, HalfPrecisionBackend, to_half
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


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_in_fp8_are_near_those_in_float32(name: str) -> None:
    module, inputs = network(name), photos(16)
    with torch.inference_mode():
        exact = module(inputs)
        half = to_half(copy.deepcopy(module))(inputs.half()).float()
        float8 = split_mlps(to_half(copy.deepcopy(module)))
        float8 = to_float8(float8, float8_weights(float8, inputs.half()), triton=False)
        logits = float8(inputs.half()).float()
    layers = [part for part in float8.modules() if isinstance(part, Float8Linear)]
    assert len(layers) >= 4
    spread = float((exact - exact.mean(0)).std())
    assert 0 < (logits - exact).abs().max() < spread  # images are distinguished
    assert (half - exact).abs().max() < (logits - exact).abs().max()


class Mostly(nn.Module):
    """Does most of its work in convolutions, and has a large linear layer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.head = nn.Conv2d(3, 64, 7), nn.Linear(64, 256), nn.Linear(256, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.wide(self.conv(inputs).mean((2, 3))))
        return outputs


@pytest.mark.parametrize("module", [nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), Mostly()])
def test_networks_that_work_mostly_in_other_layers_are_refused_once(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = TorchClassifier(module.eval())
    backend, tries = Float8Backend(classifier, HalfPrecisionBackend(classifier)), []
    monkeypatch.setattr(float8_backend, "block_size", lambda numbers: 8)
    inner = float8_backend.measure_input_rms
    monkeypatch.setattr(float8_backend, "measure_input_rms", lambda *given: (tries.append(1), inner(*given))[1])
    for _ in range(2):
        with pytest.raises(UnusableError, match="do too little of the work"):
            backend.logits(photos(4))
    assert tries == [1]


def trained_head(module: Any, images: Tensor) -> nn.Module:
    """With a last layer that separates three kinds of images by brightness, so that most margins are large."""
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
    """Certifies by FP8, then half precision, then exactly."""
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.FEW_LABELS", 4)
    monkeypatch.setattr("patchcleanser.engine.fast.float8.backend.block_size", lambda numbers: 64)
    classifier = TorchClassifier(trained_head(network("vit_small_patch16_224"), photos(60)), classes=10)
    defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision="fast")
    half = HalfPrecisionBackend(classifier)
    defense.engine.candidates = [[Float8Backend(classifier, half), half], [half]]
    monkeypatch.setattr(Float8Backend, "resolution", 0.0)  # for random weights every label would be uncertain
    monkeypatch.setattr(Float8Backend, "max_uncertain_share", 0.9)
    return defense


def counted(monkeypatch: pytest.MonkeyPatch, *kinds: type[Backend]) -> dict[str, list[int]]:
    """How many inputs each backend was given, call by call."""
    sizes: dict[str, list[int]] = {kind.__name__: [] for kind in kinds}
    for kind in kinds:

        def logits(self: Backend, inputs: Tensor, inner: Any = kind.logits) -> Tensor:
            sizes[type(self).__name__].append(len(inputs))
            return inner(self, inputs)

        monkeypatch.setattr(kind, "logits", logits)
    return sizes


def test_labels_are_the_exact_ones_and_uncertain_ones_go_stage_by_stage(
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


def test_few_pairs_are_computed_in_half_precision(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend, HalfPrecisionBackend)
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)
    monkeypatch.setattr(FastEngine, "_probe_sometimes", lambda self, pairs, logits, backend: None)
    labels_of(defense, images[:1])  # 46 pairs
    assert sizes["Float8Backend"] == []
    assert sizes["HalfPrecisionBackend"]
    labels_of(defense, images[:8])
    assert sizes["Float8Backend"]
    assert min(sizes["Float8Backend"]) >= 64


def test_attacked_images_are_never_computed_in_fp8(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend, HalfPrecisionBackend)
    verdicts = defense.predict(images)
    assert sizes["Float8Backend"] == []
    assert sizes["HalfPrecisionBackend"]
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3).predict(images)
    assert [verdict.label for verdict in verdicts] == [verdict.label for verdict in exact]


def test_if_too_many_labels_are_uncertain_half_precision_is_first(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float8Backend, "max_uncertain_share", 0.0)
    images = photos(24)
    labels = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, HalfPrecisionBackend)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    assert (labels == labels_of(exact, images)).all()


def test_a_wrong_fp8_label_is_caught_by_the_audit(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)
    monkeypatch.setattr(ErrorBounds, "exceeded", lambda self, fast, finer: torch.zeros(len(fast), dtype=torch.bool))
    images = photos(24)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)
    logits = Float8Backend.logits
    monkeypatch.setattr(Float8Backend, "logits", lambda self, inputs: 100 * logits(self, inputs).roll(1, 1))
    labels = labels_of(defense, images)
    assert defense.engine.calibration.given_up
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    assert (labels == labels_of(exact, images)).all()


def test_changed_weights_are_noticed(defense: DoubleMasking) -> None:
    backend = defense.engine.candidates[0][0]
    backend.logits(photos(2))
    with torch.no_grad():
        next(defense.classifier.module.parameters()).mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match="changed since it was calibrated"):
        backend.logits(photos(2))


def test_without_memory_for_fp8_half_precision_goes_on(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(24)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3)
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)
    sizes = counted(monkeypatch, HalfPrecisionBackend)

    def full(self: Float8Linear, inputs: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Float8Linear, "forward", full)
    assert (labels_of(defense, images) == labels_of(exact, images)).all()
    assert sizes["HalfPrecisionBackend"]
    assert not defense.engine.calibration.given_up
    assert defense.engine.runner.chunk == 512


def test_a_stage_that_failed_once_is_left_out(defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch) -> None:
    images, calls = photos(24), []
    defense.calibrate(images)
    monkeypatch.setattr(defense.engine, "calibrate", lambda states: None)

    def changed(self: HalfPrecisionBackend, inputs: Tensor) -> Tensor:
        calls.append(len(inputs))
        if len(calls) == 1:
            raise UnusableError("there is no memory")
        return torch.zeros(len(inputs), 10)  # as if by other kernels

    monkeypatch.setattr(HalfPrecisionBackend, "logits", changed)
    labels = labels_of(defense, images)
    assert len(calls) == 1
    assert (labels == labels_of(DoubleMasking(defense.classifier, Threat.square(5), masks=3), images)).all()


def test_labels_that_overflow_in_fp8_are_uncertain_and_go_to_half_precision(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    logits = Float8Backend.logits

    def overflown(self: Float8Backend, inputs: Tensor) -> Tensor:
        outputs = logits(self, inputs)
        outputs[1::8] = torch.nan
        return outputs

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


def test_a_deep_copy_keeps_the_scales_that_were_compared(defense: DoubleMasking) -> None:
    images = photos(64)
    backend = defense.engine.candidates[0][0]
    before = backend.logits(images)
    other = copy.deepcopy(backend)
    other.logits(0.01 * images)  # makes it again
    assert (other.logits(images) == before).all()


def test_releasing_memory_changes_no_logits(defense: DoubleMasking) -> None:
    images = photos(64)
    backend = defense.engine.candidates[0][0]
    before = backend.logits(images)
    defense.engine.exact.empty_caches()
    assert backend._built is None
    assert (backend.logits(0.01 * images) != before).any()  # makes it again
    assert (backend.logits(images) == before).all()


def test_a_backend_that_was_compared_with_other_kernels_is_refused(defense: DoubleMasking) -> None:
    backend = defense.engine.candidates[0][0]
    backend.logits(photos(64))
    other = copy.deepcopy(backend)
    other._triton = True  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match="kernels that are not for this device"):
        other.logits(photos(64))


class Recorded:
    """Replays a forward pass, as a CUDA graph does, or cannot be recorded."""

    shapes: ClassVar[list[torch.Size]] = []
    error: ClassVar[Exception | None] = None

    def __init__(self, half: TorchClassifier, inputs: Tensor) -> None:
        if self.error is not None:
            raise self.error
        self.half, self.shape = half, inputs.shape
        self.shapes.append(inputs.shape)

    def __call__(self, inputs: Tensor) -> Tensor:
        assert inputs.shape == self.shape
        return 1 + self.half.checked_logits(inputs)  # to tell it from the network itself


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    monkeypatch.setattr(float8_backend, "Graph", Recorded)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(Recorded, "shapes", [])
    monkeypatch.setattr(Recorded, "error", None)
    return Recorded


def test_blocks_of_another_size_are_not_replayed(recorded: type[Recorded]) -> None:
    classifier = TorchClassifier(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 10)).eval())
    block, other = torch.rand(4, 3, 32, 32), torch.rand(4, 3, 48, 48)
    answers = float8_backend._compile_and_record(classifier, block, False)
    torch.testing.assert_close(answers(block), 1 + classifier.checked_logits(block))
    torch.testing.assert_close(answers(other), classifier.checked_logits(other))
    assert recorded.shapes == [block.shape]


@pytest.mark.parametrize(
    "error", [RuntimeError("capture failed"), OutputError("the model failed"), UnusableError("no")]
)
def test_without_a_cuda_graph_every_block_is_computed(
    error: Exception, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "error", error)
    classifier = TorchClassifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)).eval())
    block = torch.rand(4, 3, 2, 2)
    torch.testing.assert_close(
        float8_backend._compile_and_record(classifier, block, False)(block), classifier.checked_logits(block)
    )


@pytest.mark.parametrize("calibrated", [False, True])
def test_if_triton_kernels_fail_torchs_are_used_unless_others_were_compared(
    calibrated: bool, recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "error", RuntimeError("capture failed"))
    inputs = photos(8).half()
    with torch.inference_mode():
        module = split_mlps(to_half(network("vit_small_patch16_224")))
        weights = float8_weights(module, inputs)
        plain = to_float8(copy.deepcopy(module), weights, triton=False)
        fused = TorchClassifier(to_float8(module, weights, triton=True))
        assert uses_triton(fused.module)
        if calibrated:
            with pytest.raises(UnusableError):  # Triton's are for GPUs
                float8_backend._compile_and_record(fused, inputs, calibrated)
        else:
            answers = float8_backend._compile_and_record(fused, inputs, calibrated)
            assert not uses_triton(fused.module)
            torch.testing.assert_close(answers(inputs), plain(inputs).float())


def test_a_graph_refuses_inputs_of_another_shape() -> None:
    graph = object.__new__(Graph)
    graph._inputs = torch.zeros(4, 3, 8, 8)
    with pytest.raises(ValueError, match=r"of inputs \(4, 3, 8, 8\), got \(4, 1, 8, 8\)"):
        graph(torch.zeros(4, 1, 8, 8))


def test_a_backend_that_no_batch_is_large_enough_for_is_not_prepared(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = counted(monkeypatch, Float8Backend)
    defense.engine.runner.chunk, defense.engine.runner.fixed_chunk = 63, True
    defense.calibrate(photos(24))
    assert sizes["Float8Backend"] == []
    assert isinstance(defense.engine.calibration.stages[0].backend, HalfPrecisionBackend)


def test_uploads_that_are_certified_are_never_computed_in_fp8(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    defense.calibrate(images)
    sizes = counted(monkeypatch, Float8Backend)
    (group,) = defense._groups(images)
    defense.engine.compute([LabelRequest(state, state.table.rows(range(9))) for state in group])  # as the service does
    assert sizes["Float8Backend"] == []


def test_if_half_precision_fails_for_an_attacked_image_it_is_computed_exactly(
    defense: DoubleMasking, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(24)
    defense.calibrate(images)
    assert [type(stage.backend) for stage in defense.engine.calibration.stages] == [Float8Backend, HalfPrecisionBackend]

    def unusable(self: HalfPrecisionBackend, inputs: Tensor) -> Tensor:
        raise UnusableError("the same image got fast logits 7 apart")

    monkeypatch.setattr(HalfPrecisionBackend, "logits", unusable)
    verdicts = defense.predict(images)
    exact = DoubleMasking(defense.classifier, Threat.square(5), masks=3).predict(images)
    assert [verdict.label for verdict in verdicts] == [verdict.label for verdict in exact]
    assert defense.engine.calibration.given_up
