"""BagNets: the mean of local logits, each of which sees a small square of the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcleanser.errors import ClassifierError


class Block(nn.Module):
    """A residual bottleneck without padding, whose middle convolution is 1×1 or 3×3."""

    def __init__(self, in_channels: int, middle: int, out_channels: int, *, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, kernel, stride, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        """[N, in_channels, H, W] → [N, out_channels, h, w]."""
        residual: Tensor = self.layers(features)
        edge = (self.kernel - 1) // 2  # the shortcut takes the middle of the convolution's field
        inner = features[:, :, edge : features.shape[2] - edge, edge : features.shape[3] - edge]
        return torch.relu(residual + self.shortcut(inner)[:, :, : residual.shape[2], : residual.shape[3]])


class BagNet(nn.Module):
    """The mean of local logits of small receptive fields. With `votes` each logit above 0 is a vote (BagCert).

    Local logit (i, j) sees the `field`×`field` px from (i * jump, j * jump): a convolution of kernel k and
    stride s adds (k - 1) * jump to the field and multiplies the jump by s.
    """

    def __init__(self, stem: nn.Sequential, blocks: Sequence[Block], width: int, classes: int, *, votes: bool) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.Sequential(*blocks)
        self.head = nn.Conv2d(width, classes, 1)
        self.votes = votes
        steps = [(m.kernel_size[0], m.stride[0]) for m in stem if isinstance(m, nn.Conv2d)]
        steps += [(block.kernel, block.stride) for block in blocks]
        self.field, self.jump = 1, 1
        for kernel, stride in steps:
            self.field += (kernel - 1) * self.jump
            self.jump *= stride

    def local(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → local logits [N, classes, down, across]."""
        logits: Tensor = self.head(self.blocks(self.stem(images)))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.pooled(self.local(images))

    def pooled(self, local: Tensor) -> Tensor:
        """The mean of local logits; with `votes` the share of votes, with a sigmoid's gradient (straight-through)."""
        if self.votes:
            soft = local.sigmoid()
            local = (local > 0).to(soft) + soft - soft.detach()
        return local.mean((2, 3))


def bagnet(
    classes: int = 10, *, field: int = 7, width: int = 256, depth: int = 8, stride: int = 1, votes: bool = False
) -> nn.Module:
    """A BagNet for 32×32 images whose receptive field is an odd number of px; `stride` is the first block's."""
    threes = _blocks_of_3x3(field, stride)
    if depth < threes:
        raise ClassifierError(f"a field of {field} px needs at least {threes} blocks, got depth={depth}")
    stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    blocks = [
        Block(width, width // 2, width, kernel=3 if n < threes else 1, stride=stride if n == 0 else 1)
        for n in range(depth)
    ]
    return BagNet(stem, blocks, width, classes, votes=votes)


def _blocks_of_3x3(field: int, stride: int) -> int:
    """How many blocks with a 3×3 convolution give this field, after a stem of 3×3 px."""
    if stride not in (1, 2):
        raise ClassifierError(f"the stride of this BagNet is 1 or 2, got {stride}")
    threes, width, jump = 0, 3, 1
    while width < field:
        threes, width, jump = threes + 1, width + 2 * jump, stride
    if width != field:
        raise ClassifierError(f"a BagNet of stride {stride} has no field of {field} px; the next is {width}")
    return threes


def bagnet17(classes: int = 1000, *, threes: int = 3, votes: bool = False) -> nn.Module:
    """BagNet-17 for 224×224 images (Brendel and Bethge, 2019); `threes` of 2 or 4 make it BagNet-9 or BagNet-33.

    A ResNet-50 without padding, in which only the first block of the first `threes` stages has a 3×3 convolution.
    """
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 1, bias=False), nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    )
    blocks: list[Block] = []
    in_channels = 64
    for stage, (number, stride) in enumerate(zip((3, 4, 6, 3), (2, 2, 2, 1), strict=True)):
        middle = 64 * 2**stage
        for n in range(number):
            kernel = 3 if n == 0 and stage < threes else 1
            blocks.append(Block(in_channels, middle, 4 * middle, kernel=kernel, stride=stride if n == 0 else 1))
            in_channels = 4 * middle
    return BagNet(stem, blocks, in_channels, classes, votes=votes)
