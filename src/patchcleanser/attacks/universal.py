"""One printed patch for all images: wherever it is stuck, turned, scaled or lit."""

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
    size_of,
)
from patchcleanser.attacks.patch_problem import random_placements
from patchcleanser.classifiers.base import Classifier
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.threats import Threat
from patchcleanser.data.pictures import as_picture
from patchcleanser.errors import DataError, InputError
from patchcleanser.records.atomic import whole_file

KEY = "patchcleanser"
"""Under this name the settings stand in the PNG's text."""


@dataclass(frozen=True)
class Printing:
    """How prints of one patch differ: ranges from which every view is drawn."""

    scale: tuple[float, float] = (0.8, 1.0)
    """Of the largest size that fits the threat's window, turned as it is."""
    rotation: float = 20.0
    """At most so many degrees to either side."""
    brightness: tuple[float, float] = (0.8, 1.2)

    def draw(self, draw: torch.Generator) -> dict[str, float]:
        """One view, as options of `apply_patch`."""
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
    """An image [C, H, W] with a patch [C, h, w] stuck inside a window, never beyond it.

    The patch is turned by `rotation` degrees, shrunk until it fits the window, and scaled.

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
    below = image[:, window.top : window.bottom, window.left : window.right]
    stuck = torch.where(inside, printed, below)
    pad = (window.left, image.shape[-1] - window.right, window.top, image.shape[-2] - window.bottom)
    here = functional.pad(torch.ones_like(below, dtype=torch.bool), pad)
    return torch.where(here, functional.pad(stuck, pad), image)


def _grid(window: Size, patch: Size, scale: float, angle: float) -> tuple[Tensor, Tensor]:
    """Where in the patch each pixel of the window looks [h, w, (x, y)] in [-1, 1], and whether that is inside."""
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
    """Pixels to print [C, h, w] in [0, 1], and how they were found."""

    pixels: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """A PNG with the settings in its text."""
        text = PngImagePlugin.PngInfo()
        text.add_text(KEY, json.dumps(dict(self.about), ensure_ascii=True))
        with whole_file(Path(path)) as part:
            as_picture(self.pixels).save(part, format="PNG", pnginfo=text)

    @classmethod
    def load(cls, path: str | Path) -> PrintedPatch:
        """The patch in a PNG; any picture will do, but only ours say how they were made."""
        try:
            with Image.open(path) as picture:
                said = getattr(picture, "text", {}).get(KEY, "{}")
                array = np.array(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
        except OSError as error:
            raise DataError(f"cannot read the patch {path}: {error}") from error
        return cls(torch.from_numpy(np.atleast_3d(array)).permute(2, 0, 1).float() / 255, json.loads(said))


class UniversalPatch:
    """Fits one patch to many images: the mean loss over position, scale, rotation and brightness is made small.

    Each patch stays inside a window of the threat, so what a certificate promises holds for it.
    """

    def __init__(
        self,
        classifier: Classifier,
        threat: Threat,
        settings: AttackSettings | None = None,
        *,
        printing: Printing | None = None,
        batch: int = 32,
    ) -> None:
        require_gradients(classifier)
        self.classifier, self.threat = classifier, threat
        self.settings, self.printing, self.batch = settings or AttackSettings(), printing or Printing(), batch
        self.seen = classifier_on_grid(classifier, threat)

    def fit(self, images: Sequence[Tensor], labels: Sequence[int]) -> PrintedPatch:
        """A patch that misleads on images of one size; an iteration looks at `batch` of them."""
        placed = [image_on_grid(image, self.classifier, self.threat) for image in images]
        if len({image.shape for image in placed}) != 1:
            raise InputError("a printed patch is fitted to images of one size; resize them first")
        draw = torch.Generator().manual_seed(self.settings.seed)
        height, width = self.threat.shapes(size_of(placed[0]))[0]
        pixels = torch.rand(placed[0].shape[0], height, width, generator=draw).to(self.seen.device)
        pixels.requires_grad_(True)
        adam = torch.optim.Adam([pixels], lr=0.05)
        for _ in range(self.settings.iterations):
            picks = torch.randperm(len(placed), generator=draw)[: self.batch].tolist()
            seen = torch.stack([self._stuck(placed[i], pixels, draw) for i in picks])
            truths = torch.tensor([labels[i] for i in picks], device=self.seen.device)
            logits = class_logits(self.seen, seen)
            loss = attack_loss(self.settings.loss, logits, truths, self.settings.target)
            # Images that are misled by a clear margin already need no more.
            (adam.param_groups[0]["params"][0].grad,) = torch.autograd.grad(loss.clamp_min(-5).mean(), pixels)
            adam.step()
            with torch.no_grad():
                pixels.clamp_(0, 1)
        return PrintedPatch(pixels.detach().cpu(), self._about(len(placed)))

    def fooled(self, patch: PrintedPatch, images: Sequence[Tensor], labels: Sequence[int]) -> list[bool]:
        """Whether each image is misled by one more print, at a place and in a view not seen when fitting."""
        draw = torch.Generator().manual_seed(self.settings.seed + 1)
        placed = [image_on_grid(image, self.classifier, self.threat) for image in images]
        with torch.inference_mode():
            stuck = [self._stuck(image, patch.pixels, draw) for image in placed]
            said = [int(class_logits(self.seen, image[None]).argmax()) for image in stuck]
        target = self.settings.target
        return [s != y if target is None else s == target for s, y in zip(said, labels, strict=True)]

    def _stuck(self, image: Tensor, pixels: Tensor, draw: torch.Generator) -> Tensor:
        (place,) = random_placements(self.threat, size_of(image), 1, draw)
        for window in place:
            image = apply_patch(image, pixels, window, **self.printing.draw(draw))
        return image

    def _about(self, images: int) -> dict[str, Any]:
        return {
            "threat": self.threat.to_json(),
            "settings": asdict(self.settings),
            "printing": asdict(self.printing),
            "classifier": self.classifier.fingerprint,
            "images": images,
        }
