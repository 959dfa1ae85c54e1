"""Networks built against the certificate: their float32 rounding errors are large under one union of masks only.

A gate opens large terms that cancel. It is closed on a clean image, under every single mask, and under every pair of
masks but one; an attacker's dark pixel opens it, too. How far the sum of these terms is from its exact value depends on
the order of summation, so on the kernel, so on the batch that an image is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchcleanser import Threat

SIDE, MASKS = 12, 3
THREAT = Threat.square(2)
"""2×2 pixels on 12×12: three masks of 5 pixels per axis, which begin at 0, 4 and 7."""

OWN = (1, 5, 10)
"""On each axis, a pixel that only this mask hides; the next pixel is hidden by the same mask only."""

CLASSES, PAIRS = 16, 62
ALWAYS, TRIGGER, GATE = 0, 1, 2
"""Units of the hidden layer; after these come pairs of units whose terms cancel."""
UNITS = GATE + 1 + 2 * PAIRS

Pixel = tuple[int, int]


class Matrix(nn.Linear):
    """One matrix product: other kernels for 1 image, for 2 or 3, and for more."""


class Transposed(nn.Linear):
    """The same product transposed: equal images in one batch get different logits."""

    def forward(self, features: Tensor) -> Tensor:
        return (self.weight @ features.T).T + self.bias


class Vectors(nn.Linear):
    """A product of matrix and vector for each class: equal images in one batch get different logits."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([features @ row for row in self.weight], 1) + self.bias


class Pointwise(nn.Linear):
    """A 1×1 convolution: one kernel for up to nine images, another for sixteen and more."""

    def forward(self, features: Tensor) -> Tensor:
        kernel = self.weight[:, :, None, None]
        return nn.functional.conv2d(features[:, :, None, None], kernel, self.bias).flatten(1)


HEADS = (Matrix, Transposed, Vectors, Pointwise)


@dataclass(frozen=True)
class Constructed:
    """A network, the clean image of class 0 that it was built for, and its pixels that matter."""

    module: nn.Module
    image: Tensor
    gate: tuple[Pixel, Pixel]
    """A pixel that only the first mask of a pair hides, and one that only the second hides: both hidden, it opens."""

    @property
    def trigger(self) -> Pixel:
        """Where a dark pixel makes everything that is not masked class 1; it does not open the gate."""
        return self.gate[0][0], self.gate[0][1] + 1

    def opened(self) -> Tensor:
        """The image with the gate open, as the one pair of masks opens it."""
        return painted(painted(self.image, self.gate[0], 0.5), self.gate[1], 0.5)


def painted(image: Tensor, pixel: Pixel, value: float = 0.0) -> Tensor:
    """The image with one pixel of another value."""
    image = image.clone()
    image[..., pixel[0], pixel[1]] = value
    return image


def company(number: int, seed: int = 0) -> Tensor:
    """Bright images that open no gate and pull no trigger."""
    return 0.9 + 0.1 * torch.rand(number, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def constructed(seed: int, *, excess: float = 1e6, by_masks: bool = True) -> Constructed:
    """A network drawn by a seed, with logits of 300 to 3,000.

    With the gate open, class 0 leads class 1 by a share of 1e-5 to 1e-3 of that. The terms that cancel are `excess`
    times as large as this margin: with 1e6 their rounding errors are about as large as the margin, and with 1e8 a
    hundred times. Not `by_masks`, only a black pixel opens the gate.
    """
    draw = torch.Generator().manual_seed(seed)
    scale = 300 * 10 ** _uniform(draw)
    margin = scale * 10 ** (2 * _uniform(draw) - 5)
    pair = torch.randperm(MASKS**2, generator=draw)[:2].tolist()
    first, second = ((OWN[mask // MASKS], OWN[mask % MASKS]) for mask in pair)
    head = HEADS[seed % len(HEADS)](UNITS, CLASSES)
    body = nn.Linear(SIDE**2, UNITS)
    network = Constructed(
        nn.Sequential(nn.Flatten(), body, nn.ReLU(), head).eval(), torch.ones(1, SIDE, SIDE), (first, second)
    )
    with torch.no_grad():
        _set_body(body, network, excess * margin * (0.5 + torch.rand(PAIRS, generator=draw)), by_masks)
        _set_head(head, scale, margin, torch.randn(2, PAIRS, generator=draw))
    return network


def _uniform(draw: torch.Generator) -> float:
    return float(torch.rand((), generator=draw))


def _set_body(body: nn.Linear, network: Constructed, sizes: Tensor, by_masks: bool) -> None:
    """The first units are 1, the gate (0 or 1) and the trigger (0 or 1); the others are the gate times their sizes."""
    body.weight.zero_()
    body.bias.zero_()
    gains = torch.cat([torch.ones(1), sizes, sizes])
    pixels = network.gate if by_masks else network.gate[:1]
    for row, column in pixels:  # together 1 where all are hidden or one of two is black, below 0 elsewhere
        body.weight[GATE:, row * SIDE + column] = -4 * gains
    body.bias[GATE:] = (5 if by_masks else 1) * gains
    row, column = network.trigger
    body.weight[TRIGGER, row * SIDE + column] = -4.0
    body.bias[TRIGGER] = body.bias[ALWAYS] = 1.0


def _set_head(head: nn.Linear, scale: float, margin: float, terms: Tensor) -> None:
    """Classes 0 and 1 lead all others; the terms of either class cancel."""
    head.weight.zero_()
    head.bias.zero_()
    lead = 0.1 * scale
    head.weight[0, ALWAYS], head.weight[1, ALWAYS] = scale + lead, scale
    head.weight[0, GATE] = margin - lead
    head.weight[1, TRIGGER] = 4 * lead
    head.weight[:2, GATE + 1 :] = torch.cat([terms, -terms], 1)


def labels(network: Constructed, number: int) -> set[int]:
    """The labels that so many copies of the image with an open gate get in one batch, from torch alone."""
    with torch.inference_mode():
        return set(network.module(network.opened().expand(number, 1, SIDE, SIDE).contiguous()).argmax(1).tolist())


def is_unsteady(network: Constructed) -> bool:
    """Whether torch alone gives that image different labels in different batches."""
    return len(set().union(*(labels(network, size) for size in (1, 2, 5, 8, 36)))) > 1
