"""A backend is only used for the network that it was built from and calibrated with."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from engine.small_networks import Small, labels_of, noise
from patchcleanser import DoubleMasking, Threat, TorchClassifier
from patchcleanser.attacks.adaptive import defense_on_grid
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.half import HalfPrecisionBackend
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize("kind", [OnnxRuntimeBackend, HalfPrecisionBackend])
@pytest.mark.parametrize("change", ["weights", "setting"])
def test_what_was_built_from_a_network_that_changed_is_built_again(
    no_half: None, change: str, kind: type[OnnxRuntimeBackend | HalfPrecisionBackend]
) -> None:
    module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    backend = kind(classifier)
    backend.refresh()
    before = backend.logits(noise(3))
    if change == "weights":
        with torch.no_grad():
            module.head.bias += 1
        with pytest.raises(UnusableError, match="changed since it was calibrated"):
            backend.logits(noise(3))
    else:
        module.scale = 2.0
    backend.refresh()
    after = pickle.loads(pickle.dumps(backend)).logits(noise(3))  # also when sent to another process
    assert (after - before).abs().max() > 0.1
    with torch.inference_mode():
        assert (after - classifier.logits(noise(3))).abs().max() < 10 * backend.resolution


@pytest.mark.parametrize("change", ["buffer", "hook"])
def test_buffers_that_are_not_stored_and_hooks_are_noticed_too(change: str) -> None:
    module = Small().eval()
    module.register_buffer("extra", torch.ones(4), persistent=False)
    backend = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    backend.logits(noise(2))
    if change == "buffer":
        module.extra += 1
    else:
        module.head.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(UnusableError, match="changed"):
        backend.logits(noise(2))


@pytest.mark.parametrize("change", ["moved", "replaced"])
def test_a_layer_that_went_elsewhere_or_became_another_is_noticed_too(change: str) -> None:
    stem, body = nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU())
    module = nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).eval()
    backend = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    backend.logits(noise(2))
    if change == "moved":
        body.append(stem.pop(0))
    else:
        body[0] = nn.Identity().eval()
    with pytest.raises(UnusableError, match="changed"):
        backend.logits(noise(2))


def test_logits_of_an_outdated_copy_are_refused_though_another_thread_calibrated_the_new_network() -> None:
    started, go_on = threading.Event(), threading.Event()
    go_on.set()

    class Slow(Small):
        def forward(self, x: Tensor) -> Tensor:
            started.set()
            assert go_on.wait(60)
            return super().forward(x)

    module = Slow().eval()
    backend = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    backend.logits(noise(2))
    with torch.no_grad():
        module.head.weight *= -3
    started.clear()
    go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(backend.logits, noise(2))
        assert started.wait(60)
        backend.refresh()  # as a calibration does
        go_on.set()
        with pytest.raises(UnusableError, match="changed during a forward pass"):
            answer.result()


@pytest.mark.parametrize("half", [torch.bfloat16, None])
def test_a_calibration_with_other_weights_is_not_used(
    half: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.backends.half_type", lambda device: half)
    module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    defense, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    defense.calibrate(noise(60))
    assert defense.engine.ready
    with torch.no_grad():
        module.head.weight *= -3
    assert defense.predict(noise(4)) == exact.predict(noise(4))
    assert not defense.engine.ready
    defense.certify(noise(8), [0] * 8)  # few as they are, they are compared again
    assert defense.engine.ready


@pytest.mark.parametrize("inference", [False, True], ids=["data", "inference"])
def test_weights_written_without_a_version_count_are_noticed_when_clean_images_are_certified(
    inference: bool, no_half: None
) -> None:
    with torch.inference_mode(inference):
        module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    defense, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    defense.calibrate(noise(60))
    assert defense.engine.ready
    with torch.inference_mode(inference):
        for weight in module.head.parameters():
            numbers = weight if inference else weight.data
            numbers.copy_(numbers.flip(0))  # their sum and length are the same
    if inference:  # then at once
        assert defense.predict(noise(4)) == exact.predict(noise(4))
    assert (labels_of(defense, noise(4)) == labels_of(exact, noise(4))).all()
    assert defense.predict(noise(4)) == exact.predict(noise(4))


def test_a_deep_copy_of_a_defense_is_not_calibrated(no_half: None) -> None:
    module = Small().eval()
    defense = DoubleMasking(TorchClassifier(module, classes=4), Threat.square(2), masks=3, precision="fast")
    defense.calibrate(noise(60))
    assert defense.engine.ready
    for other in (pickle.loads(pickle.dumps(defense)), copy.deepcopy(defense)):
        assert not other.engine.ready
        assert other.predict(noise(4)) == defense.predict(noise(4))
        other.calibrate(noise(60))
        assert other.engine.ready
    assert defense.engine.ready


def test_a_shallow_copy_with_the_same_network_is_calibrated(no_half: None) -> None:
    defense = DoubleMasking(
        TorchClassifier(Small().eval(), classes=4), Threat.square(2, grid="input"), masks=3, precision="fast"
    )
    defense.calibrate(noise(60))
    placed = defense_on_grid(defense)
    assert placed.engine.ready
    assert placed.predict(noise(4)) == defense.predict(noise(4))


def test_a_network_made_in_inference_mode_or_with_extra_state_has_fast_backends() -> None:
    class Own(Small):
        def get_extra_state(self) -> str:
            return "no tensor"

    with torch.inference_mode():
        module = Own().eval()
        for backend in (
            HalfPrecisionBackend(TorchClassifier(module, classes=4)),
            OnnxRuntimeBackend(TorchClassifier(module, classes=4)),
        ):
            backend.refresh()
            assert backend.logits(noise(2)).shape == (2, 4)
