"""3xTF32: nearly the logits of float32."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from engine.small_networks import photos
from patchcleanser import TorchClassifier
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.split import SplitConv, SplitLinear, TripleTf32Backend, high_low


def test_high_and_low_parts_add_up_and_tf32_reads_all_of_the_high_part() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    high, low = high_low(numbers)
    assert torch.equal(high + low, numbers)
    assert torch.equal(high_low(high)[0], high)
    assert (low.abs() <= numbers.abs() * 2**-10).all()


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "resnetv2_50x1_bit", "resmlp_12_224"])
def test_logits_in_3xtf32_are_nearly_those_in_float32(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=10).eval()
    nn.init.normal_(module.get_classifier().weight, std=0.1)
    classifier = TorchClassifier(module, classes=10)
    inputs = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    backend = TripleTf32Backend(classifier)
    with torch.inference_mode():
        exact, split = classifier.logits(inputs), backend.logits(inputs)
    assert backend._built is not None
    assert any(isinstance(part, (SplitLinear, SplitConv)) for part in backend._built.module.modules())
    assert (split - exact).abs().max() < 1e-4 * exact.abs().max()
    assert not any(isinstance(part, (SplitLinear, SplitConv)) for part in module.modules())


def test_a_network_without_matrix_products_is_unusable() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(UnusableError, match="no layer whose products could be split"):
        TripleTf32Backend(TorchClassifier(module, classes=3)).logits(photos(1))
