"""The fast engine: which backend computes labels, in which batches, and when it is left."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.small_networks import Small, labels_of, noise
from patchcleanser import (
    DoubleMasking,
    Threat,
    TorchClassifier,
)
from patchcleanser.core.masks import MaskSet
from patchcleanser.engine.exact import BATCH_NUMEL
from patchcleanser.engine.fast.backends import AutocastBackend, Backend, UnusableError
from patchcleanser.engine.fast.calibration import ErrorBounds
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend
from patchcleanser.errors import NotAFunctionError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Hungry(AutocastBackend):
    """A backend, as fine as float32, that likes several chunks at once and notes what it got."""

    chunks = 4

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier, torch.float32)
        self.memory, self.got = 1000, [0]

    def logits(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.memory:
            raise MemoryError
        self.got.append(len(inputs))
        return self.classifier.checked_logits(inputs)


def hungry(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[DoubleMasking, Hungry]:
    """A defense of small chunks, whose backend was calibrated with such chunks."""
    monkeypatch.setitem(BATCH_NUMEL, "cpu", 5 * noise(1).numel())
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, chunk=chunk, precision="fast")
    defense.engine.candidates = [[backend := Hungry(classifier)]]
    defense.calibrate(noise(60))
    assert defense.engine.ready
    assert max(backend.got) == 5
    return defense, backend


@pytest.mark.parametrize(("chunk", "most"), [(None, 20), (5, 5)])
def test_a_backend_gets_as_many_chunks_as_it_wants_unless_their_size_was_set(
    chunk: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    defense, backend = hungry(chunk, monkeypatch)
    exact = DoubleMasking(backend.classifier, Threat.square(2), masks=3)
    assert defense.predict(noise(9)) == exact.predict(noise(9))
    assert max(backend.got) == most


def test_a_backend_that_runs_out_of_memory_with_several_chunks_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    defense, backend = hungry(None, monkeypatch)
    exact = DoubleMasking(backend.classifier, Threat.square(2), masks=3)
    backend.memory = 12
    assert defense.predict(noise(9)) == exact.predict(noise(9))
    backend.got.clear()
    assert defense.predict(noise(9)) == exact.predict(noise(9))
    assert max(backend.got) == 5


class Chance(Small):
    """Chance drawn by Python, which is a constant in an export."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.new_tensor([0.02 * random.uniform(-1, 1), 0, 0, 0])


class ByCompany(Small):
    """Mixes the images of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * x.mean())


@pytest.mark.parametrize("kind", [Chance, ByCompany])
def test_a_classifier_that_is_no_function_is_refused_though_its_fast_backend_is_one(
    kind: type[Small], no_half: None
) -> None:
    defense = DoubleMasking(TorchClassifier(kind().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    with pytest.raises(NotAFunctionError):
        defense.certify(noise(60), [0] * 60)


def test_if_the_first_backend_is_too_coarse_the_next_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.backends.half_type", lambda device: torch.bfloat16)
    uncertain = ErrorBounds.uncertain

    def coarse(self: ErrorBounds, fast: Tensor) -> Tensor:
        half = self._resolution > torch.finfo(torch.float16).eps
        return torch.ones(len(fast), dtype=torch.bool) if half else uncertain(self, fast)

    monkeypatch.setattr(ErrorBounds, "uncertain", coarse)
    assert Backend.max_uncertain_share < 1
    defense = DoubleMasking(TorchClassifier(Small().eval()), Threat.square(2), masks=3, precision="fast")
    assert [type(backend) for (backend,) in defense.engine.candidates] == [AutocastBackend, OnnxRuntimeBackend]
    fast = labels_of(defense, noise(20))
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert defense.engine.ready
    exact = DoubleMasking(TorchClassifier(Small().eval()), Threat.square(2), masks=3)
    assert (fast == labels_of(exact, noise(20))).all()


class Typed(Small):
    """As quantised layers do: it takes float32 only, and some of its state is no tensor."""

    def get_extra_state(self) -> str:
        return "no tensor"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        if hidden.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float")
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def test_if_half_precision_fails_another_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.backends.half_type", lambda device: torch.bfloat16)
    classifier = TorchClassifier(Typed().eval(), classes=4)
    fast, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    assert (labels_of(fast, noise(12)) == labels_of(exact, noise(12))).all()
    assert not isinstance(fast.engine.calibration.stages[0].backend, AutocastBackend)


class OnlyOneSize(Backend):
    """A backend for inputs of one size only."""

    resolution = torch.finfo(torch.float32).eps
    side = 12

    def logits(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-1] != self.side:
            raise UnusableError("another size")
        return self.classifier.checked_logits(inputs)


def test_labels_of_a_size_that_was_never_compared_are_the_exact_ones_and_the_others_stay_fast() -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense, exact = (
        DoubleMasking(classifier, Threat.square(2), masks=3, precision=precision) for precision in ("fast", "exact")
    )
    defense.engine.candidates = [[OnlyOneSize(classifier)]]
    defense.calibrate(noise(60))
    assert defense.engine.ready
    larger = torch.rand(3, 3, 14, 14, generator=torch.Generator().manual_seed(3))
    assert defense.predict(larger) == exact.predict(larger)
    assert defense.engine.ready  # OnlyOneSize would have complained
    before = defense.engine.stats.labels
    assert defense.predict(noise(3)) == exact.predict(noise(3))
    assert defense.engine.stats.labels > before


def test_backends_get_the_expected_number_of_labels() -> None:
    defense = DoubleMasking(TorchClassifier(Small().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    defense.check_size((12, 12))
    defense.hint_total_images(10)
    assert {backends[0].expected for backends in defense.engine.candidates} == {
        10 * len(defense.mask_set((12, 12)).unions)
    }


class OnlyInCompany(OnlyOneSize):
    """A backend that fails, or gives other logits, for one image alone, as in a probe."""

    alone: float | None = 0.0

    def logits(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1 and self.alone is None:
            raise UnusableError("a batch of one")
        logits = super().logits(inputs)
        logits[:, 0] += (self.alone or 0.0) * (len(inputs) == 1)
        return logits


@pytest.mark.parametrize("alone", [None, 9.0])
def test_a_backend_that_fails_when_it_is_probed_is_given_up(alone: float | None) -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense, exact = (
        DoubleMasking(classifier, Threat.square(2), masks=3, precision=precision) for precision in ("fast", "exact")
    )
    defense.engine.candidates = [[backend := OnlyInCompany(classifier)]]
    defense.calibrate(noise(60))
    assert defense.engine.ready
    backend.alone = alone
    assert defense.predict(noise(3)) == exact.predict(noise(3))
    assert not defense.engine.ready


def test_custom_masks_count_in_the_expected_number_of_labels() -> None:
    masks = MaskSet.build(Threat.square(2), image=(12, 12), masks=3)
    defense = DoubleMasking(
        TorchClassifier(Small().eval(), classes=4), Threat.square(2), mask_set=masks, precision="fast"
    )
    defense.hint_total_images(10)
    assert {backends[0].expected for backends in defense.engine.candidates} == {10 * len(masks.unions)}
