"""Networks in two parts: a trunk of small receptive fields in exact arithmetic, and a head that sees all features."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from timm.models.resnet import BasicBlock, downsample_conv
from torch import Tensor, nn

from patchcleanser.errors import ClassifierError
from patchcleanser.networks.bagnet import BagNet, Block, bagnet

STEPS, LARGEST = 2**12, 2**10
"""Features are whole multiples of 1 / STEPS, and none is larger than LARGEST. Float32 holds them exactly."""

WEIGHT_STEPS = 2**16
"""Weights of the trunk are rounded to whole multiples of 1 / WEIGHT_STEPS."""


class SplitNet(nn.Module):
    """A trunk whose features see small squares of the image, and a head of large receptive fields.

    Feature (i, j) sees the `field`×`field` px from (i * jump, j * jump). The head takes features and one more channel,
    which is 1 where they are hidden.

    *In eval mode a feature is a function of the weights and of the pixels it sees, bit for bit*: whatever else is in
    the image or the batch, in whatever order kernels add, on every device. Proof. The trunk computes in whole numbers.
    Batch norms are folded into the convolutions before them. Weights are rounded to multiples of 1 / WEIGHT_STEPS and
    pixels (NaN being 0) to multiples of 1 / STEPS, and both are written as their multiples. `whole_convolution` refuses
    weights whose partial sums could reach 2^53. Float64 holds all whole numbers below that, so no sum is ever rounded,
    and the order does not matter. The rest is done number by number: dividing by a power of two, rounding to a whole
    number, cutting off, ReLU and the sum with the shortcut. At the end adding 0 turns -0 into 0.

    This assumes that float64 matrix products add products of their numbers: no library is known to do otherwise.
    In train mode the trunk is an ordinary network, whose features differ by little.
    """

    def __init__(self, trunk: BagNet, head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = trunk.stem, trunk.blocks, head
        self.field, self.jump = trunk.field, trunk.jump

    def features(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → features [N, width, down, across]."""
        if self.training:
            features: Tensor = self.blocks(self.stem(images))
            return features
        pixels = images.double().nan_to_num().permute(0, 2, 3, 1)
        numbers = whole_layers(self.stem, rounded(pixels * STEPS))
        blocks: Any = self.blocks
        for block in blocks:
            numbers = whole_block(block, numbers)
        return (numbers.permute(0, 3, 1, 2) / STEPS + 0.0).to(images.dtype, memory_format=torch.contiguous_format)

    def forward(self, images: Tensor) -> Tensor:
        """Logits with all features visible."""
        features = self.features(images)
        logits: Tensor = self.head(torch.cat([features, torch.zeros_like(features[:, :1])], 1))
        return logits


class _Rounded(torch.autograd.Function):
    """Rounding with the gradient of the identity, so that attacks can follow it."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return numbers.round().clamp_(-LARGEST * STEPS, LARGEST * STEPS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def rounded(numbers: Tensor) -> Tensor:
    """The nearest whole numbers, at most LARGEST * STEPS in size.

    >>> rounded(torch.tensor([2.4, -2.6, 1e30], dtype=torch.float64)).tolist()
    [2.0, -3.0, 4194304.0]
    """
    integers: Tensor = _Rounded.apply(numbers)
    return integers


def whole_block(block: Block, features: Tensor) -> Tensor:
    """A residual bottleneck in whole numbers, [N, H, W, channels] → [N, h, w, channels]."""
    residual = whole_layers(block.layers, features)
    edge = (block.kernel - 1) // 2
    inner = features[:, edge : features.shape[1] - edge, edge : features.shape[2] - edge]
    shortcut = whole_layers(block.shortcut, inner) if isinstance(block.shortcut, nn.Sequential) else inner
    return rounded(residual + shortcut[:, : residual.shape[1], : residual.shape[2]]).relu()


def whole_layers(layers: nn.Sequential, features: Tensor) -> Tensor:
    """Convolutions, each perhaps with a batch norm, and ReLUs, in whole numbers."""
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, nn.Conv2d):
            features = whole_convolution(layer, after if isinstance(after, nn.BatchNorm2d) else None, features)
        elif isinstance(layer, nn.ReLU):
            features = features.relu()
        elif not isinstance(layer, nn.BatchNorm2d):
            raise ClassifierError(f"a trunk has convolutions, batch norms and ReLUs only, got {type(layer).__name__}")
    return features


def whole_convolution(layer: nn.Conv2d, norm: nn.BatchNorm2d | None, features: Tensor) -> Tensor:
    """A convolution without padding, and the batch norm after it, in whole numbers."""
    weight, bias = whole_weights(layer, norm)
    largest = float((weight.abs().sum((1, 2, 3)) * LARGEST * STEPS + bias.abs()).detach().max())
    if not largest < 2**53:
        raise ClassifierError(
            f"sums inside the trunk may reach {largest:.3g}, but only those below 2^53 are exact; train it with more "
            "weight decay"
        )
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    down, across = ((side - kernel) // stride + 1 for side in features.shape[1:3])
    windows = [
        features[:, top : top + stride * (down - 1) + 1 : stride, left : left + stride * (across - 1) + 1 : stride]
        for top, left in product(range(kernel), repeat=2)
    ]
    sums = torch.cat(windows, 3) @ weight.permute(2, 3, 1, 0).flatten(0, 2) + bias
    return rounded(sums / WEIGHT_STEPS)


def whole_weights(layer: nn.Conv2d, norm: nn.BatchNorm2d | None) -> tuple[Tensor, Tensor]:
    """Weights and biases of a convolution with the batch norm after it, as whole numbers."""
    weight = layer.weight.double()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.double()
    if norm is not None:
        running: Any = norm
        scale = running.weight.double() / (running.running_var.double() + norm.eps).sqrt()
        weight = weight * scale[:, None, None, None]
        bias = (bias - running.running_mean.double()) * scale + running.bias.double()
    return (weight * WEIGHT_STEPS).round(), (bias * WEIGHT_STEPS * STEPS).round()


def split(
    classes: int = 10,
    *,
    field: int = 5,
    stride: int = 2,
    width: int = 128,
    depth: int = 4,
    head: int = 4,
    head_width: int = 256,
) -> nn.Module:
    """A BagNet's trunk of `depth` blocks and a head of `head` residual blocks, for 32×32 images."""
    if head < 1:
        raise ClassifierError(f"a head has at least 1 block, got head={head}; without a head, use net:bagnet")
    trunk: Any = bagnet(classes, field=field, width=width, depth=depth, stride=stride)
    return SplitNet(trunk, residual_head(width + 1, head_width, head, classes))


def residual_head(channels: int, width: int, depth: int, classes: int) -> nn.Sequential:
    """Residual blocks of 3×3 convolutions, of which the middle one halves the map, their mean, and a linear layer."""
    blocks = []
    for number in range(depth):
        entering, stride = channels if number == 0 else width, 2 if number == (depth + 1) // 2 else 1
        changes = entering != width or stride != 1
        shortcut = downsample_conv(entering, width, 1, stride=stride) if changes else None
        blocks.append(BasicBlock(entering, width, stride=stride, downsample=shortcut))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
