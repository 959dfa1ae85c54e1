"""Projected gradient descent, restricted to a patch, on the undefended classifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.threats import Threat
from patchcleanser.core.windows import Window
from patchcleanser.errors import InputError


@dataclass(frozen=True)
class Attacked:
    """The strongest attacked image found, [C, H, W] in [0, 1], and what the undefended classifier says of it."""

    image: Tensor
    windows: tuple[Window, ...]
    label: int
    """The undefended label under attack."""
    fooled: bool
    margin: float
    """Logit of the true label minus the largest other; below 0 the classifier is fooled."""


class PatchPGD:
    """Optimises the pixels of patches at random places, all places at once, and returns the worst for the classifier.

    Gradients pass through resizing and cropping, so patches are printed on the image as it came.
    """

    def __init__(
        self, classifier: TorchClassifier, threat: Threat, *, iterations: int = 100, locations: int = 8, seed: int = 0
    ) -> None:
        if not isinstance(classifier, TorchClassifier):
            raise InputError(f"this attack needs gradients, and so a torch classifier, got {type(classifier).__name__}")
        if min(iterations, locations) < 1:
            raise InputError(f"iterations and locations are at least 1, got {iterations} and {locations}")
        if threat.grid != "source":
            raise InputError("patches are printed on the image as it came; use a threat on the source grid")
        self.classifier, self.threat = classifier, threat
        self.iterations, self.locations, self.seed = iterations, locations, seed

    def attack(self, image: Tensor, label: int) -> Attacked:
        """Attack one image [C, H, W] in [0, 1] whose true label is `label`."""
        device = self.classifier.device
        generator = torch.Generator().manual_seed(self.seed)
        height, width = image.shape[-2:]
        places = [self._place((height, width), generator) for _ in range(self.locations)]
        free = torch.zeros(self.locations, 1, height, width)
        for n, windows in enumerate(places):
            for w in windows:
                free[n, :, w.top : w.bottom, w.left : w.right] = 1
        noise = torch.rand(self.locations, *image.shape, generator=generator)
        clean, free, pixels = image.to(device), free.to(device), noise.to(device)
        best, best_margin = clean * (1 - free) + pixels * free, torch.full((self.locations,), torch.inf, device=device)
        for step in range(self.iterations + 1):
            pixels.requires_grad_(True)
            attacked = clean * (1 - free) + pixels * free
            margin = self._margin(attacked, label)
            better = margin < best_margin
            best = torch.where(better[:, None, None, None], attacked.detach(), best)
            best_margin = torch.where(better, margin.detach(), best_margin)
            (slope,) = torch.autograd.grad(margin.sum(), pixels)
            # Large steps first to cross the landscape, small ones at the end to settle.
            size = 0.25 * (1 - step / (self.iterations + 1)) + 0.01
            pixels = (pixels.detach() - size * slope.sign()).clamp(0, 1)
        worst = int(best_margin.argmin())
        chosen = best[worst]
        with torch.no_grad():
            found = int(self.classifier.logits(self.classifier.prepare(chosen[None])).argmax())
        return Attacked(chosen.cpu(), places[worst], found, found != label, float(best_margin[worst]))

    def _margin(self, images: Tensor, label: int) -> Tensor:
        logits = self.classifier.logits(self.classifier.prepare(images)).float()
        true = functional.one_hot(torch.tensor(label, device=logits.device), logits.shape[1]).bool()
        return logits[:, label] - logits.masked_fill(true, -torch.inf).amax(1)

    def _place(self, size: tuple[int, int], generator: torch.Generator) -> tuple[Window, ...]:
        """Random patches of the threat: each of one of its shapes, anywhere in its room."""
        room, shapes = self.threat.room(size), self.threat.shapes(size)

        def draw(below: int) -> int:
            return int(torch.randint(below, (1,), generator=generator))

        def one() -> Window:
            height, width = shapes[draw(len(shapes))]
            top, left = draw(room.height - height + 1), draw(room.width - width + 1)
            return Window(room.top + top, room.left + left, height, width)

        return tuple(one() for _ in range(self.threat.count))
