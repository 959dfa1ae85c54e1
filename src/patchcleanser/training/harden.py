"""Hardening without labels: fine-tune a copy of a finished classifier so that its labels survive masks.

The training set is not needed. The copy learns to give a masked photo the logits that the original gives the unmasked
one. The original is not changed, and batch-norm statistics stay as they are. With few photos a copy could memorise
their logits; so it sees random crops, recoloured and blended with each other, and the original labels each of them.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.torch import TorchClassifier, input_size
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.engine.float32 import cudnn_benchmark
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.wrapper import Around, logits_in
from patchcleanser.training.artifacts import Checkpoint, OnProgress
from patchcleanser.training.augment import jitter_colour, uniform
from patchcleanser.training.cutout import Cutout, DefenseMasks, GreedyCutout, masked_inputs
from patchcleanser.training.distillation import append_features
from patchcleanser.training.photo_cache import PhotoCache
from patchcleanser.training.recipes import HardenSettings
from patchcleanser.training.selection import Check, Selector, choose, eligible, predict_labels, two_mask_views
from patchcleanser.training.training_state import TrainingState, bfloat16, compile_for

FORMAT = 4
"""Version of checkpoints; those of another version are refused."""

PROGRESS_SECONDS = 20
"""Seconds between reports within an epoch."""

MAX_HELD_OUT = 400
"""Most photos that are held out: each takes 25 forward passes a check."""

INTERPOLATIONS = (0.75, 0.5, 0.25)
"""Copies between the original's weights (0) and the trained ones (1) that are checked at the end."""

CHECK_BATCH = 128


@dataclass
class HardenResult:
    """The hardened copy and all checks; the first check is of the untouched classifier."""

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
    out: Path | None = None,
    on_progress: OnProgress | None = None,
) -> HardenResult:
    """Fine-tune a copy of a torch classifier on unlabelled photos so that its labels survive masks.

    Stops when the invariance on held-out photos has not improved for a while. Among checkpoints within one paired
    standard error of the best invariance, we return the one that agrees most with the original; some of them are
    interpolated between the original's weights and the best copy's.

    A run continues from a checkpoint in `out`, if that is given. It stays until `write_model` has written the weights.
    """
    settings = settings or HardenSettings()
    classifier.require_one_label("hardening keeps")
    if len(photos) < 10:
        raise InputError(f"hardening needs at least 10 photos, got {len(photos)}")
    student = HardeningStudent(classifier, photos, threat, settings, seed)
    # After the photos were read, which their fingerprint needs.
    checkpoint = None if out is None else Checkpoint(out, _key(classifier, photos, threat, settings, seed))
    state = None if checkpoint is None else checkpoint.read(classifier.device)
    if state is None:
        student.check(None, way=0.0)  # the untouched classifier
    else:
        student.restore(state)
        del state  # frees its tensors on the device
    while not student.finished:
        student.train_epoch(on_progress)
        if checkpoint is not None:
            checkpoint.write(student.state, last=student.finished)
    student.check_interpolations(on_progress)
    best = choose(student.candidates)
    module = student.averaged
    module.load_state_dict(student.weights.get(best.key, student.original.state_dict()))
    hardened = TorchClassifier(module, classifier.preprocessing, classes=classifier.classes)
    return HardenResult(hardened, student.checks, best)


def _key(
    classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
) -> dict[str, Any]:
    """What identifies a run; a checkpoint with another key is refused."""
    return {
        "format": FORMAT,
        "classifier": classifier.fingerprint,
        "photos": photos.fingerprint,
        "patch": str(threat),
        "grid": threat.grid,
        "settings": asdict(settings),
        "seed": seed,
    }


class HardeningStudent(TrainingState):
    """The copy in training, the photos on the device, and the checks so far."""

    def __init__(
        self, classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
    ) -> None:
        self.settings, self.size, self.preprocessing = settings, input_size(classifier), classifier.preprocessing
        self.original, module = (copy.deepcopy(classifier.module) for _ in range(2))
        if classifier.device.type == "cuda":
            self.original.to(memory_format=torch.channels_last)
            module.to(memory_format=torch.channels_last)
        _freeze(module.requires_grad_(True), settings.frozen)
        generator = torch.Generator(classifier.device).manual_seed(seed)
        super().__init__(module, generator, seed=seed, decay=settings.average)
        self.photos = PhotoCache(photos, max(self.size) + max(self.size) // 4, self.device)
        sharp = (self.photos.sizes.amin(1) >= min(self.size) / 2).numpy()
        repeats = np.where(sharp & ~sharp.all(), settings.sharp, 1)
        held_out = _hold_out(repeats, settings.holdout, self.order)
        repeats[held_out] = 0
        self.pool = np.repeat(np.arange(len(photos)), repeats)
        """Numbers of the photos to train on, those of sharp ones several times."""
        self.steps = max(1, len(self.pool) // settings.batch)
        inputs = _channels_last(torch.cat([classifier.prepare(photos.image(int(i))[None]) for i in held_out]))
        with torch.no_grad(), bfloat16(self.device):
            labels = [predict_labels(self.original, part.to(self.device)) for part in torch.split(inputs, CHECK_BATCH)]
        views = two_mask_views(threat, self.size, self.device, settings.masks)
        self.selector = Selector(inputs, torch.cat(labels), views, batch=CHECK_BATCH)
        teacher = Mirrored(self.original) if settings.mirror else self.original
        self.classes: int | None = None
        """With features, the number of logits before them in the outputs of the teacher and the student."""
        if settings.features:
            teacher = copy.deepcopy(teacher)  # checks need the original's plain logits
            for module in (teacher, self.module):
                head = append_features(module, masked_inputs(module, inputs[:2].to(self.device)))
                head.requires_grad_(False)  # or it would forget classes that the photos do not show
                self.classes = head.out_features
        self.teacher, self.student = (
            compile_for(settings.epochs * self.steps, module, self.device) for module in (teacher, self.module)
        )
        trainable = [weights for weights in self.module.parameters() if weights.requires_grad]
        if not trainable:
            frozen = [*settings.frozen, *["the last layer (frozen by features=)"] * bool(settings.features)]
            raise InputError(f"no layer is left to train with {' and '.join(frozen)} frozen; freeze fewer layers")
        self.optimizer = torch.optim.AdamW(
            trainable, lr=settings.rate, weight_decay=settings.weight_decay, fused=self.device.type == "cuda"
        )
        self.cutout = _cutout(threat, self.size, settings, self.device)
        self.epochs_done = 0
        self.checks: list[Check] = []
        self.weights: dict[tuple[int, float], dict[str, Tensor]] = {}
        """Weights of the checks that may still be chosen, by the checks' keys."""
        self.started = time.monotonic()

    @property
    def candidates(self) -> list[Check]:
        """The check of the untouched classifier, and those whose weights are stored."""
        return [self.checks[0], *(check for check in self.checks[1:] if check.key in self.weights)]

    @property
    def finished(self) -> bool:
        """Whether all epochs are over, or the invariance has not improved for long enough."""
        best = max(self.checks, key=lambda check: check.invariance)
        waited = self.checks[-1].epoch - best.epoch
        return self.epochs_done == self.settings.epochs or waited >= self.settings.patience * self.settings.every

    def state(self) -> dict[str, Any]:
        checks, seconds = [asdict(check) for check in self.checks], time.monotonic() - self.started
        own = {"epochs": self.epochs_done, "checks": checks, "weights": self.weights, "seconds": seconds}
        return super().state() | own

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.epochs_done, self.weights = state["epochs"], state["weights"]
        self.checks = [Check(**values) for values in state["checks"]]
        self.started = time.monotonic() - state["seconds"]

    def train_epoch(self, on_progress: OnProgress | None = None) -> None:
        """Train once on all photos of the pool, and check the copy if a check is due."""
        settings, order = self.settings, self.order.permutation(self.pool)
        losses: list[Tensor] = []
        reported = time.monotonic()
        with cudnn_benchmark(self.device):
            for step in range(self.steps):
                progress = (self.epochs_done + step / self.steps) / settings.epochs
                rate = settings.rate * min(1.0, 20 * progress + 0.05) * (0.5 + 0.5 * math.cos(math.pi * progress))
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                losses.append(self._step(order[step * settings.batch : (step + 1) * settings.batch]))
                if time.monotonic() - reported > PROGRESS_SECONDS:
                    recent = float(torch.stack(losses[-50:]).mean())
                    self._report(on_progress, self.epochs_done + (step + 1) / self.steps, recent)
                    reported = time.monotonic()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {self.epochs_done + 1}; lower the rate (now {settings.rate})"
            )
        self.epochs_done += 1
        if self.epochs_done % settings.every == 0 or self.epochs_done == settings.epochs:
            self.check(loss)
            self._report(on_progress, self.epochs_done, loss)

    def check(self, loss: float | None, *, epoch: int | None = None, way: float = 1.0) -> None:
        """Score the averaged copy, and store its weights for as long as they may be chosen."""
        with torch.no_grad(), bfloat16(self.device):
            agrees, survived = self.selector(self.averaged)
        agreement, seconds = float(agrees.float().mean()), time.monotonic() - self.started
        check = Check(epoch or self.epochs_done, loss, agreement, tuple(survived.tolist()), seconds, way)
        self.checks.append(check)
        self.weights[check.key] = {name: t.detach().clone() for name, t in self.averaged.state_dict().items()}
        self.weights = {check.key: self.weights[check.key] for check in eligible(self.candidates)}

    def check_interpolations(self, on_progress: OnProgress | None = None) -> None:
        """After training, check weights between the original's and the best: some may keep most of both."""
        best = choose(self.candidates)
        if best.loss is None:
            return
        original, trained = self.original.state_dict(), self.weights[best.key]
        for way in INTERPOLATIONS:
            weights = {n: torch.lerp(original[n], t, way) if t.is_floating_point() else t for n, t in trained.items()}
            self.averaged.load_state_dict(weights)
            self.check(best.loss, epoch=best.epoch, way=way)
            self._report(on_progress, self.epochs_done, best.loss)

    def _report(self, on_progress: OnProgress | None, done: float, loss: float) -> None:
        if on_progress is not None:
            check = self.checks[-1]
            text = f"loss {loss:.3f}  agreement {check.agreement:.3f}  invariance {check.invariance:.3f}"
            on_progress(round(done, 2), self.settings.epochs, text)

    def _step(self, numbers: NDArray[np.intp]) -> Tensor:
        """Train on crops of these photos; return the loss."""
        inputs = self._crops(numbers)
        with torch.no_grad(), bfloat16(self.device):
            logits, target_features = self._split(self.teacher(_channels_last(masked_inputs(self.original, inputs))))
            targets = logits.log_softmax(1)
        unmasked = int(self.settings.unmasked * len(inputs))

        def losses(hidden: Tensor) -> Tensor:
            with torch.no_grad(), bfloat16(self.device):
                logits, _ = self._split(self.student(masked_inputs(self.module, inputs[unmasked:], hidden)))
                return _divergence(logits, targets[unmasked:])

        hidden = self.cutout.choose(inputs[unmasked:], losses, self.generator)
        hidden = torch.cat([hidden.new_zeros(unmasked, *self.size), hidden])
        with bfloat16(self.device):
            logits, features = self._split(self.student(_channels_last(masked_inputs(self.module, inputs, hidden))))
        loss = _divergence(logits, targets).mean()
        if self.classes is not None:
            errors = (features - target_features).square().sum(1) / target_features.square().sum(1).clamp_min(1e-6)
            loss = loss + self.settings.features * errors.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 5.0)
        self.optimizer.step()
        self.step += 1
        self.ema.update(self.module, step=self.step)
        return loss.detach()

    def _split(self, output: Any) -> tuple[Tensor, Tensor]:
        """Logits and features [N, 0 or more] in an output of the teacher or the student."""
        values = logits_in(output).float()
        classes = values.shape[1] if self.classes is None else self.classes
        return values[:, :classes], values[:, classes:]

    def _crops(self, numbers: NDArray[np.intp]) -> Tensor:
        """Random crops of photos, recoloured, blended, resized to the input and normalised."""
        settings, generator = self.settings, self.generator
        crops = self.photos.random_crops(numbers, self.size, generator, smallest=settings.smallest_crop)
        crops = jitter_colour(crops, generator, settings.colour)
        mix = uniform(len(numbers), -settings.mix, settings.mix, generator, self.device).clamp_min(0)
        # Photos come in random order, so the neighbour is a random one.
        crops = torch.lerp(crops, crops.roll(1, 0), mix[:, None, None, None])
        return _channels_last(self.preprocessing.normalise(crops))


def _channels_last(inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last)


def _hold_out(repeats: NDArray[np.intp], share: float, order: np.random.Generator) -> NDArray[np.intp]:
    """Numbers of the photos to hold out: sharp ones as often as in training, but at most this share of them."""
    number = max(4, min(int(share * len(repeats)), MAX_HELD_OUT))
    sharp, rest = (order.permutation(np.flatnonzero(kind)) for kind in (repeats > 1, repeats == 1))
    sharp = sharp[: min(int(share * len(sharp)), round(number * repeats[sharp].sum() / repeats.sum()))]
    return np.concatenate([sharp, rest[: number - len(sharp)]])


def _cutout(threat: Threat, size: Size, settings: HardenSettings, device: torch.device) -> Cutout:
    """Masks to train with: the defense's own on the input grid; on the source grid, where they vary, random ones."""
    masks = MaskSet.build(threat, image=size, masks=settings.masks)
    greedy: dict[str, Any] = {"tries": settings.tries, "share": settings.greedy}
    if threat.grid == "input":
        return DefenseMasks(visible=torch.from_numpy(masks.visible()).to(device), **greedy)
    length = max(max(w.height, w.width) for mask in masks.masks for w in mask)
    smallest, largest = max(1, round(0.75 * length)), min(round(1.5 * length), min(size))
    return GreedyCutout(2 * threat.count, smallest, largest, inside=True, **greedy)


def _freeze(module: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Freeze weights by prefixes of their names in the innermost network."""
    while isinstance(module, Around):
        module = module.network
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        matching = [weights for name, weights in parameters.items() if f"{name}.".startswith(f"{prefix}.")]
        if not matching:
            layers = ", ".join(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise InputError(f"no layer {prefix!r} to freeze; the network has {layers}")
        for weights in matching:
            weights.requires_grad_(False)


def _divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """KL divergence from the target log-probabilities [N, classes], for each image [N]."""
    return functional.kl_div(logits.log_softmax(1), targets, reduction="none", log_target=True).sum(1)
