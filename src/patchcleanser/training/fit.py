"""The fit loop: seeded, resumable after a kill, on one device or several."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from timm.optim import create_optimizer_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.fingerprints import module_digest
from patchcleanser.classifiers.precision import tuned
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.core.files import whole_file
from patchcleanser.core.threats import Threat
from patchcleanser.data.base import ArrayDataset
from patchcleanser.errors import ClassifierError, MissingDependencyError, TrainingError
from patchcleanser.training.augment import augment
from patchcleanser.training.cutout import Cutout, GreedyCutout
from patchcleanser.training.journal import Epoch, draw, open_board, write_log
from patchcleanser.training.judge import Judge, as_good
from patchcleanser.training.losses import interval_loss, margin_loss, pixel_ends, window_loss
from patchcleanser.training.recipes import Recipe
from patchcleanser.training.speed import compiled

INNER = {"window": ("local", "net:bagnet"), "interval": ("behind", "net:interval")}
"""Losses that look into a network: its method for it, and a network that has it."""

CRITERION = "the last within one standard error of the highest survival"

SAVE_SECONDS = 10
"""After the first epoch, and then when an epoch ends this long after the last checkpoint, another is written."""


class Watcher(Protocol):
    """Told of every epoch as it ends."""

    def __call__(self, epoch: Epoch, epochs: int) -> None:
        """One epoch of `epochs` is over."""


@dataclass
class Fitted:
    """The outcome: the module with the best weights, and the log."""

    module: nn.Module
    history: list[Epoch]
    best: Epoch
    main: bool
    """Whether this is the process that writes files; of several, only the first does."""


class _Run:
    """Everything that changes while training, so that it can be saved and taken up again."""

    def __init__(self, module: nn.Module, recipe: Recipe, seed: int, accelerator: Any) -> None:
        self.accelerator, self.recipe, self.device = accelerator, recipe, accelerator.device
        module = module.to(self.device)
        if self.device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        extra = {"momentum": 0.9} if recipe.optimizer == "sgd" else {}
        optimizer = create_optimizer_v2(
            module, opt=recipe.optimizer, lr=recipe.rate, weight_decay=recipe.weight_decay, **extra
        )
        self.module = module
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
        return {
            "module": self.module.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "order": self.order.bit_generator.state,
            "history": [asdict(e) for e in self.history],
            "best": self.best,
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self.module.load_state_dict(state["module"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
        except RuntimeError as error:
            raise TrainingError("the checkpoint is of another architecture; use another --out") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch"].cpu())
        self.order.bit_generator.state = state["order"]
        self.history = [Epoch(**e) for e in state["history"]]
        self.best, self.step = state["best"], state["step"]


def fit(
    module: nn.Module,
    data: ArrayDataset,
    recipe: Recipe,
    *,
    preprocessing: Preprocessing,
    out: Path,
    seed: int = 0,
    threat: Threat | None = None,
    teacher: nn.Module | None = None,
    watch: Watcher | None = None,
    every: int = 5,
) -> Fitted:
    """Train a module, in place, on labelled images of one size, and return it with the best weights.

    Images are resized (and normalised) on the device, as the preprocessing says. The best epoch
    is the one whose averaged weights give most held-out images the right label under every
    one of a fixed set of two-mask views of the threat (`survival`), the last of those within one
    standard error of it; the test set is never looked at. A checkpoint in `out` is taken up if it belongs to the same
    recipe, seed and data, so a killed run goes on where it stopped. It is left in place: whoever
    has written the weights down removes it.
    """
    device = next(module.parameters()).device
    accelerator = _accelerator(device)
    if recipe.loss in INNER:
        _require_inner(module, recipe.loss, accelerator.num_processes)
    torch.manual_seed(seed)
    run = _Run(module, recipe, seed, accelerator)
    threat = threat or Threat.share(0.024)
    key = {
        "recipe": recipe.fingerprint,
        "seed": seed,
        "data": data.fingerprint,
        "images": len(data),
        "patch": str(threat),
        "teacher": None if teacher is None else module_digest(teacher),
        "criterion": CRITERION,
    }
    checkpoint = out / "checkpoint.pt"
    _resume(run, checkpoint, key)
    split = np.random.default_rng(seed).permutation(len(data))
    held, kept = np.split(split, [int(recipe.holdout * len(data))])
    pixels = torch.from_numpy(data.images).to(run.device)
    labels = torch.from_numpy(data.labels).to(run.device)
    judge = Judge(_floats(pixels, held), labels[torch.as_tensor(held, device=run.device)], preprocessing, threat)
    steps = recipe.epochs * len(kept) // recipe.batch if accelerator.num_processes == 1 else 0
    step = _Step(run, preprocessing, teacher, steps)
    saved = time.monotonic()
    board = open_board(out) if accelerator.is_main_process else None
    while len(run.history) < recipe.epochs:
        with tuned(run.device):
            _epoch(run, step, pixels, labels, kept)
        number = len(run.history)
        if number % every == 0 or number == recipe.epochs:
            _judged(run, judge)
        if accelerator.is_main_process:
            if number in (1, recipe.epochs) or time.monotonic() - saved > SAVE_SECONDS:
                _save(run, checkpoint, key)
                saved = time.monotonic()
            if board is not None:
                draw(board, run.history[-1])
            if watch is not None:
                watch(run.history[-1], recipe.epochs)
    if board is not None:
        board.close()
    if run.best is not None:
        run.module.load_state_dict(run.best[1])
    elif run.ema is not None:  # nothing was held out to choose by
        run.module.load_state_dict(run.ema.module.state_dict())
    if accelerator.is_main_process:
        write_log(run.history, out / "metrics.csv")
    best = run.history[run.best[0] - 1] if run.best is not None else run.history[-1]
    return Fitted(run.module.eval(), run.history, best, accelerator.is_main_process)


class _Step:
    """One optimiser step: augment, mask, forward, backward."""

    def __init__(self, run: _Run, preprocessing: Preprocessing, teacher: nn.Module | None, steps: int) -> None:
        self.run, self.preprocessing = run, preprocessing
        self.forward = compiled(run.model, run.device, steps)
        module: Any = run.module
        inner = INNER.get(run.recipe.loss)
        self.inner = compiled(getattr(module, inner[0]), run.device, steps) if inner else None
        self.teacher: Any = None if teacher is None else teacher.to(run.device).eval()
        if self.teacher is not None and run.device.type == "cuda":
            self.teacher = compiled(self.teacher.to(memory_format=torch.channels_last), run.device, steps)
        self.cutout: Cutout = run.recipe.cutout
        self.progress = 0.0

    def losses(self, labels: Tensor) -> Any:
        """Each image's loss under the current weights, for GreedyCutout."""

        def of(inputs: Tensor) -> Tensor:
            with torch.no_grad(), self.run.autocast():
                logits = self.forward(inputs)
            return functional.cross_entropy(logits.float(), labels, reduction="none")

        return of

    def _shown(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Inputs under masks; a mask-aware network is told what is hidden."""
        run = self.run
        if getattr(run.module, "mask_aware", False):
            hidden = self.cutout.hidden(inputs, run.generator)[:, None]
            return torch.cat([inputs.masked_fill(hidden, 0.0), hidden.to(inputs.dtype)], dim=1)
        run.module.eval()  # masks are chosen by the model as it answers in use
        masked = self.cutout(inputs, self.losses(labels), run.generator)
        run.module.train()
        return masked

    @property
    def _strength(self) -> float:
        """How far a loss that begins as plain cross-entropy has become its own, from 0 to 1."""
        ramp = self.run.recipe.ramp
        return min(1.0, self.progress / ramp) if ramp else 1.0

    def _loss(self, shown: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of what is shown, and the logits."""
        recipe = self.run.recipe
        if self.inner is not None:
            with self.run.autocast():
                local = self.inner(shown).float()
            logits = local.mean((2, 3))
            # Clipped logits learn nothing once all are below 0, so at first they are not clipped.
            plain = functional.cross_entropy(logits, labels)
            return torch.lerp(plain, window_loss(local, labels, recipe.window), self._strength), logits
        with self.run.autocast():
            logits = self.forward(shown).float()
        if recipe.loss == "margin":
            return margin_loss(logits, labels, recipe.margin), logits
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing), logits

    def _bounded(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of interval bounds, whose patches and whose share in the whole grow, and the plain logits."""
        logits: Tensor = self.forward(inputs)
        loss = functional.cross_entropy(logits, labels)
        if self.inner is not None and self.cutout.count:
            ends = pixel_ends(self.preprocessing, inputs.shape[1], inputs.device)
            worst = interval_loss(self.inner, inputs, labels, self.cutout, self.run.generator, self._strength, ends)
            loss = torch.lerp(loss, worst, self._strength)
        return loss, logits

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        run, recipe = self.run, self.run.recipe
        images = augment(images, run.generator, shift=recipe.shift, strength=recipe.strength, flip=recipe.flip)
        inputs = self.preprocessing(images)
        if run.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if recipe.loss == "interval":
            loss, logits = self._bounded(inputs, labels)
        else:
            loss, logits = self._loss(self._shown(inputs, labels), labels)
        if self.teacher is not None and recipe.teacher_weight > 0:
            with torch.no_grad(), run.autocast():
                wanted = self.teacher(inputs).float()
            loss = torch.lerp(loss, _divergence(logits, wanted, recipe.temperature), recipe.teacher_weight)
        run.optimizer.zero_grad(set_to_none=True)
        run.accelerator.backward(loss)
        if recipe.clip:
            run.accelerator.clip_grad_norm_(run.model.parameters(), recipe.clip)
        run.optimizer.step()
        if run.ema is not None:
            run.ema.update(run.module, step=run.step)
        return loss.detach(), (logits.argmax(1) == labels).float().mean()


def _divergence(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """KL divergence from the teacher's softened answer, scaled to keep gradients comparable."""
    return temperature**2 * functional.kl_div(
        functional.log_softmax(logits / temperature, 1),
        functional.log_softmax(wanted / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )


def _epoch(run: _Run, step: _Step, pixels: Tensor, labels: Tensor, kept: Any) -> None:
    recipe, accelerator, started = run.recipe, run.accelerator, time.monotonic()
    greedy = isinstance(recipe.cutout, GreedyCutout) and len(run.history) < recipe.greedy_from * recipe.epochs
    step.cutout = Cutout(**_plain(recipe.cutout)) if greedy else recipe.cutout
    order = run.order.permutation(kept)
    steps = max(1, len(order) // recipe.batch)
    share = max(1, recipe.batch // accelerator.num_processes)
    run.module.train()
    losses, rights = [], []
    for number in range(steps):
        mine = order[number * recipe.batch :][accelerator.process_index * share :][:share]
        step.progress = run.step / (steps * recipe.epochs)
        for group in run.optimizer.param_groups:
            group["lr"] = recipe.rate * rate_at(step.progress, recipe)
        loss, right = step(_floats(pixels, mine), labels[torch.as_tensor(mine, device=run.device)])
        losses.append(loss)
        rights.append(right)
        run.step += 1
    mean_loss = float(accelerator.reduce(torch.stack(losses).mean(), "mean"))
    if not math.isfinite(mean_loss):
        raise TrainingError(
            f"the loss became {mean_loss} in epoch {len(run.history) + 1}; lower the rate (now {recipe.rate}) or clip "
            "gradients; the last checkpoint is untouched"
        )
    accuracy = float(accelerator.reduce(torch.stack(rights).mean(), "mean"))
    rate = run.optimizer.param_groups[0]["lr"]
    run.history.append(Epoch(len(run.history) + 1, rate, mean_loss, accuracy, time.monotonic() - started))


def _floats(pixels: Tensor, chosen: Any) -> Tensor:
    """These of the uint8 images [N, H, W, 3], as floats [n, 3, H, W] in [0, 1]."""
    return pixels[torch.as_tensor(chosen, device=pixels.device)].permute(0, 3, 1, 2).float() / 255


def _plain(cutout: Cutout) -> dict[str, Any]:
    return {name: getattr(cutout, name) for name in ("count", "smallest", "largest", "inside")}


def rate_at(progress: float, recipe: Recipe) -> float:
    """The share of the full rate at this share of the training.

    >>> cosine = Recipe(epochs=1, batch=1, optimizer="sgd", rate=1.0)
    >>> [round(rate_at(p, cosine), 2) for p in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    if recipe.warmup and progress < recipe.warmup:
        return max(progress / recipe.warmup, 0.01)
    if recipe.schedule == "step":
        return float(0.1 ** int(progress * recipe.epochs / recipe.step_epochs))
    done = (progress - recipe.warmup) / (1 - recipe.warmup)
    if recipe.schedule == "onecycle":
        return max(1 - done, 0.0)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _judged(run: _Run, judge: Judge) -> None:
    """Score the averaged weights, without any augmentation, and keep them if they are the best so far."""
    model = copy.deepcopy(run.averaged).eval()
    with torch.no_grad(), run.autocast():
        scores = judge(model)
    if scores is None:
        return
    run.history[-1] = replace(run.history[-1], clean=scores[0], survival=scores[1])
    most = max(epoch.survival for epoch in run.history if epoch.survival is not None)
    if as_good(scores[1], most, len(judge.labels)):  # the rate fell since: of equals the last has settled most
        run.best = len(run.history), {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _accelerator(device: torch.device) -> Any:
    """One process, or as many as `accelerate launch` started. Precision is ours to choose."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependencyError.of("accelerate", "train") from error
    return Accelerator(mixed_precision="no", cpu=device.type == "cpu")


def _save(run: _Run, path: Path, key: dict[str, Any]) -> None:
    with whole_file(path) as part:
        torch.save({"key": key, "state": run.state()}, part)


def _resume(run: _Run, path: Path, key: dict[str, Any]) -> None:
    if not path.is_file():
        return
    try:
        saved = torch.load(path, map_location=run.device, weights_only=False)
    except Exception as error:  # a torch.save file can break in as many ways as pickle can
        raise TrainingError(f"the checkpoint {path} is damaged ({error}); delete it to start again") from error
    different = [name for name, value in key.items() if saved.get("key", {}).get(name) != value]
    if different:
        raise TrainingError(f"{path} belongs to another run (other {', '.join(different)}); use another --out")
    run.restore(saved["state"])


def _require_inner(module: nn.Module, loss: str, processes: int) -> None:
    """Refuse a network that a loss cannot look into."""
    method, network = INNER[loss]
    if processes > 1:
        raise TrainingError(f"the loss {loss!r} is trained by one process; start it without accelerate launch")
    if not hasattr(module, method) or (loss == "window" and getattr(module, "votes", False)):
        what = "votes" if hasattr(module, method) else f"has no `{method}`"
        raise TrainingError(f"the loss {loss!r} cannot train {type(module).__name__}, which {what}; use {network}")


def require_classes(found: int | None, wanted: int) -> None:
    """Refuse a network with another number of classes than the data."""
    if found != wanted:
        raise ClassifierError(f"the network has {found} classes, the data has {wanted}; set num_classes={wanted}")
