"""Local scores: from a network of small receptive fields, or from any classifier on ablated images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.torch import TorchClassifier, refuse_train_mode
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.receptive_fields import Bools, ReceptiveFields
from patchcleanser.core.threats import Grid
from patchcleanser.engine.exact import default_chunk
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.engine.masking import require_unresized, with_mask_channel
from patchcleanser.errors import InputError, OutputError

Ablation = Literal["columns", "rows", "blocks"]

PAINT = 0.3137
"""An arbitrary colour, in normalised pixel values."""

LARGEST = 1e4
"""Local logits are cut off here, so that float64 sums keep the small ones beside an enormous one."""

ROUNDING, HALF_ROUNDING = 1e-5, 2e-2
"""Relative error of a score from batch to batch: of a float32 network, and of a half-precision one."""

CACHED_MASK_SETS = 16
"""Most mask sets, one for each size of images, of which is kept what they leave visible."""


@dataclass(frozen=True)
class LocalScores:
    """Local scores of a batch of images [N, classes, down, across], and the undefended logits [N, classes].

    `low` and `high` bound a score in any other batch, where kernels round differently. Certificates count the true
    class by `low` and every other one by `high`.
    """

    scores: Tensor
    low: Tensor
    high: Tensor
    logits: Tensor
    classifications: int
    """Inputs classified for each image."""


class LocalScoreSource(ABC):
    """Computes local scores of images, each a function of the pixels in its receptive field and of nothing else."""

    def __init__(self, classifier: Classifier, grid: Grid) -> None:
        self.classifier, self.grid = classifier, grid
        self.rounding = ROUNDING if classifier.dtype in (torch.float32, torch.float64) else HALF_ROUNDING

    @abstractmethod
    def receptive_fields(self, size: Size) -> ReceptiveFields:
        """The pixels that each score sees in images of this size on the threat's grid."""

    @abstractmethod
    def __call__(self, pixels: Tensor) -> LocalScores:
        """Scores of images [N, C, H, W] of one size on the threat's grid."""


class LocalLogits(LocalScoreSource):
    """The logits of a network at every position of its last feature map (networks/bagnet.py).

    The module has `local(inputs)` → [N, classes, down, across], where position (i, j) sees `field`×`field` px
    from (i * jump, j * jump). Its own output is their mean, or `pooled(local)` if it has that method.
    """

    name, method = "local logits", "local"
    cause = "the network may pad, or normalise over the whole image"
    example = "net:bagnet"

    def __init__(self, classifier: Classifier, grid: Grid) -> None:
        super().__init__(classifier, grid)
        module: Any = getattr(classifier, "module", None)
        if not isinstance(classifier, TorchClassifier) or not hasattr(module, self.method):
            raise InputError(
                f"{self.name} come from a network of small receptive fields such as {self.example}, got {classifier!r}"
            )
        self.module = module
        self._probed: set[Size] = set()
        self._visible: dict[MaskSet, Tensor] = {}

    def receptive_fields(self, size: Size) -> ReceptiveFields:
        """The network's own; resized images are refused, since resizing spreads a patch."""
        if self.grid == "source" and not self.classifier.preprocessing.keeps(size):
            raise InputError(
                f"receptive fields are counted on the classifier's input, and images of {size[0]}×{size[1]} px are "
                "resized or cropped; use a threat on the input grid (--grid input, in Python grid='input')"
            )
        return ReceptiveFields.fields(size, self.module.field, self.module.jump)

    def visible(self, mask_set: MaskSet) -> Tensor:
        """The scores that see no pixel of a union, bool [unions + 1, down, across]; the last row is all True."""
        if mask_set not in self._visible:
            if len(self._visible) >= CACHED_MASK_SETS:
                self._visible.clear()
            visible = self.receptive_fields(mask_set.image).visible(mask_set.unions.boxes)
            self._visible[mask_set] = torch.from_numpy(visible).to(self.classifier.device)
        return self._visible[mask_set]

    def map(self, pixels: Tensor) -> Tensor:
        """What the network has at each position [N, channels, down, across], for images on the threat's grid."""
        refuse_train_mode(self.module)
        device = self.classifier.device
        chunk = default_chunk(device, pixels[0].numel())
        with torch.inference_mode(), strict_float32(device):
            inputs = self.classifier.prepare(pixels) if self.grid == "source" else pixels
            local = torch.cat([self._local(part) for part in torch.split(inputs, chunk)])
            self._probe(inputs, local)
        return local

    def __call__(self, pixels: Tensor) -> LocalScores:
        local = self.map(pixels)
        if self.classifier.classes is None:
            self.classifier.classes = local.shape[1]
        slack = self._slack(local)
        with torch.inference_mode():
            logits = self.module.pooled(local.clone()) if hasattr(self.module, "pooled") else local.mean((2, 3))
        return LocalScores(local, local - slack, local + slack, logits, classifications=1)

    def _local(self, inputs: Tensor) -> Tensor:
        """Local logits; NaN counts as 0, and infinite ones are cut off, since they would drown all others in a sum."""
        local: Tensor = self.module.local(inputs.to(self.classifier.dtype, copy=True)).float()
        return local.nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)

    def _slack(self, local: Tensor) -> Tensor:
        """How far the scores of each image may differ in another batch [N, 1, 1, 1]."""
        return self.rounding * (1 + local.abs().amax((1, 2, 3), keepdim=True))

    def _probe(self, inputs: Tensor, local: Tensor) -> None:
        """Raise if pixels outside a receptive field change its logits; tried once for each image size.

        Parts of an image of noise are painted over in several ways, and positions that see none of it must keep their
        logits. This finds padding, a wrong `field`, layers that look at the whole image (GroupNorm, channel attention),
        and kernels through which large features round those of other pixels. Each part begins where the field of some
        position ends, so that a field which is larger by one pixel shows. The image is always the same one: pixels of
        an attacker must not decide whether a network is refused.
        """
        size = (inputs.shape[2], inputs.shape[3])
        if size in self._probed:
            return
        fields = ReceptiveFields.fields(size, self.module.field, self.module.jump)
        if local.shape[2:] != fields.grid:
            got = tuple(local.shape[2:])
            raise OutputError(f"the network has {got} {self.name} where its receptive fields make {fields.grid}")
        (above, below), (left, right) = (_beside_the_middle(axis) for axis in (fields.down, fields.across))
        parts = [*(rows[:, None].expand(size) for rows in (above, below)), *(c.expand(size) for c in (left, right))]
        noise, *paints = self._paints(inputs.shape[1:])
        local, hidden = self._local(noise[None]), torch.stack(parts).to(noise.device)[:, None]
        painted = (self._local(torch.where(hidden, paint, noise)) for paint in paints)
        changed = torch.stack([((part - local).abs() > 2 * self._slack(local)).any(1) for part in painted]).any(0)
        rows, columns = torch.from_numpy(fields.down), torch.from_numpy(fields.across)
        for part, moved in zip(parts, changed.cpu(), strict=True):
            sees = rows[:, part.any(1)].any(1)[:, None] & columns[:, part.any(0)].any(1)[None]
            if bool((moved & ~sees).any()):
                raise InputError(
                    f"{self.name} depend on more than their receptive field of {self.module.field} px: pixels outside "
                    f"it changed them; {self.cause}"
                )
        self._probed.add(size)

    def _paints(self, shape: torch.Size) -> list[Tensor]:
        """An input of noise [C, h, w], and what covers a part of it: one colour, black, white, and these two mixed."""
        levels = torch.tensor([0.0, 1.0], device=self.classifier.device)[:, None, None, None]
        black, white = self.classifier.prepare(levels.expand(2, *shape))[:, :, :1, :1]
        gray, speckle = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(black.device)
        noise = black + (white - black) * gray
        return [noise, torch.full_like(noise, PAINT), black, white, torch.where(speckle < 0.5, black, white)]


def _beside_the_middle(fields: Bools) -> tuple[Tensor, Tensor]:
    """Along one axis: the pixels before the field of a position in the middle, and those after that of one."""
    pixels = torch.arange(fields.shape[1])
    first, last = (np.flatnonzero(fields[at])[end] for at, end in ((len(fields) // 2, 0), ((len(fields) - 1) // 2, -1)))
    return pixels < int(first), pixels > int(last)


class LocalFeatures(LocalLogits):
    """The features of a network's trunk, each the same to the last bit whatever is outside of its receptive field.

    The module is a VisibleFeatures. A trunk without such features is refused: painting over parts of an image must
    leave the rest as it was, to the last bit.
    """

    name, method = "features", "features"
    cause = "the trunk may pad, normalise over the whole image, or round by what is beside a feature (see net:split)"
    example = "visible:net:split"

    def __init__(self, classifier: Classifier, grid: Grid) -> None:
        super().__init__(classifier, grid)
        self.rounding = 0.0

    def _local(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.module.features(inputs.to(self.classifier.dtype, copy=True))
        return features


class AblationScores(LocalScoreSource):
    """Confidences of any classifier that sees one band or block of the image and nothing else.

    With a `threshold`, votes instead: 1 for every class whose confidence is above it, so for several or none. A
    mask-aware classifier also gets the mask; any other sees the mask colour there.
    """

    def __init__(
        self, classifier: Classifier, grid: Grid, *, ablation: Ablation, keep: int, threshold: float | None = None
    ) -> None:
        super().__init__(classifier, grid)
        if ablation not in get_args(Ablation):
            raise InputError(f"an ablation keeps {', '.join(get_args(Ablation))}, got {ablation!r}")
        if threshold is not None and not 0 <= threshold < 1:
            raise InputError(f"a confidence threshold lies in [0, 1), got {threshold}")
        self.ablation, self.keep, self.threshold = ablation, keep, threshold

    def receptive_fields(self, size: Size) -> ReceptiveFields:
        """The pixels that each ablated view keeps."""
        if self.classifier.mask_aware and self.grid == "source":
            require_unresized(self.classifier.preprocessing, size)
        if self.ablation == "blocks":
            return ReceptiveFields.blocks(size, self.keep)
        return ReceptiveFields.bands(size, self.keep, columns=self.ablation == "columns")

    def __call__(self, pixels: Tensor) -> LocalScores:
        """One classification for each view, and one of the image without ablation."""
        fields = self.receptive_fields((pixels.shape[2], pixels.shape[3]))
        down, across = (torch.from_numpy(axis).to(pixels.device) for axis in (fields.down, fields.across))
        views = len(down) * len(across)
        pairs = torch.arange(len(pixels) * views, device=pixels.device)
        confidences, slacks = [], []
        for part in torch.split(pairs, default_chunk(self.classifier.device, pixels[0].numel())):
            image, view = part // views, part % views
            visible = down[view // len(across)][:, :, None] & across[view % len(across)][:, None, :]
            logits = self._logits(pixels[image], visible)
            confidences.append(logits.softmax(1).nan_to_num(0.0))
            slacks.append(self._slack(logits))
        confidence = torch.cat(confidences).reshape(len(pixels), *fields.grid, -1).permute(0, 3, 1, 2)
        slack = torch.cat(slacks).reshape(len(pixels), 1, *fields.grid)
        logits = self._logits(pixels, torch.ones_like(pixels[:, 0], dtype=torch.bool))
        return LocalScores(*self._scores(confidence, slack), logits, classifications=views + 1)

    def _scores(self, confidence: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores from confidences that may differ by `slack` in another batch, with their lower and upper bounds."""
        if self.threshold is None:
            return confidence, (confidence - slack).clamp_min(0.0), (confidence + slack).clamp_max(1.0)
        shifts = (torch.zeros_like(slack), slack, -slack)
        votes, low, high = ((confidence > self.threshold + shift).float() for shift in shifts)
        return votes, low, high

    def _slack(self, logits: Tensor) -> Tensor:
        """How far a confidence may differ in another batch [N]; infinite where logits are NaN or infinite.

        If no logit moves by more than d, the log odds of a class move by at most 2d. The slope of a
        confidence in its log odds is at most 1/4, so it moves by at most d / 2.
        """
        size = logits.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1)
        return self.rounding * (1 + size) / 2

    def _logits(self, images: Tensor, visible: Tensor) -> Tensor:
        """Logits of images of which only some pixels [N, H, W] are visible."""
        source, preprocessing = self.grid == "source", self.classifier.preprocessing
        channels = images.shape[1]
        fill = preprocessing.source_fill(channels) if source else preprocessing.input_fill(channels)
        colour = torch.tensor(fill, dtype=images.dtype, device=images.device)[:, None, None]
        with torch.inference_mode(), strict_float32(self.classifier.device):
            images = torch.where(visible[:, None], images, colour)
            images = self.classifier.prepare(images) if source else images
            if self.classifier.mask_aware:
                images = with_mask_channel(images, ~visible)
            return self.classifier.checked_logits(images)
