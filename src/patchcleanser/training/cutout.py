"""Masks for training: at random places, or where they hurt the current model most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from patchcleanser.core.geometry import Size
from patchcleanser.engine.masking import with_mask_channel
from patchcleanser.errors import InputError

Losses = Callable[[Tensor], Tensor]
"""Hidden pixels, bool [N, H, W] → the loss of each image [N]."""


@dataclass(frozen=True)
class Cutout:
    """`count` square masks per image at random places.

    Sizes are pixels (whole numbers) or shares of the image's side (below 1), drawn between `smallest` and `largest`
    for each mask. With `inside`, masks lie within the image as the defense's do; otherwise their centres are uniform,
    as in the paper.
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

    def random_masks(self, number: int, size: Size, generator: torch.Generator, device: torch.device) -> Tensor:
        """One random mask for each of `number` images, bool [number, H, W], True where hidden."""
        low, high = (_pixels(s, min(size)) for s in (self.smallest, self.largest))
        side = torch.randint(low, high + 1, (number,), generator=generator, device=device)
        bands = []
        for length in size:
            draw = torch.rand(number, generator=generator, device=device)
            positions = (length - side + 1).clamp_min(1)
            start = (draw * positions).long() if self.inside else (draw * length).long() - side // 2
            offset = torch.arange(length, device=device) - start[:, None]
            bands.append((offset >= 0) & (offset < side[:, None]))
        return bands[0][:, :, None] & bands[1][:, None, :]

    def choose(self, inputs: Tensor, losses: Losses, generator: torch.Generator, *, tries: int = 1) -> Tensor:
        """Pixels to hide in inputs [N, C, H, W], bool [N, H, W]: of `tries` random masks that with the largest loss."""
        number, _, height, width = inputs.shape
        hidden = torch.zeros(number, height, width, dtype=torch.bool, device=inputs.device)
        for _ in range(self.count):
            masks = [self.random_masks(number, (height, width), generator, inputs.device) for _ in range(tries)]
            trials = hidden | torch.stack(masks)
            hidden = trials[0]
            if tries > 1:
                worst = torch.stack([losses(trial) for trial in trials]).nan_to_num(-torch.inf).argmax(0)
                hidden = trials[worst, torch.arange(number, device=inputs.device)]
        return hidden


@dataclass(frozen=True)
class Ablation(Cutout):
    """Hides all but one band of columns or rows, or one block, of `keep` px at a random place.

    Bands and blocks wrap around the image's edge, as in de-randomized smoothing.
    """

    count: int = 1
    ablation: str = "columns"
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ablation not in ("columns", "rows", "blocks") or self.keep < 1:
            raise InputError(
                f"an ablation keeps columns, rows or blocks of at least 1 px, got {self.ablation!r} and {self.keep}"
            )

    def random_masks(self, number: int, size: Size, generator: torch.Generator, device: torch.device) -> Tensor:
        visible = []
        for axis, length in zip(("rows", "columns"), size, strict=True):
            start = torch.randint(0, length, (number, 1), generator=generator, device=device)
            band = (torch.arange(length, device=device) - start) % length < self.keep
            visible.append(band if self.ablation in (axis, "blocks") else torch.ones_like(band))
        return ~(visible[0][:, :, None] & visible[1][:, None, :])


@dataclass(frozen=True)
class GreedyCutout(Cutout):
    """Masks where the current model's loss is largest, chosen one after the other.

    For each image, the worst of `tries` random masks is used; then the worst of as many second masks beside it. That
    takes count × tries forward passes without gradients. Only a `share` of the steps is greedy; the rest have random
    masks.
    """

    tries: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tries < 1 or not 0 <= self.share <= 1:
            raise InputError(f"tries is at least 1 and share lies in [0, 1], got {self.tries} and {self.share}")

    def choose(self, inputs: Tensor, losses: Losses, generator: torch.Generator, *, tries: int = 1) -> Tensor:
        greedy = float(torch.rand((), generator=generator, device=inputs.device)) < self.share
        return super().choose(inputs, losses, generator, tries=self.tries if greedy else tries)


@dataclass(frozen=True)
class DefenseMasks(GreedyCutout):
    """The masks of a defense, of any shape; `visible` pixels under each, bool [masks, H, W]."""

    visible: Tensor = field(kw_only=True, repr=False, compare=False)

    def random_masks(self, number: int, size: Size, generator: torch.Generator, device: torch.device) -> Tensor:
        return ~self.visible[torch.randint(0, len(self.visible), (number,), generator=generator, device=device)]


def masked_inputs(module: nn.Module, inputs: Tensor, hidden: Tensor | None = None) -> Tensor:
    """The network's inputs with pixels hidden, bool [N, H, W]; None hides none.

    Hidden pixels are 0, the mean colour after normalising. A mask-aware network gets the mask as one more channel.
    """
    masked = inputs if hidden is None else inputs.masked_fill(hidden[:, None], 0.0)
    return with_mask_channel(masked, hidden) if getattr(module, "mask_aware", False) else masked


def _pixels(size: float, side: int) -> int:
    """A share of the side, or a number of pixels."""
    return max(1, round(size * side)) if size < 1 else int(size)
