"""Networks of a trunk and a head: what the trunk computes in whole numbers, and what it keeps to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcleanser import load_classifier
from patchcleanser.classifiers.trained import bare_spec
from patchcleanser.errors import ClassifierError
from patchcleanser.networks.builders import build_network
from patchcleanser.networks.split import STEPS, WEIGHT_STEPS, whole_weights
from patchcleanser.networks.visible_pooling import VisibleFeatures
from patchcleanser.training.artifacts import write_model

OPTIONS = {"field": 9, "width": 12, "depth": 3, "head": 2, "head_width": 16}


def network(seed: int = 0, **options: Any) -> Any:
    """A network whose batch norms have statistics, as after training."""
    torch.manual_seed(seed)
    module = build_network("split", {**OPTIONS, **options}).eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.3)
            nn.init.normal_(layer.bias, 0.0, 0.3)
            layer.running_mean.normal_(0.0, 0.3)  # type: ignore[union-attr,operator]
            layer.running_var.uniform_(0.3, 2.0)  # type: ignore[union-attr,operator]
    return module


@torch.inference_mode()
def features(module: Any, images: Tensor) -> Tensor:
    result: Tensor = module.features(images)
    return result


def integers(layers: nn.Sequential, whole: NDArray[Any]) -> NDArray[Any]:
    """Convolutions with their batch norms, and ReLUs, of whole numbers [C, H, W] in Python's integers."""
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, nn.ReLU):
            whole = np.maximum(whole, 0)
        if not isinstance(layer, nn.Conv2d):
            continue
        norm = after if isinstance(after, nn.BatchNorm2d) else None
        weight, bias = (
            np.vectorize(int, otypes=[object])(part.detach().numpy()) for part in whole_weights(layer, norm)
        )
        kernel, stride = layer.kernel_size[0], layer.stride[0]
        down, across = ((side - kernel) // stride + 1 for side in whole.shape[1:])
        sums = np.empty((len(weight), down, across), dtype=object)
        for i in range(down):
            for j in range(across):
                seen = whole[:, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
                sums[:, i, j] = (weight * seen).sum((1, 2, 3)) + bias
        whole = np.vectorize(nearest, otypes=[object])(sums)
    return whole


def nearest(number: int) -> int:
    """number / WEIGHT_STEPS, rounded to the nearest whole number, halves to even."""
    quotient, rest = divmod(number, WEIGHT_STEPS)
    return quotient + (2 * rest > WEIGHT_STEPS or (2 * rest == WEIGHT_STEPS and quotient % 2 == 1))


def test_features_are_those_of_integer_arithmetic() -> None:
    module = network(width=6, depth=2, field=5)
    image = torch.randn(3, 11, 11)
    whole = np.vectorize(int, otypes=[object])((image.double() * STEPS).round().numpy())
    whole = integers(module.stem, whole)
    for block in module.blocks:
        residual = integers(block.layers, whole)
        edge = (block.kernel - 1) // 2
        inner = whole[:, edge : whole.shape[1] - edge, edge : whole.shape[2] - edge]
        shortcut = inner if isinstance(block.shortcut, nn.Identity) else integers(block.shortcut, inner)
        whole = np.maximum(residual + shortcut[:, : residual.shape[1], : residual.shape[2]], 0)
    expected = whole.astype(np.float64) / STEPS
    assert (features(module, image[None])[0].numpy() == expected).all()
    assert (expected > 0).mean() > 0.2


@pytest.mark.parametrize("content", [1.0, 1e6, float("inf"), float("nan")])
def test_features_that_do_not_see_a_patch_keep_every_bit(content: float) -> None:
    module, images = network(), torch.randn(8, 3, 32, 32)
    attacked = images.clone()
    attacked[:, :, 10:15, 12:17] = content * torch.randn(8, 3, 5, 5)
    clean, patched = features(module, images), features(module, attacked)
    sees = torch.zeros(12, 12, dtype=torch.bool)  # fields of 9 px, 2 px apart
    sees[1:8, 2:9] = True
    assert clean.shape[2:] == sees.shape
    assert torch.equal(clean[..., ~sees], patched[..., ~sees])
    assert (clean != patched)[..., sees].any(1).float().mean() > 0.9
    assert patched.isfinite().all()


def test_what_else_is_in_a_batch_and_how_it_lies_in_memory_change_no_bit() -> None:
    module, images = network(), torch.randn(9, 3, 32, 32)
    together = features(module, images)
    assert torch.equal(together, torch.cat([features(module, image[None]) for image in images]))
    assert torch.equal(together, features(module, images.contiguous(memory_format=torch.channels_last)))
    order = torch.randperm(9)
    assert torch.equal(together[order], features(module, images[order]))


def test_whole_numbers_are_near_the_network_that_was_trained() -> None:
    module, images = network(), torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        plain = module.blocks(module.stem(images))
    assert (plain - features(module, images)).abs().max() < 0.01 * plain.abs().max()


def test_weights_whose_sums_may_be_rounded_are_refused() -> None:
    module = network()
    with torch.no_grad():
        module.stem[0].weight *= 1e4
    with pytest.raises(ClassifierError, match=r"only those below 2\^53 are exact; train it with more weight decay"):
        features(module, torch.rand(1, 3, 32, 32))
    with torch.no_grad():
        module.stem[0].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ClassifierError, match="may reach nan"):
        features(module, torch.rand(1, 3, 32, 32))


def test_attacks_get_gradients_through_the_rounding() -> None:
    module, images = network(), torch.rand(2, 3, 32, 32, requires_grad=True)
    (exact,) = torch.autograd.grad(module.features(images).sum(), images)
    (plain,) = torch.autograd.grad(module.blocks(module.stem(images)).sum(), images)
    assert plain.abs().max() > 0
    assert (exact - plain).abs().max() < 0.05 * plain.abs().max()


def test_hidden_pixels_change_no_bit_of_the_logits_and_visible_ones_do() -> None:
    classifier = load_classifier("visible:net:split?width=12&depth=2&head=2&head_width=16", device="cpu")
    images, hidden = torch.rand(3, 3, 32, 32), torch.zeros(3, 1, 32, 32)
    hidden[:, :, 4:14, 20:29] = 1
    other = torch.where(hidden > 0, torch.randn(3, 3, 32, 32) * 100, images)
    with torch.inference_mode():
        first, second = (classifier.logits(torch.cat([x, hidden], 1)) for x in (images, other))
        unmasked = classifier.logits(torch.cat([images, torch.zeros_like(hidden)], 1))
    assert torch.equal(first, second)
    assert not torch.allclose(first, unmasked)


def test_without_masks_it_is_the_network_that_it_wraps() -> None:
    module, images = network(), torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        wrapped = VisibleFeatures(module).eval()(torch.cat([images, torch.zeros(2, 1, 32, 32)], 1))
        assert torch.allclose(wrapped, module(images), atol=1e-6)


def test_a_network_without_a_head_is_another_one() -> None:
    with pytest.raises(ClassifierError, match="at least 1 block, got head=0; without a head, use net:bagnet"):
        build_network("split", {"head": 0})


def test_one_that_was_trained_is_loaded_with_its_card(tmp_path: Path) -> None:
    spec = "visible:net:split?width=12&depth=2&head=2&head_width=16"
    classifier: Any = load_classifier(spec, device="cpu")
    assert bare_spec(spec) == spec
    write_model(classifier.module, tmp_path, {"model": spec, "preprocessing": vars(classifier.preprocessing)})
    again = load_classifier(f"trained:{tmp_path}", device="cpu")
    inputs = torch.cat([torch.rand(2, 3, 32, 32), torch.zeros(2, 1, 32, 32)], 1)
    with torch.inference_mode():
        assert torch.allclose(again.logits(inputs), classifier.logits(inputs), atol=1e-2)
