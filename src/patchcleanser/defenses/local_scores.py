"""Evidence: where local scores come from. A network of small receptive fields, or one that sees ablated images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.torch import TorchClassifier, refuse_train_mode
from patchcleanser.core.geometry import Size
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Grid
from patchcleanser.engine.exact import default_chunk
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.engine.masking import require_unresized, with_mask_channel
from patchcleanser.errors import InputError

Ablation = Literal["columns", "rows", "blocks"]


@dataclass(frozen=True)
class Local:
    """Local scores of some images [N, classes, down, across], and the undefended logits [N, classes].

    `low` and `high` are what a score may be in another batch, where kernels round differently.
    Certificates count the true class by `low` and every other one by `high`.
    """

    score: Tensor
    low: Tensor
    high: Tensor
    whole: Tensor
    spent: int
    """Inputs classified for each image."""


class Evidence(ABC):
    """Local scores of images, each a function of the pixels that `sight` says, and of nothing else."""

    def __init__(self, classifier: Classifier, grid: Grid) -> None:
        self.classifier, self.grid = classifier, grid
        self.rounding = ROUNDING if classifier.dtype in (torch.float32, torch.float64) else HALF_ROUNDING

    @abstractmethod
    def sight(self, size: Size) -> ReceptiveFields:
        """What the scores of images of this size (on the threat's grid) see."""

    @abstractmethod
    def __call__(self, pixels: Tensor) -> Local:
        """Scores of images [N, C, H, W] of one size on the threat's grid."""


class LocalLogits(Evidence):
    """The logits of a network at every place of its last feature map (classifiers/bagnet.py).

    The module has `local(inputs)` → [N, classes, down, across], where place (i, j) sees `field`×`field` px
    from (i * jump, j * jump). Its own output is their mean, or what its `pooled` makes of them.
    """

    def __init__(self, classifier: Classifier, grid: Grid) -> None:
        super().__init__(classifier, grid)
        module: Any = getattr(classifier, "module", None)
        if not isinstance(classifier, TorchClassifier) or not hasattr(module, "local"):
            raise InputError(
                f"local logits come from a network of small receptive fields such as net:bagnet, got {classifier!r}"
            )
        self.module = module
        self._probed: set[Size] = set()

    def sight(self, size: Size) -> ReceptiveFields:
        """The receptive fields; a resized image is refused, since resizing spreads a patch."""
        if self.grid == "source" and not self.classifier.preprocessing.keeps(size):
            raise InputError(
                f"receptive fields are counted on the classifier's input, and images of {size[0]}×{size[1]} px are "
                "resized or cropped; use a threat on the input grid (--grid input)"
            )
        return ReceptiveFields.fields(size, self.module.field, self.module.jump)

    def __call__(self, pixels: Tensor) -> Local:
        """One pass through the network."""
        refuse_train_mode(self.module)
        device = self.classifier.device
        chunk = default_chunk(device, pixels[0].numel())
        with torch.inference_mode(), strict_float32(device):
            inputs = self.classifier.prepare(pixels) if self.grid == "source" else pixels
            local = torch.cat([self._local(part) for part in torch.split(inputs, chunk)])
            self._probe(inputs[0], local[0])
        if self.classifier.classes is None:
            self.classifier.classes = local.shape[1]
        slack = self._slack(local)
        with torch.inference_mode():
            whole = self.module.pooled(local) if hasattr(self.module, "pooled") else local.mean((2, 3))
        return Local(local, local - slack, local + slack, whole, spent=1)

    def _local(self, inputs: Tensor) -> Tensor:
        """Not numbers are no evidence; endless ones would drown what they are added to."""
        local: Tensor = self.module.local(inputs.to(self.classifier.dtype)).float()
        return local.nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)

    def _slack(self, local: Tensor) -> Tensor:
        """How far the scores of each image may move in another batch [N, 1, 1, 1]."""
        return self.rounding * (1 + local.abs().amax((1, 2, 3), keepdim=True))

    def _probe(self, inputs: Tensor, local: Tensor) -> None:
        """Refuse a network whose places are moved by pixels outside their fields, by trying it once for each size.

        Each half of an image is painted over, and the places that see none of it must answer as before. Padding,
        a wrong `field`, and whatever looks at the whole image (GroupNorm, attention to channels) are found out so.
        """
        size = (inputs.shape[1], inputs.shape[2])
        sight = ReceptiveFields.fields(size, self.module.field, self.module.jump)
        if size in self._probed or sight.grid != local.shape[1:]:  # the latter is refused elsewhere
            return
        halves = _halves(size)
        painted = torch.where(torch.stack(halves).to(inputs.device)[:, None], PAINT, inputs)
        changed = (self._local(painted) - local).abs().amax(1) > 2 * self._slack(local[None])[:, 0]
        for half, moved in zip(halves, changed.cpu(), strict=True):
            rows, columns = (torch.from_numpy(seen) for seen in (sight.down, sight.across))
            sees = rows[:, half.any(1)].any(1)[:, None] & columns[:, half.any(0)].any(1)[None]
            if bool((moved & ~sees).any()):
                raise InputError(
                    f"places of the network see more than their receptive field of {self.module.field} px: pixels "
                    "outside it changed them; it may pad, or normalise over the whole image"
                )
        self._probed.add(size)


class AblationConfidences(Evidence):
    """Confidences of any classifier that is shown one band or block of the image and nothing else.

    A mask-aware classifier is told what is hidden; another one sees the mask colour there.
    """

    def __init__(self, classifier: Classifier, grid: Grid, *, ablation: Ablation, keep: int) -> None:
        super().__init__(classifier, grid)
        if ablation not in get_args(Ablation):
            raise InputError(f"an ablation keeps {', '.join(get_args(Ablation))}, got {ablation!r}")
        self.ablation, self.keep = ablation, keep

    def sight(self, size: Size) -> ReceptiveFields:
        """What each ablated view keeps."""
        if self.classifier.mask_aware and self.grid == "source":
            require_unresized(self.classifier.preprocessing, size)
        if self.ablation == "blocks":
            return ReceptiveFields.blocks(size, self.keep)
        return ReceptiveFields.bands(size, self.keep, columns=self.ablation == "columns")

    def __call__(self, pixels: Tensor) -> Local:
        """One classification for each view, and one of the whole image."""
        sight = self.sight((pixels.shape[2], pixels.shape[3]))
        down, across = (torch.from_numpy(seen).to(pixels.device) for seen in (sight.down, sight.across))
        views = len(down) * len(across)
        pairs = torch.arange(len(pixels) * views, device=pixels.device)
        found, moved = [], []
        for part in torch.split(pairs, default_chunk(self.classifier.device, pixels[0].numel())):
            image, view = part // views, part % views
            visible = down[view // len(across)][:, :, None] & across[view % len(across)][:, None, :]
            logits = self._logits(pixels[image], visible)
            found.append(logits.softmax(1).nan_to_num(0.0))
            moved.append(self._moved(logits))
        sure = torch.cat(found).reshape(len(pixels), *sight.grid, -1).permute(0, 3, 1, 2)
        slack = torch.cat(moved).reshape(len(pixels), 1, *sight.grid)
        whole = self._logits(pixels, torch.ones_like(pixels[:, 0], dtype=torch.bool))
        return Local(*self._scores(sure, slack), whole, spent=views + 1)

    def _scores(self, sure: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is made of confidences that may move by so much: scores, the least and the most they may be."""
        return sure, (sure - slack).clamp_min(0.0), (sure + slack).clamp_max(1.0)

    def _moved(self, logits: Tensor) -> Tensor:
        """How far a confidence may move in another batch [N]; without limit where logits are no numbers.

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


class AblationVotes(AblationConfidences):
    """A view votes (1) for every class whose confidence is above the threshold, so for several or none."""

    def __init__(self, classifier: Classifier, grid: Grid, *, ablation: Ablation, keep: int, threshold: float) -> None:
        super().__init__(classifier, grid, ablation=ablation, keep=keep)
        if not 0 <= threshold < 1:
            raise InputError(f"a confidence threshold lies in [0, 1), got {threshold}")
        self.threshold = threshold

    def _scores(self, sure: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        votes, low, high = ((sure > self.threshold + s).float() for s in (torch.zeros_like(slack), slack, -slack))
        return votes, low, high


def _halves(size: Size) -> list[Tensor]:
    """The upper, lower, left and right half of an image, bool [H, W]."""
    down, across = (torch.arange(side) < (side + 1) // 2 for side in size)
    rows, columns = down[:, None].expand(size), across[None].expand(size)
    return [rows, ~rows, columns, ~columns]


PAINT = 0.3137
"""No colour of importance, in the network's own numbers."""

LARGEST = 1e4
"""Local logits are cut off here, so that sums in float64 keep what lies beside an enormous one."""

ROUNDING, HALF_ROUNDING = 1e-5, 2e-2
"""How far, relative to its size, a score may move with the batch it is in; of a half-precision network further."""
