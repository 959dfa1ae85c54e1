"""Networks with interval bounds of their logits (interval bound propagation)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.errors import ClassifierError

ROUNDING = 1e-5
"""Relative rounding error: float32 rounds to 6e-8, and sums of thousands of products stay far below this."""


class IntervalNet(nn.Sequential):
    """A plain sequence of convolutions, linear layers, ReLUs and average pools, with interval bounds.

    A linear layer maps the middle of an interval to the middle of its image, and half its width through the absolute
    weights. A ReLU is monotone, so it maps the ends. So the true logits of every input in the box lie between the
    bounds.

    So do the logits as a device computes them. A sum of products, rounded in whatever order, is off by at most
    ROUNDING times the sum of their absolute values, which is at most the absolute weights times (|middle| + half).
    That much is added to half of the width at every layer.
    """

    def behind(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """The most by which each class's logit can exceed that of the label [N, classes], in boxes [N, C, H, W].

        The last layer is bounded for differences of logits, which is tighter than bounding each logit.
        """
        for layer in list(self)[:-1]:
            low, high = _through(layer, low, high)
        last: nn.Linear = self[-1]  # type: ignore[assignment]  # interval_net ends so
        weight = last.weight[None] - last.weight[labels][:, None]
        bias = last.bias[None] - last.bias[labels][:, None]
        middle, half = (low + high)[:, :, None] / 2, (high - low)[:, :, None] / 2
        # Each of the two logits is rounded separately.
        rounded = functional.linear(_magnitude(low, high), last.weight.abs(), last.bias.abs())
        rounded = ROUNDING * (rounded + rounded.gather(1, labels[:, None]))
        ahead = (weight @ middle + weight.abs() @ half)[:, :, 0] + bias + rounded
        return ahead.scatter(1, labels[:, None], 0.0)


def _through(layer: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        middle = layer((low + high) / 2)
        half = _half_widths(layer, (high - low) / 2 + ROUNDING * _magnitude(low, high))
        return middle - half, middle + half
    if isinstance(layer, (nn.ReLU, nn.Flatten, nn.AvgPool2d)):  # all are monotone
        return layer(low), layer(high)
    raise ClassifierError(
        f"no interval bounds for layers of type {type(layer).__name__}; use Conv2d, Linear, ReLU, AvgPool2d and Flatten"
    )


def _half_widths(layer: nn.Conv2d | nn.Linear, half: Tensor) -> Tensor:
    """Map half widths through the absolute weights, and add the rounding error of the bias."""
    weight, bias = layer.weight.abs(), None if layer.bias is None else ROUNDING * layer.bias.abs()
    if isinstance(layer, nn.Linear):
        return functional.linear(half, weight, bias)
    if layer.padding_mode != "zeros":
        raise ClassifierError(f"interval bounds need convolutions padded by zeros, got {layer.padding_mode!r}")
    return functional.conv2d(half, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _magnitude(low: Tensor, high: Tensor) -> Tensor:
    """The largest absolute value in each interval."""
    return torch.maximum(low.abs(), high.abs())


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
    """Boxes around inputs [N, C, H, W]: from `low` to `high` [C] where `hidden` [N, H, W], else the pixel itself."""
    return tuple(torch.where(hidden[:, None], end[:, None, None], inputs) for end in (low, high))  # type: ignore[return-value]
