"""Label-free hardening: a copy of a finished classifier whose labels survive masks.

Nobody needs the training set for this. The copy learns to say of a masked photo what the
untouched classifier says of the unmasked one. No labels are used, the original is not changed,
and batch-norm statistics stay as they were. Photos are few, and a copy could learn their answers by
heart; so it sees crops of them, recoloured and blended with each other, and the original is asked
about every such picture anew.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.inpaint import Inpainting
from patchcleanser.classifiers.mirror import Mirrored
from patchcleanser.classifiers.precision import tuned
from patchcleanser.classifiers.torch import TorchClassifier, input_size, logits_in
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.core.windows import Size
from patchcleanser.data.base import Dataset
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.training.augment import coloured
from patchcleanser.training.checkpoints import Checkpoint
from patchcleanser.training.choice import Check, chosen, eligible
from patchcleanser.training.cutout import Cutout, GreedyCutout, OwnMasks, shown
from patchcleanser.training.features import tell_features
from patchcleanser.training.judge import two_mask_views, viewed
from patchcleanser.training.photos import Photos
from patchcleanser.training.speed import compiled

TELL_SECONDS = 20
"""Within an epoch, which may take many minutes, how it stands is told so often."""

MOST_HELD = 400
"""More photos than this are not held out: each is looked at 25 times a check."""

FORMAT = 3
"""Of checkpoints; one of another format, or of photos drawn another way, is not gone on with."""

BACK = (0.75, 0.5, 0.25)
"""Parts of the way from the original's weights to the trained ones at which copies are looked at in the end."""


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


@dataclass
class Hardened:
    """The hardened copy, and how it got there; the first check is of the untouched classifier."""

    classifier: TorchClassifier
    checks: list[Check]
    best: Check


class Watcher(Protocol):
    """Told how it stands: after every check, and now and then between them."""

    def __call__(self, done: float, loss: float, check: Check) -> None:
        """So many epochs are over, with this loss lately; `check` is the last one."""


def harden(
    classifier: TorchClassifier,
    photos: Dataset,
    threat: Threat,
    *,
    settings: HardenSettings | None = None,
    seed: int = 0,
    out: Path | None = None,
    watch: Watcher | None = None,
) -> Hardened:
    """Fine-tune a copy of a torch classifier on unlabelled photos so that its labels survive masks.

    Stops when the invariance on held-out photos has not improved for a while. Of the copies that are not clearly
    less invariant than the most invariant one, the one that agrees most with the original is returned; among them are
    some whose weights lie between the original's and the best copy's. A checkpoint
    in `out`, if that is given, is taken up, so a killed run goes on after its last epoch or so. It is left in
    place until `write_model` has written the weights down.
    """
    settings = settings or HardenSettings()
    if len(photos) < 10:
        raise InputError(f"hardening needs at least 10 photos, got {len(photos)}")
    work = _Work(classifier, photos, threat, settings, seed)
    # Their fingerprint is known once photos were read.
    checkpoint = None if out is None else Checkpoint(out, _key(classifier, photos, threat, settings, seed))
    state = None if checkpoint is None else checkpoint.read(classifier.device)
    if state is None:
        work.checked(None)
    else:
        work.restore(state)
        del state  # or its tensors would stay on the device
    while not work.over:
        work.epoch(watch)
        if checkpoint is not None:
            checkpoint.write(work.state, last=work.over)
    work.look_back(watch)
    best = chosen(work.candidates)
    work.kept.load_state_dict(work.copies.get(best.place, work.teacher.state_dict()))
    hardened = TorchClassifier(work.kept, classifier.preprocessing, classes=classifier.classes)
    return Hardened(hardened, work.checks, best)


def _key(
    classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
) -> dict[str, Any]:
    """What makes one run another."""
    of = {
        "format": FORMAT,
        "classifier": classifier.fingerprint,
        "photos": photos.fingerprint,
        "patch": str(threat),
        "grid": threat.grid,
    }
    return {**of, "settings": asdict(settings), "seed": seed}


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


class _Work:
    """The copy, the photos on the device, and one epoch at a time."""

    def __init__(
        self, classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
    ) -> None:
        self.classifier, self.settings = classifier, settings
        self.device = classifier.device
        self.teacher, self.student = (self._copy(classifier.module) for _ in range(2))
        self.student.requires_grad_(True)
        _freeze(self.student, settings.frozen)
        self.ema = ModelEmaV3(self.student, decay=settings.average, use_warmup=True, warmup_power=0.8)
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
            for module in (asked, self.student):
                head = tell_features(module, shown(module, self.held[:2].to(self.device)))
                head.requires_grad_(False)  # classes that photos do not show would be forgotten there first
                self.classes = head.out_features
        self.ask, self.learn = (
            compiled(module, self.device, settings.epochs * self.steps) for module in (asked, self.student)
        )
        learning = [weights for weights in self.student.parameters() if weights.requires_grad]
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
            "student": self.student.state_dict(),
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
        self.student.load_state_dict(state["student"])
        self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.order.bit_generator.state = state["order"]
        self.done, self.taken = state["done"]
        self.checks = state["checks"]
        self.copies = state["copies"]
        self.started = time.monotonic() - state["seconds"]

    def epoch(self, watch: Watcher | None = None) -> None:
        """Once through the training photos, sharp ones several times, and a check if it is time for one."""
        order = self.order.permutation(self.pool)
        batch = self.settings.batch
        losses: list[Tensor] = []
        told = time.monotonic()
        with tuned(self.device):
            for step in range(self.steps):
                progress = (self.done + step / self.steps) / self.settings.epochs
                for group in self.optimizer.param_groups:
                    group["lr"] = (
                        self.settings.rate * min(1.0, 20 * progress + 0.05) * (0.5 + 0.5 * math.cos(math.pi * progress))
                    )
                losses.append(self._step(order[step * batch : (step + 1) * batch]))
                if watch is not None and time.monotonic() - told > TELL_SECONDS:
                    watch(self.done + (step + 1) / self.steps, float(torch.stack(losses[-50:]).mean()), self.checks[-1])
                    told = time.monotonic()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {self.done + 1}; lower the rate (now {self.settings.rate})"
            )
        self.done += 1
        if self.done % self.settings.every == 0 or self.done == self.settings.epochs:
            self.checked(loss)
            if watch is not None:
                watch(self.done, loss, self.checks[-1])

    def checked(self, loss: float | None) -> None:
        """See how the copy stands, and keep its weights for as long as they may be chosen."""
        self._judge(Check(self.done, loss, *self._measures(), self._seconds, 0.0 if loss is None else 1.0))

    def look_back(self, watch: Watcher | None = None) -> None:
        """Once it is over, look at copies between the original and the best: part of the way may keep most of both."""
        best = chosen(self.candidates)
        if best is self.checks[0]:
            return
        original, trained = self.teacher.state_dict(), self.copies[best.place]
        for way in BACK:
            between = {name: _between(original[name], tensor, way) for name, tensor in trained.items()}
            self.kept.load_state_dict(between)
            self._judge(Check(best.epoch, best.loss, *self._measures(), self._seconds, way))
            if watch is not None and best.loss is not None:
                watch(self.done, best.loss, self.checks[-1])

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
                return _divergence(self._parted(self.learn(shown(self.student, rest, hidden)))[0], wanted[whole:])

        hidden = self.cutout.chosen(rest, divergences, self.generator)
        hidden = torch.cat([hidden.new_zeros(whole, *self.size), hidden])
        with self._autocast():
            answers, kept = self._parted(self.learn(self._laid_out(shown(self.student, inputs, hidden))))
        loss = _divergence(answers, wanted).mean()
        if self.classes is not None:
            apart = (kept - features).square().sum(1) / features.square().sum(1).clamp_min(1e-6)
            loss = loss + self.settings.features * apart.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 5.0)
        self.optimizer.step()
        self.taken += 1
        self.ema.update(self.student, step=self.taken)
        return loss.detach()

    def _parted(self, output: Any) -> tuple[Tensor, Tensor]:
        """Logits and features of what a network that is asked, or learns, answers; none if it tells none."""
        answers = logits_in(output).float()
        return answers[:, : self.classes], answers[:, answers.shape[1] if self.classes is None else self.classes :]

    def _measures(self) -> tuple[float, tuple[bool, ...]]:
        """The agreement on the held-out photos, and which of them survive masks."""
        agree: list[Tensor] = []
        survive: list[Tensor] = []
        with torch.no_grad(), self._autocast():
            for inputs in torch.split(self.held, 128):
                inputs = inputs.to(self.device)
                wanted = _label(self.teacher(viewed(self.teacher, inputs, None)))
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


def _freeze(module: nn.Module, beginnings: tuple[str, ...]) -> None:
    """The weights whose names in the network begin so learn nothing, whatever is around the network."""
    while isinstance(module, (Inpainting, Mirrored)):
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
