"""A network in training: one optimiser step, its losses, and all that changes from step to step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import TrainingError
from patchcleanser.networks.interval import boxes
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling
from patchcleanser.training.artifacts import Epoch
from patchcleanser.training.augment import augment
from patchcleanser.training.cutout import Cutout, GreedyCutout, masked_inputs
from patchcleanser.training.distillation import FeatureProjector, FeatureTap, Teacher
from patchcleanser.training.recipes import Recipe
from patchcleanser.training.several_labels import binary_losses, top_class_is_shown
from patchcleanser.training.training_state import TrainingState, bfloat16, compile_for
from patchcleanser.training.visible_loss import visible_weights, worst_logits, worst_of

INNER = {
    "window": ("local", "net:bagnet"),
    "interval": ("behind", "net:interval"),
    "visible": ("local", "visible:net:bagnet"),
}
"""Losses that need more than logits: the network's method they call, and a network that has it.

Of a network with a head, the loss for one pass calls `features` instead.
"""


class TrainingRun(TrainingState):
    """A network, its optimiser and its random generators. It is compiled if `steps` steps are enough for that.

    With feature distillation, `examples` are a few images to try the network with.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        preprocessing: Preprocessing,
        accelerator: Any,
        *,
        seed: int,
        steps: int,
        teacher: Teacher | None,
        examples: Tensor | None,
    ) -> None:
        self.recipe, self.preprocessing, self.teacher = recipe, preprocessing, teacher
        self.accelerator = accelerator
        module.to(accelerator.device)
        if accelerator.device.type == "cuda":
            module.to(memory_format=torch.channels_last)
        generator = torch.Generator(accelerator.device).manual_seed(seed * 1000 + accelerator.process_index)
        super().__init__(module, generator, seed=seed, decay=recipe.ema or None)
        optimizer = _optimizer(module, recipe)
        self.tap = self.projector = None
        if examples is not None and teacher is not None and teacher.tap is not None:
            tap = FeatureTap(module, masked_inputs(module, preprocessing(examples)), depth=2 / 3)
            self.tap = compile_for(steps, tap, self.device)
            self.projector = FeatureProjector(tap.channels, teacher.tap.channels).to(self.device)
            optimizer.add_param_group({"params": list(self.projector.parameters()), "weight_decay": 0.0})
        self.model, self.optimizer = accelerator.prepare(module, optimizer)
        self.forward = compile_for(steps, self.model, self.device)
        self.inner: Any = None
        if recipe.loss in INNER:
            method = "features" if isinstance(module, VisibleFeatures) else INNER[recipe.loss][0]
            self.inner = compile_for(steps, getattr(module, method), self.device)
        self.head: Any = compile_for(steps, module.head, self.device) if isinstance(module, VisibleFeatures) else None
        self.visible: Tensor | None = None
        """Of a network for one pass, what it sees under each pair of masks (visible_places in visible_loss.py)."""
        self.cutout: Cutout = recipe.cutout
        self.history: list[Epoch] = []
        self.best: tuple[int, dict[str, Tensor]] | None = None
        """The selected epoch and its weights."""
        self.progress = 0.0
        """The share of all steps that is over."""

    def autocast(self) -> torch.autocast:
        """Bfloat16 where the recipe asks for it and the device is CUDA."""
        return bfloat16(self.device, enabled=self.recipe.precision == "bf16")

    def train_mode(self) -> None:
        """Put the module into training mode, except batch norms that the recipe freezes."""
        self.module.train()
        if self.recipe.frozen_norms:
            for layer in self.module.modules():
                layer.training &= not isinstance(layer, nn.BatchNorm2d)

    def parts(self) -> dict[str, Any]:
        return super().parts() | ({} if self.projector is None else {"projector": self.projector})

    def state(self) -> dict[str, Any]:
        history = [asdict(epoch) for epoch in self.history]
        return {**super().state(), "torch": torch.get_rng_state(), "history": history, "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        torch.set_rng_state(state["torch"].cpu())
        self.history = [Epoch(**values) for values in state["history"]]
        self.best = state["best"]

    def train_step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Train on images [N, 3, H, W] in [0, 1]; return the loss and the share of right labels."""
        recipe = self.recipe
        images = augment(images, self.generator, shift=recipe.shift, strength=recipe.strength, flip=recipe.flip)
        inputs = self.preprocessing(images)
        if self.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        if recipe.loss == "interval":
            loss, logits = self._interval_loss(inputs, labels)
        elif self.visible is not None:
            logits = (self._pooled_logits if self.head is None else self._head_logits)(inputs, labels, self.visible)
            loss = functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        elif recipe.loss == "window":
            loss, logits = self._window_loss(self._masked(inputs, labels), labels)
        else:
            loss, logits, maps = self._logit_loss(self._masked(inputs, labels), labels)
        if self.teacher is not None:
            loss = self._add_distillation(self.teacher, loss, logits, maps, images)
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        if recipe.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.module, step=self.step)
        self.step += 1
        right = top_class_is_shown(logits, labels) if recipe.loss == "binary" else logits.argmax(1) == labels
        return loss.detach(), right.float().mean()

    def _masked(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Inputs under the masks of the cutout; greedy ones are chosen by the model in evaluation mode."""

        def losses(hidden: Tensor) -> Tensor:
            with torch.no_grad(), self.autocast():
                logits = self.forward(masked_inputs(self.module, inputs, hidden))
            if self.recipe.loss == "binary":
                return binary_losses(logits.float(), labels)
            return functional.cross_entropy(logits.float(), labels, reduction="none")

        if isinstance(self.cutout, GreedyCutout):
            self.module.eval()
        hidden = self.cutout.choose(inputs, losses, self.generator)
        self.train_mode()
        return masked_inputs(self.module, inputs, hidden)

    def _logit_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss of the logits, the logits, and the feature maps to distill."""
        with self.autocast():
            logits, maps = (self.forward(inputs), []) if self.tap is None else self.tap(inputs)
        logits = logits.float()
        if self.recipe.loss == "margin":
            return margin_loss(logits, labels, self.recipe.margin), logits, maps
        if self.recipe.loss == "binary":
            return binary_losses(logits, labels).mean(), logits, maps
        return functional.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing), logits, maps

    @property
    def _strength(self) -> float:
        """How far plain cross-entropy has given way to the recipe's loss, from 0 to 1."""
        return min(1.0, self.progress / self.recipe.ramp) if self.recipe.ramp else 1.0

    def _window_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """PatchGuard's loss and the logits. Clipped logits get no gradient once all are below 0, hence the ramp."""
        with self.autocast():
            local = self.inner(inputs).float()
        logits: Tensor = local.mean((2, 3))
        windows = window_loss(local, labels, self.recipe.window)
        return torch.lerp(functional.cross_entropy(logits, labels), windows, self._strength), logits

    def _drawn(self, labels: Tensor) -> Tensor:
        """Which images are trained under masks, bool [N]: a share that grows with the ramp."""
        draw = torch.rand(len(labels), generator=self.generator, device=labels.device)
        return draw < self.recipe.worst * self._strength

    def _pooled_logits(self, inputs: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        """The means of visible local logits; of a share of the images, under their worst pair of masks."""
        with self.autocast():
            local = self.inner(inputs).float()
        return worst_logits(local, labels, visible_weights(places), self._drawn(labels))

    def _head_logits(self, inputs: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        """What the head says of visible features; of a share of the images, under the worst of a few pairs of masks.

        The head is in evaluation mode while pairs are tried.
        """
        with self.autocast():
            features = self.inner(inputs)

        def losses(union: Tensor) -> Tensor:
            with self.autocast():
                logits = self.head(features.detach(), places[union])
            return functional.cross_entropy(logits.float(), labels, reduction="none")

        last = torch.full_like(labels, len(places) - 1)
        self.module.eval()
        worst = worst_of(self.recipe.pairs, len(places) - 1, losses, labels, self.generator)
        self.train_mode()
        union = torch.where(self._drawn(labels), worst, last)
        with self.autocast():
            logits: Tensor = self.head(features, places[union])
        return logits.float()

    def _interval_loss(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the worst logits under a patch (interval bound propagation), and the plain logits.

        The cutout draws its count of random patches for each image, and the worst of them counts. Pixels of a patch
        range from themselves towards the darkest and the brightest value; how far, and the weight of the bounds,
        grows with the ramp.
        """
        logits: Tensor = self.forward(inputs)
        loss = functional.cross_entropy(logits, labels)
        number, channels, height, width = inputs.shape
        count = self.cutout.count
        if not count:
            return loss, logits
        # All patches of all images in one pass: a small network spends its time launching kernels.
        repeated = inputs.repeat(count, 1, 1, 1)
        hidden = self.cutout.random_masks(len(repeated), (height, width), self.generator, inputs.device)
        ends = self.preprocessing.normalise(torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).repeat(1, channels, 1, 1))
        limits = boxes(repeated, hidden, *ends[:, :, 0, 0].to(inputs.device))
        low, high = (torch.lerp(repeated, limit, self._strength) for limit in limits)
        worst = self.inner(low, high, labels.repeat(count)).reshape(count, number, -1).amax(0)
        return torch.lerp(loss, functional.cross_entropy(worst, labels), self._strength), logits

    def _add_distillation(
        self, teacher: Teacher, loss: Tensor, logits: Tensor, maps: list[Tensor], images: Tensor
    ) -> Tensor:
        """Add the distances from the teacher's logits and feature maps of the unmasked images."""
        recipe = self.recipe
        with torch.no_grad(), self.autocast():
            teacher_logits, teacher_maps = teacher(images)
        divergence = functional.kl_div(
            functional.log_softmax(logits / recipe.temperature, 1),
            functional.log_softmax(teacher_logits.float() / recipe.temperature, 1),
            reduction="batchmean",
            log_target=True,
        )
        # The squared temperature makes gradients comparable (Hinton et al., 2015).
        loss = torch.lerp(loss, recipe.temperature**2 * divergence, recipe.teacher_weight)
        if self.projector is not None:
            with self.autocast():
                loss = loss + recipe.guidance * self.projector(maps, teacher_maps)
        return loss


def margin_loss(shares: Tensor, labels: Tensor, margin: float) -> Tensor:
    """How far each class's share of votes [N, classes] comes within `margin` of the true one's, or beyond (BagCert).

    >>> round(margin_loss(torch.tensor([[0.9, 0.1], [0.5, 0.4]]), torch.tensor([0, 0]), 0.3).item(), 3)
    0.1
    """
    behind = margin + shares - shares.gather(1, labels[:, None])
    return behind.scatter(1, labels[:, None], 0.0).clamp_min(0.0).sum(1).mean()


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
    if loss == "visible" and isinstance(module, VisibleFeatures):
        return
    pools = loss != "visible" or isinstance(module, VisiblePooling)
    if not hasattr(module, method) or not pools or (loss == "window" and getattr(module, "votes", False)):
        reason = f"has no `{method}`"
        if hasattr(module, method):
            reason = "votes" if pools else "does not pool what is visible"
        raise TrainingError(f"the loss {loss!r} cannot train {type(module).__name__}, which {reason}; use {network}")
