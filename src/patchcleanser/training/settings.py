"""How to harden, as readable data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from patchcleanser.errors import InputError


@dataclass(frozen=True)
class HardenSettings:
    """How to harden.

    For a threat on the input grid the copy is shown the defense's own masks, two at a time; for one on the
    source grid, where masks fall elsewhere in each image, random ones, 0.75 to 1.5 times as long.
    """

    epochs: int = 60
    batch: int = 64
    rate: float = 5e-5
    weight_decay: float = 0.01
    unmasked: float = 0.3
    """Share of each batch that stays unmasked, to keep the answers there."""
    tries: int = 2
    """Places tried for each mask; the one that moves the answer most is trained on."""
    greedy: float = 0.5
    """Share of the steps with such worst masks; the rest have random ones."""
    holdout: float = 0.1
    every: int = 2
    """Epochs between checks on the photos held out."""
    patience: int = 8
    """Checks without improvement before stopping."""
    masks: int = 6
    smallest_crop: float = 0.4
    """Photos are cropped at random to at least this share of their area."""
    colour: float = 0.4
    """Brightness, contrast and saturation move by up to half of this."""
    mix: float = 0.5
    """The most of another photo that is blended into one; half of the photos stay pure."""
    sharp: int = 1
    """Among smaller photos, those at least half as wide and high as the input are seen so often an epoch."""
    features: float = 0.0
    """Weight of the last layer's inputs in the loss: they too are to be the original's, and the layer itself stays as
    it is. 0 leaves both free."""
    mirror: bool = False
    """Whether the original's answer is its mean over a picture and the mirror image."""
    frozen: tuple[str, ...] = ()
    """Layers that stay as they are, by how the names of their weights begin."""
    average: float = 0.998
    """Decay of the averaged weights, which are the ones kept; 0 averages nothing."""

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch, self.tries, self.every, self.patience, self.masks, self.sharp) < 1:
            raise InputError(f"epochs, batch, tries, every, patience, masks and sharp are at least 1, got {self}")
        if isinstance(self.frozen, str):
            raise InputError(f"frozen is a tuple of names of layers, got {self.frozen!r}; write ({self.frozen!r},)")
        if not self.rate > 0 or not 0 <= self.unmasked < 1:
            raise InputError(f"a rate is above 0 and unmasked lies in [0, 1), got {self.rate} and {self.unmasked}")
        if not 0 <= self.features < math.inf:
            raise InputError(f"a weight of features is a number of at least 0, got {self.features}")
        if not (0 <= self.mix <= 1 and 0 <= self.greedy <= 1 and 0 <= self.colour <= 2 and 0 <= self.average < 1):
            raise InputError(
                f"mix and greedy lie in [0, 1], colour in [0, 2] and average in [0, 1), got {self.mix}, {self.greedy}, "
                f"{self.colour} and {self.average}"
            )
