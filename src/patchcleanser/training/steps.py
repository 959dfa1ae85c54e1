"""One step of training, and everything that changes from step to step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from timm.optim import create_optimizer_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import TrainingError
from patchcleanser.training.augment import augment
from patchcleanser.training.cutout import Cutout, GreedyCutout, shown
from patchcleanser.training.guidance import Guide, Telling
from patchcleanser.training.journal import Epoch
from patchcleanser.training.losses import interval_loss, margin_loss, pixel_ends, window_loss
from patchcleanser.training.recipes import Recipe
from patchcleanser.training.speed import compiled

INNER = {"window": ("local", "net:bagnet"), "interval": ("behind", "net:interval")}
"""Losses that look into a network: its method for it, and a network that has it."""


class Run:
    """Everything that changes while training, so that it can be saved and taken up again."""

    def __init__(
        self, module: nn.Module, recipe: Recipe, seed: int, accelerator: Any, guide: Guide | None = None
    ) -> None:
        self.accelerator, self.recipe, self.device = accelerator, recipe, accelerator.device
        module = module.to(self.device)
        if self.device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        optimizer = _optimizer(module, recipe)
        if guide is not None:
            optimizer.add_param_group({"params": list(guide.to(self.device).parameters()), "weight_decay": 0.0})
        self.module, self.guide = module, guide
        self.ema = ModelEmaV3(module, decay=recipe.ema, use_warmup=True, warmup_power=0.8) if recipe.ema else None
        self.model, self.optimizer = accelerator.prepare(module, optimizer)
        self.generator = torch.Generator(self.device).manual_seed(seed * 1000 + accelerator.process_index)
        self.order = np.random.default_rng(seed)  # the same permutation in every process
        self.history: list[Epoch] = []
        self.best: tuple[int, dict[str, Tensor]] | None = None
        """The epoch whose weights are kept, and these."""
        self.step = 0

    @property
    def averaged(self) -> nn.Module:
        """The weights to evaluate and keep."""
        kept: nn.Module = self.ema.module if self.ema is not None else self.module
        return kept

    def autocast(self) -> torch.autocast:
        """Bfloat16 where the recipe wants it and the device is made for it."""
        use = self.recipe.precision == "bf16" and self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=use)

    def state(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        return {
            "module": self.module.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "guide": None if self.guide is None else self.guide.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "order": self.order.bit_generator.state,
            "history": [asdict(e) for e in self.history],
            "best": self.best,
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """As a checkpoint has it."""
        try:
            self.module.load_state_dict(state["module"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            if self.guide is not None:
                self.guide.load_state_dict(state["guide"])
        except RuntimeError as error:
            raise TrainingError("the checkpoint is of another architecture; use another --out") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch"].cpu())
        self.order.bit_generator.state = state["order"]
        self.history = [Epoch(**e) for e in state["history"]]
        self.best, self.step = state["best"], state["step"]


class Step:
    """One optimiser step: augment, mask, forward, backward."""

    def __init__(
        self, run: Run, preprocessing: Preprocessing, steps: int, teacher: Teacher | None, telling: Telling | None
    ) -> None:
        self.run, self.preprocessing, self.teacher = run, preprocessing, teacher
        self.forward = compiled(run.model, run.device, steps)
        self.telling = None if telling is None else compiled(telling, run.device, steps)
        module: Any = run.module
        inner = INNER.get(run.recipe.loss)
        self.inner = compiled(getattr(module, inner[0]), run.device, steps) if inner else None
        self.cutout: Cutout = run.recipe.cutout
        self.progress = 0.0

    def losses(self, inputs: Tensor, labels: Tensor) -> Any:
        """Each image's loss under masks and the current weights, for GreedyCutout."""

        def of(hidden: Tensor) -> Tensor:
            with torch.no_grad(), self.run.autocast():
                logits = self.forward(shown(self.run.module, inputs, hidden))
            return functional.cross_entropy(logits.float(), labels, reduction="none")

        return of

    def _shown(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Inputs under masks; a mask-aware network is told what is hidden."""
        run = self.run
        asks = isinstance(self.cutout, GreedyCutout)
        if asks:
            run.module.eval()  # masks are chosen by the model as it answers in use
        hidden = self.cutout.chosen(inputs, self.losses(inputs, labels), run.generator)
        if asks:
            run.module.train()
        return shown(run.module, inputs, hidden)

    @property
    def _strength(self) -> float:
        """How far a loss that begins as plain cross-entropy has become its own, from 0 to 1."""
        ramp = self.run.recipe.ramp
        return min(1.0, self.progress / ramp) if ramp else 1.0

    def _loss(self, given: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss of what is shown, the logits, and feature maps if they are guided."""
        recipe = self.run.recipe
        if self.inner is not None:
            with self.run.autocast():
                local = self.inner(given).float()
            logits: Tensor = local.mean((2, 3))
            # Clipped logits learn nothing once all are below 0, so at first they are not clipped.
            plain = functional.cross_entropy(logits, labels)
            return torch.lerp(plain, window_loss(local, labels, recipe.window), self._strength), logits, []
        with self.run.autocast():
            logits, maps = (self.forward(given), []) if self.telling is None else self.telling(given)
        logits = logits.float()
        if recipe.loss == "margin":
            return margin_loss(logits, labels, recipe.margin), logits, maps
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing), logits, maps

    def _bounded(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of interval bounds, whose patches and whose share in the whole grow, and the plain logits."""
        logits: Tensor = self.forward(inputs)
        loss = functional.cross_entropy(logits, labels)
        if self.inner is not None and self.cutout.count:
            ends = pixel_ends(self.preprocessing, inputs.shape[1], inputs.device)
            worst = interval_loss(self.inner, inputs, labels, self.cutout, self.run.generator, self._strength, ends)
            loss = torch.lerp(loss, worst, self._strength)
        return loss, logits

    def _taught(self, teacher: Teacher, loss: Tensor, logits: Tensor, maps: list[Tensor], images: Tensor) -> Tensor:
        """The loss, and what a teacher has to say about the unmasked images."""
        run, recipe = self.run, self.run.recipe
        with torch.no_grad(), run.autocast():
            wanted, there = teacher(images)
        loss = torch.lerp(loss, _divergence(logits, wanted.float(), recipe.temperature), recipe.teacher_weight)
        if run.guide is not None:
            with run.autocast():
                loss = loss + recipe.guidance * run.guide(maps, there)
        return loss

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss on images [N, 3, H, W] in [0, 1], and the share of right answers."""
        run, recipe = self.run, self.run.recipe
        images = augment(images, run.generator, shift=recipe.shift, strength=recipe.strength, flip=recipe.flip)
        inputs = self.preprocessing(images)
        if run.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        if recipe.loss == "interval":
            loss, logits = self._bounded(inputs, labels)
        else:
            loss, logits, maps = self._loss(self._shown(inputs, labels), labels)
        if self.teacher is not None:
            loss = self._taught(self.teacher, loss, logits, maps, images)
        run.optimizer.zero_grad(set_to_none=True)
        run.accelerator.backward(loss)
        if recipe.clip:
            run.accelerator.clip_grad_norm_(run.model.parameters(), recipe.clip)
        run.optimizer.step()
        if run.ema is not None:
            run.ema.update(run.module, step=run.step)
        return loss.detach(), (logits.argmax(1) == labels).float().mean()


class Teacher:
    """A network to learn from, which sees images at its own size and in its own colours."""

    def __init__(self, classifier: TorchClassifier, device: torch.device) -> None:
        self.preprocessing, self.device = classifier.preprocessing.uncropped, device
        self.module = classifier.module.to(device).eval()
        self.forward: Any = self.module
        self.tells = False
        if device.type == "cuda":
            self.module.to(memory_format=torch.channels_last)

    def telling(self, images: Tensor) -> Telling:
        """From now on it shows its feature maps, too; `images` are some to try it with."""
        told = Telling(self.module, self._inputs(images), within=1.0)
        self.forward, self.tells = told, True
        return told

    def compile(self, steps: int) -> None:
        """For so many steps, if that pays; compiled, a network does not say what it must be told."""
        self.forward = compiled(self.forward, self.device, steps)

    def __call__(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of images in [0, 1], and feature maps if it tells them."""
        told = self.forward(self._inputs(images))
        return told if self.tells else (told, [])

    def _inputs(self, images: Tensor) -> Tensor:
        inputs = shown(self.module, self.preprocessing(images))
        return inputs.contiguous(memory_format=torch.channels_last) if inputs.is_cuda else inputs


def _optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    more = {"momentum": 0.95, "nesterov": True} if recipe.optimizer == "muon" else {}  # for SGD, a momentum of 0.9
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            module, opt=recipe.optimizer, lr=recipe.rate, weight_decay=recipe.weight_decay, **more
        )
    except (AssertionError, ValueError) as error:
        raise TrainingError(f"this timm has no {recipe.optimizer} ({error}); install timm 1.0.23 or later") from error
    return optimizer


def _divergence(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """KL divergence from the teacher's softened answer, scaled to keep gradients comparable."""
    return temperature**2 * functional.kl_div(
        functional.log_softmax(logits / temperature, 1),
        functional.log_softmax(wanted / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )


def require_inner(module: nn.Module, loss: str, processes: int) -> None:
    """Refuse a network that a loss cannot look into."""
    if loss not in INNER:
        return
    method, network = INNER[loss]
    if processes > 1:
        raise TrainingError(f"the loss {loss!r} is trained by one process; start it without accelerate launch")
    if not hasattr(module, method) or (loss == "window" and getattr(module, "votes", False)):
        what = "votes" if hasattr(module, method) else f"has no `{method}`"
        raise TrainingError(f"the loss {loss!r} cannot train {type(module).__name__}, which {what}; use {network}")
