"""The ONNX Runtime backend: the same labels, threads, and networks that it must refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.small_networks import Small, labels_of, noise
from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend
from patchcleanser.errors import OutputError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Branching(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 0.9 else -super().forward(x)


def test_labels_through_onnx_runtime_equal_exact_ones_and_few_are_computed_twice(no_half: None) -> None:
    sample = load_dataset("sample")
    images = torch.stack([sample.image(i) for i in range(0, 300, 25)])
    tables = {}
    for precision in ("exact", "fast"):
        classifier = load_classifier("zoo:tiny", device="cpu")
        defense = DoubleMasking(classifier, Threat.square(5), masks=4, precision=precision)
        tables[precision] = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert (tables["exact"] == tables["fast"]).all()
    assert defense.engine.stats.labels > 0
    assert defense.engine.stats.rechecked < defense.engine.stats.labels / 20


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_with_images_of_their_own_answer_in_the_order_of_the_images(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.RUN_NUMEL", 2 * noise(1).numel())
    module = Small().eval()
    backend = OnnxRuntimeBackend(TorchClassifier(module, classes=4))
    for number in (8, 1, 2, 5, 7, 33):
        with torch.inference_mode():
            got, want = backend.logits(noise(number)), module(noise(number))
        assert torch.allclose(got, want, atol=1e-6)
        assert len(want.round(decimals=4).unique(dim=0)) == number  # no two rows could be exchanged
    (session,) = backend._built.values()
    assert session.session.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize(("threads", "each"), [(8, 1), (9, 9)])
def test_threads_without_an_image_of_their_own_share_a_batch(
    threads: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    module = Small().eval()
    backend = OnnxRuntimeBackend(TorchClassifier(module, classes=4))
    for number in (2, 9):  # the first is a chunk, of which four come at a time later
        with torch.inference_mode():
            assert torch.allclose(backend.logits(noise(number)), module(noise(number)), atol=1e-6)
    (session,) = backend._built.values()
    assert session.session.get_session_options().intra_op_num_threads == each


def test_a_network_that_branches_on_pixel_values_is_not_exported(no_half: None) -> None:
    module = Branching().eval()
    with pytest.raises(UnusableError, match="Branching cannot be exported"):
        OnnxRuntimeBackend(TorchClassifier(module, classes=4)).logits(noise(2))
    fast, exact = (
        labels_of(DoubleMasking(TorchClassifier(module), Threat.square(2), masks=3, precision=p), noise(12))
        for p in ("fast", "exact")
    )
    assert (fast == exact).all()


class Largest(Small):
    """Takes the largest of some."""

    def __init__(self, largest: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.largest(self.conv(x).relu()).flatten(2).mean(2))  # type: ignore[no-any-return]


class Broken(Largest):
    """Divides by the brightness of a pixel before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.sum(1, keepdim=True))


LARGEST = {
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "window": lambda x: functional.max_pool2d(x, 4),
    "whole": lambda x: functional.adaptive_max_pool2d(x, 1),
    "top": lambda x: x.flatten(2).topk(3).values,
}


@pytest.mark.parametrize("largest", LARGEST)
def test_onnx_runtime_is_not_used_where_it_would_drop_nan(largest: str, no_half: None) -> None:
    images = noise(60).clamp_min(0.02)
    classifier = TorchClassifier(Broken(LARGEST[largest]).eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, precision="fast")
    defense.calibrate(images)
    assert not defense.engine.ready
    images[:, :, 3:5, 3:5] = 0
    with pytest.raises(OutputError, match="NaN"):
        defense.certify(images[:1], [0])


def test_onnx_runtime_is_used_where_no_nan_can_arise_before_a_max(no_half: None) -> None:
    classifier = TorchClassifier(Largest(LARGEST["window"]).eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, precision="fast")
    defense.calibrate(noise(60))
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert defense.engine.ready


class Keeping(Small):
    """Keeps what it saw last, and something that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape
        return super().forward(x)


def test_a_network_with_state_of_its_own_stays_fast(no_half: None) -> None:
    defense = DoubleMasking(TorchClassifier(Keeping().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    defense.calibrate(noise(60))
    assert defense.engine.ready
    defense.certify(noise(2), [0, 0])
    assert defense.engine.ready
