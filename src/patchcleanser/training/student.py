"""The copy that is hardened: what it learns from, one epoch at a time, and how it stands."""

from __future__ import annotations

import copy
import math
import time
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.torch import TorchClassifier, input_size
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.data.base import Dataset
from patchcleanser.engine.float32 import cudnn_benchmark
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.wrapper import Around, logits_in
from patchcleanser.training.augment import coloured
from patchcleanser.training.choice import Check, chosen, eligible
from patchcleanser.training.cutout import Cutout, GreedyCutout, OwnMasks, shown
from patchcleanser.training.features import tell_features
from patchcleanser.training.judge import two_mask_views, viewed
from patchcleanser.training.photos import Photos
from patchcleanser.training.settings import HardenSettings
from patchcleanser.training.speed import compiled

TELL_SECONDS = 20
"""Within an epoch, which may take many minutes, how it stands is told so often."""

MOST_HELD = 400
"""More photos than this are not held out: each is looked at 25 times a check."""

BACK = (0.75, 0.5, 0.25)
"""Parts of the way from the original's weights to the trained ones at which copies are looked at in the end."""


class Watcher(Protocol):
    """Told how it stands: after every check, and now and then between them."""

    def __call__(self, done: float, loss: float, check: Check) -> None:
        """So many epochs are over, with this loss lately; `check` is the last one."""


class Student:
    """The copy, the photos on the device, and one epoch at a time."""

    def __init__(
        self, classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
    ) -> None:
        self.classifier, self.settings = classifier, settings
        self.device = classifier.device
        self.teacher, self.module = (self._copy(classifier.module) for _ in range(2))
        self.module.requires_grad_(True)
        _freeze(self.module, settings.frozen)
        self.ema = ModelEmaV3(self.module, decay=settings.average, use_warmup=True, warmup_power=0.8)
        self.size = input_size(classifier)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.order = np.random.default_rng(seed)
        self.photos = Photos(photos, np.arange(len(photos)), max(self.size) + max(self.size) // 4, self.device)
        sharp = (self.photos.sizes.amin(1) >= min(self.size) / 2).numpy()
        often = np.where(sharp & ~sharp.all(), settings.sharp, 1)
        apart = _apart(often, settings.holdout, self.order)
        self.held = self._prepared(photos, apart)
        often[apart] = 0
        self.pool = np.repeat(np.arange(len(photos)), often)
        """Photos to learn from, sharp ones several times."""
        self.steps = max(1, len(self.pool) // settings.batch)
        asked = Mirrored(self.teacher) if settings.mirror else self.teacher
        self.classes: int | None = None
        """Answers that are followed by features begin with so many logits; None: they are nothing but logits."""
        if settings.features:
            asked = copy.deepcopy(asked)  # the original itself goes on giving plain answers
            for module in (asked, self.module):
                head = tell_features(module, shown(module, self.held[:2].to(self.device)))
                head.requires_grad_(False)  # classes that photos do not show would be forgotten there first
                self.classes = head.out_features
        self.ask, self.learn = (
            compiled(module, self.device, settings.epochs * self.steps) for module in (asked, self.module)
        )
        learning = [weights for weights in self.module.parameters() if weights.requires_grad]
        if not learning:
            kept = [*settings.frozen, *["the last layer, as features= asks,"] * bool(settings.features)]
            raise InputError(f"nothing is left to learn when {' and '.join(kept)} stay as they are; freeze less")
        self.optimizer = torch.optim.AdamW(
            learning,
            lr=settings.rate,
            weight_decay=settings.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.cutout = _masks(threat, self.size, settings, self.device)
        self.views = two_mask_views(threat, self.size, self.device, settings.masks)
        self.done = self.taken = 0
        """Epochs, and steps, that are over."""
        self.checks: list[Check] = []
        self.copies: dict[tuple[int, float], dict[str, Tensor]] = {}
        """Weights of the checks that may still be chosen, by their place."""
        self.started = time.monotonic()

    @property
    def kept(self) -> nn.Module:
        """The averaged copy, which is checked and kept."""
        averaged: nn.Module = self.ema.module
        return averaged

    @property
    def candidates(self) -> list[Check]:
        """The untouched classifier, and the checks whose weights are still here."""
        return [self.checks[0], *(check for check in self.checks[1:] if check.place in self.copies)]

    @property
    def over(self) -> bool:
        """All epochs, or so many checks without improvement that no more are expected."""
        best = max(self.checks, key=lambda check: check.invariance)
        waited = self.checks[-1].epoch - best.epoch
        return self.done == self.settings.epochs or waited >= self.settings.patience * self.settings.every

    def state(self) -> dict[str, Any]:
        """All that changes, for a checkpoint."""
        return {
            "student": self.module.state_dict(),
            "ema": self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "order": self.order.bit_generator.state,
            "done": (self.done, self.taken),
            "checks": self.checks,
            "copies": self.copies,
            "seconds": self._seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """As a checkpoint has it."""
        self.module.load_state_dict(state["student"])
        self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.order.bit_generator.state = state["order"]
        self.done, self.taken = state["done"]
        self.checks = state["checks"]
        self.copies = state["copies"]
        self.started = time.monotonic() - state["seconds"]

    def epoch(self, on_progress: Watcher | None = None) -> None:
        """Once through the training photos, sharp ones several times, and a check if it is time for one."""
        order = self.order.permutation(self.pool)
        batch = self.settings.batch
        losses: list[Tensor] = []
        told = time.monotonic()
        with cudnn_benchmark(self.device):
            for step in range(self.steps):
                progress = (self.done + step / self.steps) / self.settings.epochs
                for group in self.optimizer.param_groups:
                    group["lr"] = (
                        self.settings.rate * min(1.0, 20 * progress + 0.05) * (0.5 + 0.5 * math.cos(math.pi * progress))
                    )
                losses.append(self._step(order[step * batch : (step + 1) * batch]))
                if on_progress is not None and time.monotonic() - told > TELL_SECONDS:
                    on_progress(
                        self.done + (step + 1) / self.steps, float(torch.stack(losses[-50:]).mean()), self.checks[-1]
                    )
                    told = time.monotonic()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {self.done + 1}; lower the rate (now {self.settings.rate})"
            )
        self.done += 1
        if self.done % self.settings.every == 0 or self.done == self.settings.epochs:
            self.checked(loss)
            if on_progress is not None:
                on_progress(self.done, loss, self.checks[-1])

    def checked(self, loss: float | None) -> None:
        """See how the copy stands, and keep its weights for as long as they may be chosen."""
        self._judge(Check(self.done, loss, *self._measures(), self._seconds, 0.0 if loss is None else 1.0))

    def look_back(self, on_progress: Watcher | None = None) -> None:
        """Once it is over, look at copies between the original and the best: part of the way may keep most of both."""
        best = chosen(self.candidates)
        if best is self.checks[0]:
            return
        original, trained = self.teacher.state_dict(), self.copies[best.place]
        for way in BACK:
            between = {name: _between(original[name], tensor, way) for name, tensor in trained.items()}
            self.kept.load_state_dict(between)
            self._judge(Check(best.epoch, best.loss, *self._measures(), self._seconds, way))
            if on_progress is not None and best.loss is not None:
                on_progress(self.done, best.loss, self.checks[-1])

    def _judge(self, check: Check) -> None:
        self.checks.append(check)
        self.copies[check.place] = {name: t.detach().clone() for name, t in self.kept.state_dict().items()}
        self.copies = {check.place: self.copies[check.place] for check in eligible(self.candidates)}

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _step(self, numbers: NDArray[np.intp]) -> Tensor:
        inputs = self._crops(numbers)
        with torch.no_grad(), self._autocast():
            logits, features = self._parted(self.ask(self._laid_out(shown(self.teacher, inputs))))
            wanted = logits.log_softmax(1)
        whole = int(self.settings.unmasked * len(inputs))
        rest = inputs[whole:]

        def divergences(hidden: Tensor) -> Tensor:
            with torch.no_grad(), self._autocast():
                return _divergence(self._parted(self.learn(shown(self.module, rest, hidden)))[0], wanted[whole:])

        hidden = self.cutout.chosen(rest, divergences, self.generator)
        hidden = torch.cat([hidden.new_zeros(whole, *self.size), hidden])
        with self._autocast():
            answers, kept = self._parted(self.learn(self._laid_out(shown(self.module, inputs, hidden))))
        loss = _divergence(answers, wanted).mean()
        if self.classes is not None:
            apart = (kept - features).square().sum(1) / features.square().sum(1).clamp_min(1e-6)
            loss = loss + self.settings.features * apart.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 5.0)
        self.optimizer.step()
        self.taken += 1
        self.ema.update(self.module, step=self.taken)
        return loss.detach()

    def _parted(self, output: Any) -> tuple[Tensor, Tensor]:
        """Logits and features of what a network that is asked, or learns, answers; none if it tells none."""
        answers = logits_in(output).float()
        return answers[:, : self.classes], answers[:, answers.shape[1] if self.classes is None else self.classes :]

    @cached_property
    def _wanted(self) -> list[Tensor]:
        """The original's labels of the held-out photos, which every check compares with."""
        with torch.no_grad(), self._autocast():
            parts = (part.to(self.device) for part in torch.split(self.held, 128))
            return [_label(self.teacher(viewed(self.teacher, part, None))) for part in parts]

    def _measures(self) -> tuple[float, tuple[bool, ...]]:
        """The agreement on the held-out photos, and which of them survive masks."""
        agree: list[Tensor] = []
        survive: list[Tensor] = []
        with torch.no_grad(), self._autocast():
            for inputs, wanted in zip(torch.split(self.held, 128), self._wanted, strict=True):
                inputs = inputs.to(self.device)
                agree.append(_label(self.kept(viewed(self.kept, inputs, None))) == wanted)
                alive = agree[-1].clone()
                for view in self.views:
                    alive &= _label(self.kept(viewed(self.kept, inputs, ~view))) == wanted
                survive.append(alive)
        return float(torch.cat(agree).float().mean()), tuple(torch.cat(survive).tolist())

    def _crops(self, numbers: NDArray[np.intp]) -> Tensor:
        """Random crops of training photos, recoloured, blended, resized to the input and normalised."""
        count, generator = len(numbers), self.generator

        def draw(low: float, high: float) -> Tensor:
            return torch.rand(count, generator=generator, device=self.device) * (high - low) + low

        # Photos are stored squeezed into squares; a crop of the right aspect unsqueezes them.
        sizes = self.photos.sizes[torch.from_numpy(numbers)].to(self.device)
        aspect = sizes[:, 1] / sizes[:, 0]
        scale = draw(self.settings.smallest_crop, 1.0).sqrt()
        high, wide = scale * aspect.clamp_max(1.0), scale * (1 / aspect).clamp_max(1.0)
        flip = torch.where(draw(0, 1) < 0.5, 1.0, -1.0)
        zero = torch.zeros_like(high)
        across = torch.stack([wide * flip, zero, (1 - wide) * draw(-1, 1)], 1)
        down = torch.stack([zero, high, (1 - high) * draw(-1, 1)], 1)
        crops = self.photos.crops(numbers, torch.stack([across, down], 1), self.size)
        crops = coloured(crops, generator, self.settings.colour)
        other = draw(-self.settings.mix, self.settings.mix).clamp_min(0)  # the order is random: so is the neighbour
        crops = torch.lerp(crops, crops.roll(1, 0), other[:, None, None, None])
        return self._laid_out(self.classifier.preprocessing.normalise(crops))

    def _prepared(self, photos: Dataset, indices: NDArray[np.intp]) -> Tensor:
        """Photos as the classifier itself would see them."""
        ready = [self.classifier.prepare(photos.image(int(i))[None]) for i in indices]
        return self._laid_out(torch.cat(ready))

    def _copy(self, module: nn.Module) -> nn.Module:
        copied = copy.deepcopy(module)
        return copied.to(memory_format=torch.channels_last) if self.device.type == "cuda" else copied

    def _laid_out(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous(memory_format=torch.channels_last)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")


def _apart(often: NDArray[np.intp], share: float, order: np.random.Generator) -> NDArray[np.intp]:
    """Photos to hold out: like those learnt from, sharp ones as often, but no more than this share of them."""
    held = max(4, min(int(share * len(often)), MOST_HELD))
    sharp, others = (order.permutation(np.flatnonzero(kind)) for kind in (often > 1, often == 1))
    sharp = sharp[: min(int(share * len(sharp)), round(held * often[sharp].sum() / often.sum()))]
    return np.concatenate([sharp, others[: held - len(sharp)]])


def _masks(threat: Threat, size: Size, settings: HardenSettings, device: torch.device) -> Cutout:
    """What to hide: on the input grid it is known where masks will be, on the source grid each image has its own."""
    masks = MaskSet.build(threat, image=size, masks=settings.masks)
    greedy: dict[str, Any] = {"tries": settings.tries, "share": settings.greedy}
    if threat.grid == "input":
        return OwnMasks(kept=torch.from_numpy(masks.visible()).to(device), **greedy)
    length = max(max(w.height, w.width) for mask in masks.masks for w in mask)
    smallest, largest = max(1, round(0.75 * length)), min(round(1.5 * length), min(size))
    return GreedyCutout(2 * threat.count, smallest, largest, inside=True, **greedy)


def _freeze(module: nn.Module, beginnings: tuple[str, ...]) -> None:
    """The weights whose names in the network begin so learn nothing, whatever is around the network."""
    while isinstance(module, Around):
        module = module.network
    named = dict(module.named_parameters(remove_duplicate=False))
    for beginning in beginnings:
        found = [weights for name, weights in named.items() if f"{name}.".startswith(f"{beginning}.")]
        if not found:
            layers = ", ".join(dict.fromkeys(name.partition(".")[0] for name in named))
            raise InputError(f"no layer {beginning!r} to leave as it is; the network has {layers}")
        for weights in found:
            weights.requires_grad_(False)


def _between(original: Tensor, trained: Tensor, way: float) -> Tensor:
    return torch.lerp(original, trained, way) if trained.is_floating_point() else trained


def _label(output: Tensor) -> Tensor:
    return logits_in(output).argmax(1)


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL divergence of each answer from the wanted one [N]."""
    return functional.kl_div(logits.log_softmax(1), wanted, reduction="none", log_target=True).sum(1)
