"""One printed patch for all images, whatever its position, rotation, scale and brightness."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor
from torch.nn import functional

from patchcleanser.attacks.objectives import attack_loss, class_logits
from patchcleanser.attacks.patch_attack import (
    AttackSettings,
    classifier_on_grid,
    image_on_grid,
    require_gradients,
)
from patchcleanser.attacks.patch_problem import random_placements, size_of
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.data.codec import as_picture
from patchcleanser.errors import DataError, InputError
from patchcleanser.records.atomic import whole_file

KEY = "patchcleanser"
"""The key of the settings in the PNG's text."""


@dataclass(frozen=True)
class Printing:
    """How prints of one patch differ: ranges from which every print is drawn."""

    scale: tuple[float, float] = (0.8, 1.0)
    """Relative to the largest size that fits the threat's window after rotation."""
    rotation: float = 20.0
    """At most so many degrees either way."""
    brightness: tuple[float, float] = (0.8, 1.2)

    def draw(self, draw: torch.Generator) -> dict[str, float]:
        """One print, as options of `apply_patch`."""
        s, r, b = torch.rand(3, generator=draw).tolist()
        return {
            "scale": self.scale[0] + s * (self.scale[1] - self.scale[0]),
            "rotation": (2 * r - 1) * self.rotation,
            "brightness": self.brightness[0] + b * (self.brightness[1] - self.brightness[0]),
        }


def apply_patch(
    image: Tensor,
    patch: Tensor,
    window: Window,
    *,
    scale: float = 1.0,
    rotation: float = 0.0,
    brightness: float = 1.0,
) -> Tensor:
    """An image [C, H, W] with a patch [C, h, w] pasted inside a window, never beyond it.

    The patch is rotated by `rotation` degrees, shrunk until it fits the window, and scaled.

    >>> black, white = torch.zeros(1, 4, 4), torch.ones(1, 2, 2)
    >>> apply_patch(black, white, Window(1, 1, 2, 2)).sum().item()
    4.0
    """
    if window.bottom > image.shape[-2] or window.right > image.shape[-1]:
        raise InputError(f"the window {window} lies outside an image of {image.shape[-2]}×{image.shape[-1]} px")
    if not 0 < scale <= 1:
        raise InputError(f"a scale lies in (0, 1], got {scale}")
    grid, inside = _grid((window.height, window.width), size_of(patch), scale, math.radians(rotation))
    grid, inside = grid.to(image.device), inside.to(image.device)
    printed = functional.grid_sample(
        patch.to(image)[None], grid[None], mode="bilinear", padding_mode="border", align_corners=False
    )[0]
    printed = (printed * brightness).clamp(0, 1)
    pasted = image.clone()
    pasted[(..., *window.slices)] = torch.where(inside, printed, image[(..., *window.slices)])
    return pasted


def _grid(window: Size, patch: Size, scale: float, angle: float) -> tuple[Tensor, Tensor]:
    """For each pixel of the window its position in the patch [h, w, (x, y)] in [-1, 1], and whether it is inside."""
    cos, sin = math.cos(angle), math.sin(angle)
    height, width = patch
    box = height * abs(cos) + width * abs(sin), width * abs(cos) + height * abs(sin)
    shrink = scale * min(window[0] / box[0], window[1] / box[1])
    rows = (torch.arange(window[0]) + 0.5 - window[0] / 2)[:, None]
    columns = (torch.arange(window[1]) + 0.5 - window[1] / 2)[None, :]
    x = (cos * columns + sin * rows) / shrink / (width / 2)
    y = (cos * rows - sin * columns) / shrink / (height / 2)
    return torch.stack([x, y], dim=-1), (x.abs() <= 1) & (y.abs() <= 1)


@dataclass(frozen=True)
class PrintedPatch:
    """Pixels to print [C, h, w] in [0, 1], and how they were made."""

    pixels: Tensor = field(repr=False)
    about: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write a PNG with the settings in its text."""
        text = PngImagePlugin.PngInfo()
        text.add_text(KEY, json.dumps(dict(self.about), ensure_ascii=True))
        with whole_file(Path(path)) as part:
            as_picture(self.pixels).save(part, format="PNG", pnginfo=text)

    @classmethod
    def load(cls, path: str | Path) -> PrintedPatch:
        """Read the patch in a PNG; pictures from elsewhere have no settings."""
        try:
            with Image.open(path) as picture:
                settings = getattr(picture, "text", {}).get(KEY, "{}")
                array = np.array(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
        except OSError as error:
            raise DataError(f"cannot read the patch {path}: {error}") from error
        return cls(torch.from_numpy(np.atleast_3d(array)).permute(2, 0, 1).float() / 255, json.loads(settings))


class UniversalPatch:
    """Fits one patch to many images: minimises the mean loss over position, scale, rotation and brightness.

    Each print stays inside a window of the threat, so certificates hold for it.
    """

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        settings: AttackSettings | None = None,
        *,
        printing: Printing | None = None,
        batch: int = 32,
    ) -> None:
        self.classifier, self.threat = as_classifier(classifier), Threat.of(threat)
        require_gradients(self.classifier)
        self.settings, self.printing, self.batch = settings or AttackSettings(), printing or Printing(), batch
        self.grid_classifier = classifier_on_grid(self.classifier, self.threat)

    def fit(self, images: Sequence[Tensor], labels: Sequence[int]) -> PrintedPatch:
        """A patch that misleads on images of one size; an iteration uses `batch` of them."""
        on_grid = [image_on_grid(image, self.classifier, self.threat) for image in images]
        if len({image.shape for image in on_grid}) != 1:
            raise InputError("a printed patch is fitted to images of one size; resize them first")
        draw = torch.Generator().manual_seed(self.settings.seed)
        height, width = self.threat.shapes(size_of(on_grid[0]))[0]
        device = self.grid_classifier.device
        pixels = torch.rand(on_grid[0].shape[0], height, width, generator=draw).to(device).requires_grad_(True)
        adam = torch.optim.Adam([pixels], lr=0.05)
        for _ in range(self.settings.iterations):
            picks = torch.randperm(len(on_grid), generator=draw)[: self.batch].tolist()
            printed = torch.stack([self._paste(on_grid[i], pixels, draw) for i in picks])
            truths = torch.tensor([labels[i] for i in picks], device=device)
            logits = class_logits(self.grid_classifier, printed)
            loss = attack_loss(self.settings.loss, logits, truths, self.settings.target)
            # Images that are misled by a clear margin already need no more.
            (pixels.grad,) = torch.autograd.grad(loss.clamp_min(-5).mean(), pixels)
            adam.step()
            with torch.no_grad():
                pixels.clamp_(0, 1)
        about = {
            "threat": self.threat.to_dict(),
            "settings": asdict(self.settings),
            "printing": asdict(self.printing),
            "classifier": self.classifier.fingerprint,
            "images": len(on_grid),
        }
        return PrintedPatch(pixels.detach().cpu(), about)

    def fooled(self, patch: PrintedPatch, images: Sequence[Tensor], labels: Sequence[int]) -> list[bool]:
        """Whether each image is misled by one more print, at a new random place."""
        draw = torch.Generator().manual_seed(self.settings.seed + 1)
        on_grid = [image_on_grid(image, self.classifier, self.threat) for image in images]
        with torch.inference_mode():
            printed = [self._paste(image, patch.pixels, draw) for image in on_grid]
            answers = [int(class_logits(self.grid_classifier, image[None]).argmax()) for image in printed]
        target = self.settings.target
        return [a != y if target is None else a == target for a, y in zip(answers, labels, strict=True)]

    def _paste(self, image: Tensor, pixels: Tensor, draw: torch.Generator) -> Tensor:
        (placement,) = random_placements(self.threat, size_of(image), 1, draw)
        for window in placement:
            image = apply_patch(image, pixels, window, **self.printing.draw(draw))
        return image
