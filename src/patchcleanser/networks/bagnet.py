"""BagNets: networks whose every local logit sees a small square of the image, and whose output is their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcleanser.errors import ClassifierError


class Block(nn.Module):
    """A residual bottleneck whose middle convolution is 1×1 or 3×3; nothing is padded, so nothing else is seen."""

    def __init__(self, inside: int, middle: int, outside: int, *, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.layers = nn.Sequential(
            nn.Conv2d(inside, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, kernel, stride, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        same = inside == outside and stride == 1
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, features: Tensor) -> Tensor:
        """[N, inside, H, W] → [N, outside, h, w]."""
        found: Tensor = self.layers(features)
        edge = (self.kernel - 1) // 2  # the shortcut takes the middle of what the convolution sees
        inner = features[:, :, edge : features.shape[2] - edge, edge : features.shape[3] - edge]
        return torch.relu(found + self.shortcut(inner)[:, :, : found.shape[2], : found.shape[3]])


class BagNet(nn.Module):
    """Local logits of small receptive fields. With `votes` each is a vote for a class, or none (BagCert).

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
        """[N, C, H, W] → logits [N, classes]."""
        return self.pooled(self.local(images))

    def pooled(self, local: Tensor) -> Tensor:
        """The mean of the local logits; or the share of votes, whose gradient is that of a sigmoid."""
        if self.votes:
            soft = local.sigmoid()
            local = (local > 0).to(soft) + soft - soft.detach()
        return local.mean((2, 3))


def bagnet(
    classes: int = 10, *, field: int = 7, width: int = 256, depth: int = 8, stride: int = 1, votes: bool = False
) -> nn.Module:
    """A BagNet for 32×32 images, with a receptive field of an odd number of px.

    The stem sees 3×3 px, and each of the first blocks two more (of stride 2, where the first block is to have it).
    """
    threes = _threes(field, stride)
    if depth < threes:
        raise ClassifierError(f"a field of {field} px needs at least {threes} blocks, got depth={depth}")
    stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    blocks = [
        Block(width, width // 2, width, kernel=3 if n < threes else 1, stride=stride if n == 0 else 1)
        for n in range(depth)
    ]
    return BagNet(stem, blocks, width, classes, votes=votes)


def _threes(field: int, stride: int) -> int:
    """How many blocks of 3×3 px it takes, besides the stem; of stride 2 the first one is."""
    if stride not in (1, 2):
        raise ClassifierError(f"the stride of this BagNet is 1 or 2, got {stride}")
    threes, seen, jump = 0, 3, 1
    while seen < field:
        threes, seen, jump = threes + 1, seen + 2 * jump, stride
    if seen != field:
        raise ClassifierError(f"a BagNet of stride {stride} has no field of {field} px; the next is {seen}")
    return threes


def bagnet17(classes: int = 1000, *, threes: int = 3, votes: bool = False) -> nn.Module:
    """BagNet-17 for 224×224 images (Brendel and Bethge, 2019); `threes` of 2 or 4 make it BagNet-9 or BagNet-33.

    A ResNet-50 without padding, in which only the first block of the first `threes` stages has a 3×3 convolution.
    """
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 1, bias=False), nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    )
    blocks: list[Block] = []
    inside = 64
    for stage, (number, stride) in enumerate(zip((3, 4, 6, 3), (2, 2, 2, 1), strict=True)):
        middle = 64 * 2**stage
        for n in range(number):
            kernel = 3 if n == 0 and stage < threes else 1
            blocks.append(Block(inside, middle, 4 * middle, kernel=kernel, stride=stride if n == 0 else 1))
            inside = 4 * middle
    return BagNet(stem, blocks, inside, classes, votes=votes)
