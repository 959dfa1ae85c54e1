"""Networks whose logits can be bounded: intervals in, intervals out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.errors import ClassifierError


class IntervalNet(nn.Sequential):
    """A plain sequence of convolutions, linear layers, ReLUs and average pools, with interval bounds.

    A linear map takes the middle of an interval to the middle of the outcome's, and half its width through the
    absolute weights: no input inside leaves the outcome. A ReLU never falls, so it maps the ends. So the
    true logits of every input in the box lie between the bounds.

    So do the logits as a device computes them. A sum of products that is rounded on the way, in
    whatever order, is off by at most ROUNDING times the sum of their absolute values, which is at most the absolute
    weights times (|middle| + half). That much is added to half of the width at every layer.
    """

    def bounds(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [N, C, H, W] of inputs → bounds of what comes before the last layer [N, features]."""
        for layer in list(self)[:-1]:
            low, high = _through(layer, low, high)
        return low, high

    def behind(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """The most by which each class's logit can exceed that of the label [N, classes]; 0 for the label itself.

        The last layer is bounded for differences of logits at once, which is tighter than for each by itself.
        """
        low, high = self.bounds(low, high)
        last: nn.Linear = self[-1]  # type: ignore[assignment]  # interval_net ends so
        weight = last.weight[None] - last.weight[labels][:, None]
        bias = last.bias[None] - last.bias[labels][:, None]
        middle, half = (low + high)[:, :, None] / 2, (high - low)[:, :, None] / 2
        # Each of the two logits is rounded by itself.
        rounded = functional.linear(_size(low, high), last.weight.abs(), last.bias.abs())
        rounded = ROUNDING * (rounded + rounded.gather(1, labels[:, None]))
        ahead = (weight @ middle + weight.abs() @ half)[:, :, 0] + bias + rounded
        return ahead.scatter(1, labels[:, None], 0.0)


def _through(layer: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        middle = layer((low + high) / 2)
        half = _absolute(layer, (high - low) / 2 + ROUNDING * _size(low, high))
        return middle - half, middle + half
    if isinstance(layer, (nn.ReLU, nn.Flatten, nn.AvgPool2d)):  # none of them ever falls
        return layer(low), layer(high)
    raise ClassifierError(
        f"no interval bounds are known for {type(layer).__name__}; there are conv, linear, relu, avgpool"
    )


def _absolute(layer: nn.Conv2d | nn.Linear, half: Tensor) -> Tensor:
    """Half widths of intervals through the absolute weights, and what adding the bias may round."""
    weight, bias = layer.weight.abs(), None if layer.bias is None else ROUNDING * layer.bias.abs()
    if isinstance(layer, nn.Linear):
        return functional.linear(half, weight, bias)
    if layer.padding_mode != "zeros":
        raise ClassifierError(f"interval bounds are known for convolutions padded by zeros, got {layer.padding_mode!r}")
    return functional.conv2d(half, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _size(low: Tensor, high: Tensor) -> Tensor:
    """The largest absolute value in each interval."""
    return torch.maximum(low.abs(), high.abs())


ROUNDING = 1e-5
"""Float32 rounds to 6e-8; sums of thousands of products, in the order of any kernel, stay far below this."""


def interval_net(classes: int = 10, *, width: int = 32, hidden: int = 512, size: int = 32) -> nn.Module:
    """Four convolutions and a hidden layer, as the larger network of Chiang et al. (2020) for 32×32 images."""
    return IntervalNet(
        nn.Conv2d(3, width, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 4, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def boxes(inputs: Tensor, hidden: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [N, C, H, W] as boxes: between `low` and `high` [C] where `hidden` [N, H, W], else as they are."""
    where = hidden[:, None]
    return tuple(torch.where(where, end[:, None, None], inputs) for end in (low, high))  # type: ignore[return-value]
