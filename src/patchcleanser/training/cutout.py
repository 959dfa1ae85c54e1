"""Masks for training: anywhere at random, or where they hurt the current model most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from patchcleanser.engine.masking import with_mask_channel
from patchcleanser.errors import InputError

Losses = Callable[[Tensor], Tensor]
"""Hidden pixels, bool [N, H, W] → a loss for each image [N]."""


@dataclass(frozen=True)
class Cutout:
    """`count` square masks per image at random places.

    Sizes are pixels (whole numbers) or shares of the image's side (below 1); for each mask
    one is drawn between `smallest` and `largest`. With `inside`, masks lie wholly in the
    image as the defense's do; otherwise their centres are uniform, as in the paper.
    """

    count: int = 2
    smallest: float = 128 / 224
    largest: float = 128 / 224
    inside: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"a number of masks is at least 0, got {self.count}")
        if not 0 < self.smallest <= self.largest:
            raise InputError(f"mask sizes must satisfy 0 < smallest <= largest, got {self.smallest} and {self.largest}")

    def hidden(self, inputs: Tensor, generator: torch.Generator, *, count: int | None = None) -> Tensor:
        """Bool [N, H, W], True where a pixel is hidden."""
        number, _, height, width = inputs.shape
        hidden = torch.zeros(number, height, width, dtype=torch.bool, device=inputs.device)
        for _ in range(self.count if count is None else count):
            hidden |= self.one(number, (height, width), generator, inputs.device)
        return hidden

    def one(self, number: int, size: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
        """One random mask for each of `number` images, bool [number, H, W]."""
        low, high = (_pixels(s, min(size)) for s in (self.smallest, self.largest))
        side = torch.randint(low, high + 1, (number,), generator=generator, device=device)
        starts = []
        for length in size:
            draw = torch.rand(number, generator=generator, device=device)
            room = (length - side + 1).clamp_min(1)
            start = (draw * room).long() if self.inside else (draw * length).long() - side // 2
            starts.append(start[:, None])
        rows, columns = (torch.arange(length, device=device)[None] for length in size)
        down = (rows >= starts[0]) & (rows < starts[0] + side[:, None])
        across = (columns >= starts[1]) & (columns < starts[1] + side[:, None])
        return down[:, :, None] & across[:, None, :]

    def chosen(self, inputs: Tensor, losses: Losses, generator: torch.Generator) -> Tensor:
        """Which pixels to hide from a network, bool [N, H, W]."""
        return self.hidden(inputs, generator)


@dataclass(frozen=True)
class Ablation(Cutout):
    """Hides all of an image but one band of columns or rows, or one block, of `keep` px, at a random place.

    Bands and blocks go on at the other side of the image, as those of de-randomized smoothing do.
    """

    count: int = 1
    ablation: str = "columns"
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ablation not in ("columns", "rows", "blocks") or self.keep < 1:
            raise InputError(
                f"an ablation keeps columns, rows or blocks of some px, got {self.ablation!r}, {self.keep}"
            )

    def one(self, number: int, size: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
        """One random ablation for each of `number` images, bool [number, H, W], True where hidden."""
        shown = []
        for axis, length in zip(("rows", "columns"), size, strict=True):
            start = torch.randint(0, length, (number, 1), generator=generator, device=device)
            band = (torch.arange(length, device=device) - start) % length < self.keep
            shown.append(band if self.ablation in (axis, "blocks") else torch.ones_like(band))
        return ~(shown[0][:, :, None] & shown[1][:, None, :])


@dataclass(frozen=True)
class GreedyCutout(Cutout):
    """Masks where the current model's loss is worst, chosen one after the other.

    For each image, `tries` random places and sizes are tried for the first mask and the one
    with the largest loss is kept; then the same for the second mask beside it. That is
    count × tries forward passes without gradients, on top of the training step. Adversarial
    masks for every step would teach nothing else: a `share` of the steps is greedy.
    """

    tries: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tries < 1 or not 0 <= self.share <= 1:
            raise InputError(f"tries is at least 1 and share lies in [0, 1], got {self.tries} and {self.share}")

    def chosen(self, inputs: Tensor, losses: Losses, generator: torch.Generator) -> Tensor:
        """The worst masks found (or random ones, for the rest of the steps)."""
        if float(torch.rand((), generator=generator, device=inputs.device)) >= self.share:
            return super().chosen(inputs, losses, generator)
        number, _, height, width = inputs.shape
        hidden = torch.zeros(number, height, width, dtype=torch.bool, device=inputs.device)
        for _ in range(self.count):
            best = torch.full((number,), -torch.inf, device=inputs.device)
            chosen = hidden
            for _ in range(self.tries):
                tried = hidden | self.one(number, (height, width), generator, inputs.device)
                loss = losses(tried)
                worse = loss > best
                best = torch.where(worse, loss, best)
                chosen = torch.where(worse[:, None, None], tried, chosen)
            hidden = chosen
        return hidden


@dataclass(frozen=True)
class OwnMasks(GreedyCutout):
    """The very masks of a defense, `kept` under each bool [masks, H, W], whatever their shape."""

    kept: Tensor = field(kw_only=True, repr=False, compare=False)

    def one(self, number: int, size: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
        """One of the masks for each of `number` images, bool [number, H, W]."""
        return ~self.kept[torch.randint(0, len(self.kept), (number,), generator=generator, device=device)]


def shown(module: nn.Module, inputs: Tensor, hidden: Tensor | None = None) -> Tensor:
    """What a network is given where pixels are hidden, bool [N, H, W]; None hides none.

    Zero is the mean colour after normalising. A mask-aware network is told what is hidden by one more channel.
    """
    aware = getattr(module, "mask_aware", False)
    covered = inputs if hidden is None else inputs.masked_fill(hidden[:, None], 0.0)
    return with_mask_channel(covered, hidden) if aware else covered


def _pixels(size: float, side: int) -> int:
    """A share of the side, or a number of pixels."""
    return max(1, round(size * side)) if size < 1 else int(size)
