"""Label-free hardening: a copy of a finished classifier whose labels survive masks.

Nobody needs the training set for this. The copy learns to say of a masked photo what the
untouched classifier says of the unmasked one. No labels are used, the original is not changed,
and batch-norm statistics stay as they were.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.torch import TorchClassifier, input_size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.data.base import Dataset
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.training.cutout import Cutout, GreedyCutout
from patchcleanser.training.judge import two_mask_views


@dataclass(frozen=True)
class HardenSettings:
    """How to harden. Masks run from 0.75 to 1.75 times the length of the defense's own."""

    epochs: int = 60
    batch: int = 64
    rate: float = 5e-5
    weight_decay: float = 0.01
    unmasked: float = 0.3
    """Share of the loss that keeps the answer to unmasked photos."""
    tries: int = 2
    """Places tried for each mask; the one that moves the answer most is trained on."""
    greedy: float = 0.5
    """Share of the steps with such worst masks; the rest have random ones."""
    holdout: float = 0.1
    patience: int = 8
    """Checks without improvement before stopping."""
    masks: int = 6
    smallest_crop: float = 0.4
    """Photos are cropped at random to at least this share of their area."""

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch, self.tries, self.patience, self.masks) < 1:
            raise InputError(f"epochs, batch, tries, patience and masks are at least 1, got {self}")
        if not self.rate > 0 or not 0 <= self.unmasked < 1:
            raise InputError(f"a rate is above 0 and unmasked lies in [0, 1), got {self.rate} and {self.unmasked}")


@dataclass(frozen=True)
class Check:
    """How the copy stands, on photos held out of training."""

    epoch: int
    loss: float | None
    agreement: float
    """Unmasked label equal to the original's."""
    invariance: float
    """Label equal to the original's unmasked one under all two-mask views."""
    seconds: float


@dataclass
class Hardened:
    """The hardened copy, and how it got there; the first check is of the untouched classifier."""

    classifier: TorchClassifier
    checks: list[Check]
    best: Check


def harden(
    classifier: TorchClassifier,
    photos: Dataset,
    threat: Threat,
    *,
    settings: HardenSettings | None = None,
    seed: int = 0,
    watch: Callable[[Check, int], None] | None = None,
) -> Hardened:
    """Fine-tune a copy of a torch classifier on unlabelled photos so that its labels survive masks.

    Stops when the invariance on held-out photos has not improved for a while, and returns the
    best copy by that measure (agreement breaks ties).
    """
    settings = settings or HardenSettings()
    if len(photos) < 10:
        raise InputError(f"hardening needs at least 10 photos, got {len(photos)}")
    work = _Work(classifier, photos, threat, settings, seed)
    checks = [work.check(0, None)]
    best, kept = checks[0], work.weights()
    for epoch in range(1, settings.epochs + 1):
        loss = work.epoch(epoch)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss became {loss} in epoch {epoch}; lower the rate (now {settings.rate})")
        checks.append(work.check(epoch, loss))
        if watch is not None:
            watch(checks[-1], settings.epochs)
        if (checks[-1].invariance, checks[-1].agreement) > (best.invariance, best.agreement):
            best, kept = checks[-1], work.weights()
        if epoch - best.epoch >= settings.patience:
            break
    work.student.load_state_dict(kept)
    return Hardened(TorchClassifier(work.student, classifier.preprocessing, classes=classifier.classes), checks, best)


class _Work:
    """The copy, the photos on the device, and one epoch at a time."""

    def __init__(
        self, classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
    ) -> None:
        self.classifier, self.settings = classifier, settings
        self.teacher: nn.Module = classifier.module
        self.student = copy.deepcopy(classifier.module).requires_grad_(True)
        self.device = classifier.device
        self.size = input_size(classifier)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.order = np.random.default_rng(seed)
        split = self.order.permutation(len(photos))
        held = max(4, int(settings.holdout * len(photos)))
        self.side = max(self.size) + max(self.size) // 4
        self.train, self.aspect = _squared(photos, split[held:], self.side)
        self.held = self._prepared(photos, split[:held])
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=settings.rate, weight_decay=settings.weight_decay
        )
        masks = MaskSet.build(threat, image=self.size, masks=settings.masks)
        length = max(max(w.height, w.width) for mask in masks.masks for w in mask)
        self.cutout: Cutout = GreedyCutout(
            count=2 * threat.count,
            smallest=max(1, round(0.75 * length)),
            largest=min(round(1.75 * length), min(self.size)),
            inside=True,
            tries=settings.tries,
            share=settings.greedy,
        )
        self.views = two_mask_views(threat, self.size, self.device)
        self.started = time.monotonic()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the student's current weights."""
        return {name: tensor.detach().clone() for name, tensor in self.student.state_dict().items()}

    def epoch(self, number: int) -> float:
        """Once through the training photos; returns the mean loss."""
        order = self.order.permutation(len(self.train))
        batch = self.settings.batch
        steps = max(1, len(order) // batch)
        losses = []
        for step in range(steps):
            progress = (number - 1 + step / steps) / self.settings.epochs
            for group in self.optimizer.param_groups:
                group["lr"] = (
                    self.settings.rate * min(1.0, 20 * progress + 0.05) * (0.5 + 0.5 * math.cos(math.pi * progress))
                )
            losses.append(self._step(torch.as_tensor(order[step * batch : (step + 1) * batch])))
        return float(torch.stack(losses).mean())

    def _step(self, index: Tensor) -> Tensor:
        inputs = self._crops(index)
        with torch.no_grad(), self._autocast():
            wanted = _log_probabilities(self.teacher(inputs))

        def divergences(masked: Tensor) -> Tensor:
            with torch.no_grad(), self._autocast():
                return _divergence(self.student(masked), wanted)

        masked = self.cutout(inputs, divergences, self.generator)
        weight = self.settings.unmasked
        with self._autocast():
            if weight > 0:
                both = _divergence(self.student(torch.cat([masked, inputs])), wanted.repeat(2, 1))
                hidden, seen = both.chunk(2)
                loss = (1 - weight) * hidden.mean() + weight * seen.mean()
            else:
                loss = _divergence(self.student(masked), wanted).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 5.0)
        self.optimizer.step()
        return loss.detach()

    def check(self, epoch: int, loss: float | None) -> Check:
        """Agreement and invariance on the held-out photos."""
        agree: list[Tensor] = []
        survive: list[Tensor] = []
        with torch.no_grad(), self._autocast():
            for inputs in torch.split(self.held, 128):
                inputs = inputs.to(self.device)
                wanted = self.teacher(inputs).argmax(1)
                agree.append(self.student(inputs).argmax(1) == wanted)
                alive = agree[-1].clone()
                for view in self.views:
                    alive &= self.student(inputs * view).argmax(1) == wanted
                survive.append(alive)
        agreement, invariance = (float(torch.cat(v).float().mean()) for v in (agree, survive))
        return Check(epoch, loss, agreement, invariance, time.monotonic() - self.started)

    def _crops(self, index: Tensor) -> Tensor:
        """Random crops of training photos, resized to the input and normalised."""
        images = self.train[index].to(self.device).float() / 255
        count, generator = len(images), self.generator

        def draw(low: float, high: float) -> Tensor:
            return torch.rand(count, generator=generator, device=self.device) * (high - low) + low

        # Photos are stored squeezed into squares; a crop of the right aspect unsqueezes them.
        aspect = self.aspect[index].to(self.device)
        scale = draw(self.settings.smallest_crop, 1.0).sqrt()
        high, wide = scale * aspect.clamp_max(1.0), scale * (1 / aspect).clamp_max(1.0)
        flip = torch.where(draw(0, 1) < 0.5, 1.0, -1.0)
        zero = torch.zeros_like(high)
        across = torch.stack([wide * flip, zero, (1 - wide) * draw(-1, 1)], 1)
        down = torch.stack([zero, high, (1 - high) * draw(-1, 1)], 1)
        grid = functional.affine_grid(torch.stack([across, down], 1), [count, 3, *self.size], align_corners=False)
        crops = functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
        return self._laid_out(self.classifier.preprocessing.normalise(crops))

    def _prepared(self, photos: Dataset, indices: NDArray[np.intp]) -> Tensor:
        """Photos as the classifier itself would see them."""
        ready = [self.classifier.prepare(photos.image(int(i))[None]) for i in indices]
        return self._laid_out(torch.cat(ready))

    def _laid_out(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous(memory_format=torch.channels_last)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")


def _squared(photos: Dataset, indices: NDArray[np.intp], side: int) -> tuple[Tensor, Tensor]:
    """Photos squeezed to side × side, uint8 [N, 3, side, side], and their width over height."""
    images = torch.empty(len(indices), 3, side, side, dtype=torch.uint8)
    aspects = torch.empty(len(indices))
    for row, index in enumerate(indices):
        image = photos.image(int(index))
        aspects[row] = image.shape[2] / image.shape[1]
        small = functional.interpolate(image[None], size=(side, side), mode="bilinear", antialias=True)
        images[row] = (small[0] * 255).round().to(torch.uint8)
    return images, aspects


def _log_probabilities(logits: Tensor) -> Tensor:
    return functional.log_softmax(getattr(logits, "logits", logits).float(), dim=1)


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL divergence of each answer from the wanted one [N]."""
    return functional.kl_div(_log_probabilities(logits), wanted, reduction="none", log_target=True).sum(1)
