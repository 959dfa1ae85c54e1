"""The half-precision copy: never the network itself, and bounded in what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.small_networks import Small, noise
from patchcleanser import (
    TorchClassifier,
)
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.float8.backend import Float8Backend
from patchcleanser.engine.fast.half import BLOCKS, SHAPES, HalfPrecisionBackend, _HalfNetwork
from patchcleanser.errors import TrainModeError


def test_the_network_stays_float32_and_its_train_mode_is_refused() -> None:
    module = Small().eval()
    backend = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    backend.logits(noise(2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    module.train()
    with pytest.raises(TrainModeError):
        backend.logits(noise(2))


class InFloat32(Small):
    """As some networks do: a part works in float32, whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_a_network_that_fails_in_half_precision_is_unusable() -> None:
    with pytest.raises(UnusableError, match="does not work in float16"):
        HalfPrecisionBackend(TorchClassifier(InFloat32().eval(), classes=4)).logits(noise(2))


def test_a_network_whose_copy_is_itself_is_not_touched() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Shared()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    class Shared(Small):
        def __deepcopy__(self, memo: dict[int, object]) -> Shared:
            return self

    for module in (Shared().eval(), Single().eval()):
        with pytest.raises(UnusableError, match="shares parts"):
            HalfPrecisionBackend(TorchClassifier(module, classes=4)).logits(noise(2))
        assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_network_that_cannot_be_channels_last_is_unusable() -> None:
    module = Small().eval()
    module.register_buffer("volume", torch.zeros(1, 2, 2, 2, 2))  # there is no channels last for five dimensions
    with pytest.raises(UnusableError, match="cannot be copied"):
        HalfPrecisionBackend(TorchClassifier(module, classes=4)).logits(noise(2))


def test_the_copy_computes_in_float16_whatever_autocast_surrounds_it() -> None:
    backend = HalfPrecisionBackend(TorchClassifier(Small().eval(), classes=4))
    with torch.inference_mode():
        alone = backend.logits(noise(3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (backend.logits(noise(3)) == alone).all()


def test_the_number_of_counted_shapes_is_bounded() -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    network = _HalfNetwork(classifier, steady=True)
    with torch.inference_mode():
        for height in range(4, 4 + SHAPES + 8):
            network.small_batch(torch.zeros(1, 3, height, 4))
    assert len(network.graphs) <= SHAPES


def test_a_block_is_built_once_whatever_sizes_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Block:
        """Says by which decision it was built: so many labels were expected."""

        def __init__(self, classifier: TorchClassifier, inputs: Tensor, expected: int) -> None:
            self.expected = expected
            built.append(inputs.shape[-1])

        def __call__(self, inputs: Tensor) -> Tensor:
            return torch.full((len(inputs), 4), float(self.expected))

    monkeypatch.setattr("patchcleanser.engine.fast.half._Block", Block)
    network = _HalfNetwork(TorchClassifier(Small().eval(), classes=4), steady=True)
    network.accelerated = True
    sides = range(8, 8 + BLOCKS + 1)
    with torch.inference_mode():
        first, again = (
            [network(torch.zeros(80, 3, side, side), 80, expected) for side in sides] for expected in (1000, 0)
        )
    assert built == [*sides][:BLOCKS]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_a_users_own_subclass_gets_its_inputs_unrounded(resnet: nn.Module) -> None:
    class Own(TorchClassifier):
        def logits(self, inputs: Tensor) -> Tensor:
            return super().logits(inputs.flip(3))

    assert HalfPrecisionBackend(Own(resnet)).input_dtype is None
    assert Float8Backend(Own(resnet), HalfPrecisionBackend(Own(resnet))).input_dtype is None
