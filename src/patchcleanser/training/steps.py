"""One step of training, its losses, and the state that changes from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import TrainingError
from patchcleanser.networks.interval import boxes
from patchcleanser.training.acceleration import bfloat16, compile_for, moving_average
from patchcleanser.training.artifacts import Epoch
from patchcleanser.training.augment import augment
from patchcleanser.training.cutout import Cutout, GreedyCutout, masked_inputs
from patchcleanser.training.distillation import FeatureProjector, FeatureTap, Teacher
from patchcleanser.training.recipes import Recipe

INNER = {"window": ("local", "net:bagnet"), "interval": ("behind", "net:interval")}
"""Losses that need more than logits: the network's method they call, and a network that has it."""


class TrainingRun:
    """Everything that changes while training, so that it can be saved and restored."""

    def __init__(
        self, module: nn.Module, recipe: Recipe, seed: int, accelerator: Any, projector: FeatureProjector | None = None
    ) -> None:
        self.accelerator, self.recipe, self.device = accelerator, recipe, accelerator.device
        module = module.to(self.device)
        if self.device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        optimizer = _optimizer(module, recipe)
        if projector is not None:
            optimizer.add_param_group({"params": list(projector.to(self.device).parameters()), "weight_decay": 0.0})
        self.module, self.projector = module, projector
        self.ema = moving_average(module, recipe.ema) if recipe.ema else None
        self.model, self.optimizer = accelerator.prepare(module, optimizer)
        self.generator = torch.Generator(self.device).manual_seed(seed * 1000 + accelerator.process_index)
        self.order = np.random.default_rng(seed)  # the same permutation in every process
        self.history: list[Epoch] = []
        self.best: tuple[int, dict[str, Tensor]] | None = None
        """The selected epoch and its weights."""
        self.step = 0

    @property
    def averaged(self) -> nn.Module:
        """The module with the weights to evaluate and return."""
        averaged: nn.Module = self.ema.module if self.ema is not None else self.module
        return averaged

    def autocast(self) -> torch.autocast:
        """Bfloat16 where the recipe asks for it and the device is CUDA."""
        return bfloat16(self.device, enabled=self.recipe.precision == "bf16")

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {
            "module": self.module.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "projector": None if self.projector is None else self.projector.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "order": self.order.bit_generator.state,
            "history": [asdict(epoch) for epoch in self.history],
            "best": self.best,
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        try:
            self.module.load_state_dict(state["module"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            if self.projector is not None:
                self.projector.load_state_dict(state["projector"])
        except RuntimeError as error:
            raise TrainingError("the checkpoint is of another architecture; use another --out") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch"].cpu())
        self.order.bit_generator.state = state["order"]
        self.history = [Epoch(**values) for values in state["history"]]
        self.best, self.step = state["best"], state["step"]


class Step:
    """One optimiser step: augment, mask, forward, backward. `steps` is how many there will be."""

    def __init__(
        self,
        run: TrainingRun,
        preprocessing: Preprocessing,
        steps: int,
        teacher: Teacher | None,
        tap: FeatureTap | None,
    ) -> None:
        self.run, self.preprocessing, self.teacher = run, preprocessing, teacher
        self.forward = compile_for(steps, run.model, run.device)
        self.tap = None if tap is None else compile_for(steps, tap, run.device)
        self.inner: Any = None
        if run.recipe.loss in INNER:
            self.inner = compile_for(steps, getattr(run.module, INNER[run.recipe.loss][0]), run.device)
        self.cutout: Cutout = run.recipe.cutout
        self.progress = 0.0
        """The share of all steps that is over."""

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Train on images [N, 3, H, W] in [0, 1]; return the loss and the share of right labels."""
        run, recipe = self.run, self.run.recipe
        images = augment(images, run.generator, shift=recipe.shift, strength=recipe.strength, flip=recipe.flip)
        inputs = self.preprocessing(images)
        if run.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        if recipe.loss == "interval":
            loss, logits = self._interval_loss(inputs, labels)
        elif recipe.loss == "window":
            loss, logits = self._window_loss(self._masked(inputs, labels), labels)
        else:
            loss, logits, maps = self._logit_loss(self._masked(inputs, labels), labels)
        if self.teacher is not None:
            loss = self._add_distillation(self.teacher, loss, logits, maps, images)
        run.optimizer.zero_grad(set_to_none=True)
        run.accelerator.backward(loss)
        if recipe.clip:
            run.accelerator.clip_grad_norm_(run.model.parameters(), recipe.clip)
        run.optimizer.step()
        if run.ema is not None:
            run.ema.update(run.module, step=run.step)
        return loss.detach(), (logits.argmax(1) == labels).float().mean()

    def _masked(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Inputs under the masks of the cutout; greedy ones are chosen by the model in evaluation mode."""
        module = self.run.module

        def losses(hidden: Tensor) -> Tensor:
            with torch.no_grad(), self.run.autocast():
                logits = self.forward(masked_inputs(module, inputs, hidden))
            return functional.cross_entropy(logits.float(), labels, reduction="none")

        module.train(not isinstance(self.cutout, GreedyCutout))
        hidden = self.cutout.choose(inputs, losses, self.run.generator)
        module.train()
        return masked_inputs(module, inputs, hidden)

    def _logit_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss of the logits, the logits, and the feature maps to distill."""
        recipe = self.run.recipe
        with self.run.autocast():
            logits, maps = (self.forward(inputs), []) if self.tap is None else self.tap(inputs)
        logits = logits.float()
        if recipe.loss == "margin":
            return margin_loss(logits, labels, recipe.margin), logits, maps
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing), logits, maps

    @property
    def _strength(self) -> float:
        """How far plain cross-entropy has given way to the recipe's loss, from 0 to 1."""
        ramp = self.run.recipe.ramp
        return min(1.0, self.progress / ramp) if ramp else 1.0

    def _window_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """PatchGuard's loss and the logits. Clipped logits get no gradient once all are below 0, hence the ramp."""
        with self.run.autocast():
            local = self.inner(inputs).float()
        logits: Tensor = local.mean((2, 3))
        windows = window_loss(local, labels, self.run.recipe.window)
        return torch.lerp(functional.cross_entropy(logits, labels), windows, self._strength), logits

    def _interval_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of interval bounds, whose size and whose weight grow with the ramp, and the plain logits."""
        logits: Tensor = self.forward(inputs)
        loss = functional.cross_entropy(logits, labels)
        if self.cutout.count:
            ends = torch.stack([torch.zeros(inputs.shape[1], 1, 1), torch.ones(inputs.shape[1], 1, 1)])
            ends = self.preprocessing.normalise(ends)[:, :, 0, 0].to(inputs.device)
            worst = interval_loss(self.inner, inputs, labels, self.cutout, self.run.generator, self._strength, ends)
            loss = torch.lerp(loss, worst, self._strength)
        return loss, logits

    def _add_distillation(
        self, teacher: Teacher, loss: Tensor, logits: Tensor, maps: list[Tensor], images: Tensor
    ) -> Tensor:
        """Add the distances from the teacher's logits and feature maps of the unmasked images."""
        run, recipe = self.run, self.run.recipe
        with torch.no_grad(), run.autocast():
            teacher_logits, teacher_maps = teacher(images)
        # Scaled by the squared temperature, so that gradients do not depend on it (Hinton et al., 2015).
        divergence = recipe.temperature**2 * functional.kl_div(
            functional.log_softmax(logits / recipe.temperature, 1),
            functional.log_softmax(teacher_logits.float() / recipe.temperature, 1),
            reduction="batchmean",
            log_target=True,
        )
        loss = torch.lerp(loss, divergence, recipe.teacher_weight)
        if run.projector is not None:
            with run.autocast():
                loss = loss + recipe.guidance * run.projector(maps, teacher_maps)
        return loss


def margin_loss(shares: Tensor, labels: Tensor, margin: float) -> Tensor:
    """How far each class's share of votes [N, classes] comes within `margin` of the true one's, or beyond (BagCert).

    >>> round(margin_loss(torch.tensor([[0.9, 0.1], [0.5, 0.4]]), torch.tensor([0, 0]), 0.3).item(), 3)
    0.1
    """
    behind = margin + shares - shares.gather(1, labels[:, None])
    behind = behind.scatter(1, labels[:, None], 0.0).clamp_min(0.0)
    return behind.sum(1).mean()


def window_loss(local: Tensor, labels: Tensor, window: int) -> Tensor:
    """Cross-entropy of local logits [N, classes, down, across] without the true class's best window (PatchGuard).

    Logits are clipped to at least 0 and averaged, as in robust masking. The true class loses the `window`×`window`
    local logits with the largest sum; other classes lose nothing.

    >>> true_class = torch.tensor([[8.0, 0.0], [0.0, 0.0]])
    >>> local = torch.stack([true_class, torch.ones(2, 2)])[None]
    >>> round(window_loss(local, torch.tensor([0]), 1).item(), 3)  # logits 0 and 1 are left
    1.313
    """
    clipped = local.clamp_min(0.0)
    places = clipped.shape[2] * clipped.shape[3]
    true = clipped[torch.arange(len(labels), device=local.device), labels]
    height, width = (min(window, side) for side in true.shape[1:])
    best = functional.avg_pool2d(true[:, None], (height, width), stride=1).amax((1, 2, 3)) * height * width / places
    logits = clipped.mean((2, 3))
    return functional.cross_entropy(logits.scatter_add(1, labels[:, None], -best[:, None]), labels)


def interval_loss(
    behind: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
    patches: Cutout,
    generator: torch.Generator,
    strength: float,
    ends: Tensor,
) -> Tensor:
    """Cross-entropy of the worst logits under a patch at random places (interval bound propagation).

    `behind` bounds from above by how much each class exceeds the label, as IntervalNet's method does. `patches` draws
    its count of places for each image, and the worst of them counts. Pixels of a patch range from themselves to the
    smallest and largest values `ends` [2, C] of a pixel, by a `strength` from 0 to 1.
    """
    number, _, height, width = inputs.shape
    # All places of all images in one pass: a small network spends its time launching kernels.
    repeated = inputs.repeat(patches.count, 1, 1, 1)
    hidden = patches.random_masks(len(repeated), (height, width), generator, inputs.device)
    low, high = (torch.lerp(repeated, end, strength) for end in boxes(repeated, hidden, *ends))
    worst = behind(low, high, labels.repeat(patches.count)).reshape(patches.count, number, -1).amax(0)
    return functional.cross_entropy(worst, labels)


def _optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    options = {"momentum": 0.95, "nesterov": True} if recipe.optimizer == "muon" else {}  # SGD: timm's momentum of 0.9
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            module, opt=recipe.optimizer, lr=recipe.rate, weight_decay=recipe.weight_decay, **options
        )
    except (AssertionError, ValueError) as error:
        raise TrainingError(f"this timm has no {recipe.optimizer} ({error}); install timm 1.0.23 or later") from error
    return optimizer


def require_inner(module: nn.Module, loss: str, processes: int) -> None:
    """Refuse a network without the method that a loss calls."""
    if loss not in INNER:
        return
    method, network = INNER[loss]
    if processes > 1:
        raise TrainingError(f"the loss {loss!r} works in one process only; start it without accelerate launch")
    if not hasattr(module, method) or (loss == "window" and getattr(module, "votes", False)):
        reason = "votes" if hasattr(module, method) else f"has no `{method}`"
        raise TrainingError(f"the loss {loss!r} cannot train {type(module).__name__}, which {reason}; use {network}")
