"""The fit loop: seeded, resumable after a kill, on one device or several."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.classifiers.fingerprints import module_digest
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.engine.float32 import cudnn_benchmark
from patchcleanser.errors import ClassifierError, MissingDependencyError, TrainingError
from patchcleanser.training.artifacts import Checkpoint, Epoch, EpochLog, OnProgress
from patchcleanser.training.cutout import Cutout, GreedyCutout
from patchcleanser.training.distillation import Teacher
from patchcleanser.training.recipes import Recipe
from patchcleanser.training.selection import Selector, two_mask_views
from patchcleanser.training.several_labels import ScoreSelector
from patchcleanser.training.training_run import TrainingRun, require_inner
from patchcleanser.training.visible_loss import fields_of, visible_places

FORMAT = 2
"""Version of checkpoints; those of another version are refused."""


@dataclass
class FitResult:
    """The module with the selected weights, and the log."""

    module: nn.Module
    history: list[Epoch]
    best: Epoch
    is_main_process: bool
    """Whether this process writes files; of several processes only the first does."""


def fit(
    module: nn.Module,
    data: ArrayDataset,
    recipe: Recipe,
    *,
    preprocessing: Preprocessing,
    out: Path,
    seed: int = 0,
    threat: Threat | None = None,
    teacher: TorchClassifier | None = None,
    on_progress: OnProgress | None = None,
    every: int = 5,
) -> FitResult:
    """Train a module, in place, on labelled images of one size, and return it with the best weights.

    Images are resized and normalised on the device, by the preprocessing and by a teacher's own. Every few epochs the
    averaged weights are scored on held-out images: `survival` is the share that has the right label under a fixed set
    of two-mask views of the threat. We return the last weights within one standard error of the highest survival. The
    test set is never used.

    With the loss `binary` the network learns several labels: `data` are TargetArrays, and `survival` is the mean
    average precision of the worst scores under these views. We return the weights with the highest.

    A run continues from a checkpoint in `out` of the same recipe, seed and data. The checkpoint stays until
    `write_model` has written the weights.
    """
    accelerator = _accelerator(next(module.parameters()).device)
    device, alone = accelerator.device, accelerator.num_processes == 1
    require_inner(module, recipe.loss, accelerator.num_processes)
    _require_learnable(data, recipe, guided=teacher is not None and alone)
    torch.manual_seed(seed)
    permutation = torch.from_numpy(np.random.default_rng(seed).permutation(len(data)))
    held_out, training = permutation.tensor_split([int(recipe.holdout * len(data))])
    pixels, labels = torch.from_numpy(data.images).to(device), torch.from_numpy(data.labels).to(device)
    steps = recipe.epochs * len(training) // recipe.batch if alone else 0
    examples = _floats(pixels[:2]) if recipe.guidance else None
    tutor = None if teacher is None else Teacher(teacher, device, steps=steps, examples=examples)
    run = TrainingRun(
        module, recipe, preprocessing, accelerator, seed=seed, steps=steps, teacher=tutor, examples=examples
    )
    threat = threat or Threat.share(0.024)
    kind = ScoreSelector if recipe.loss == "binary" else Selector
    checkpoint = Checkpoint(out, _key(data, recipe, seed, threat, teacher) | {"criterion": kind.criterion})
    if (state := checkpoint.read(device)) is not None:
        run.restore(state)
        del state  # frees its tensors on the device
    inputs = preprocessing(_floats(pixels[held_out.to(device)]))
    size = inputs.shape[2], inputs.shape[3]
    fields = fields_of(run.module, size)
    if recipe.loss == "visible" and fields is not None:
        run.visible = visible_places(fields, threat, device)
    views = two_mask_views(threat, size, device, fields=fields)
    selector = kind(inputs, labels[held_out.to(device)], views, batch=2000)
    log = EpochLog(out) if accelerator.is_main_process else None
    while len(run.history) < recipe.epochs:
        with cudnn_benchmark(device):
            _epoch(run, pixels, labels, training)
        number = len(run.history)
        if len(held_out) and (number % every == 0 or number == recipe.epochs):
            _select(run, selector)
        if log is not None:
            checkpoint.write(run.state, last=number == recipe.epochs)
            log.add(run.history[-1])
            if on_progress is not None:
                on_progress(number, recipe.epochs, str(run.history[-1]))
    if log is not None:
        log.close(run.history)
    # Without held-out images to select by, the last weights are returned.
    number, weights = run.best or (len(run.history), run.averaged.state_dict())
    run.module.load_state_dict(weights)
    return FitResult(run.module.eval(), run.history, run.history[number - 1], accelerator.is_main_process)


def _require_learnable(data: ArrayDataset, recipe: Recipe, *, guided: bool) -> None:
    """Refuse labels that the loss cannot learn, and feature distillation without a teacher that can guide."""
    if (recipe.loss == "binary") != (data.labels.ndim == 2):
        held = "one label" if data.labels.ndim == 1 else "several labels"
        raise TrainingError(f"{data.name} has {held} for each image, which the loss {recipe.loss!r} cannot learn")
    if recipe.guidance and not guided:
        raise TrainingError(
            "feature distillation (guidance) needs a teacher, and a single process: start it without accelerate launch"
        )


def _key(
    data: ArrayDataset, recipe: Recipe, seed: int, threat: Threat, teacher: TorchClassifier | None
) -> dict[str, Any]:
    """What identifies a run; a checkpoint with another key is refused."""
    return {
        "format": FORMAT,
        "recipe": recipe.fingerprint,
        "seed": seed,
        "data": data.fingerprint,
        "images": len(data),
        "patch": str(threat),
        "teacher": None if teacher is None else module_digest(teacher.module),
    }


def _epoch(run: TrainingRun, pixels: Tensor, labels: Tensor, training: Tensor) -> None:
    """Train on all images whose numbers are in `training`, and log it."""
    recipe, accelerator, started = run.recipe, run.accelerator, time.monotonic()
    run.cutout = cutout = recipe.cutout
    if isinstance(cutout, GreedyCutout) and len(run.history) < recipe.greedy_from * recipe.epochs:
        run.cutout = Cutout(cutout.count, cutout.smallest, cutout.largest, cutout.inside)
    order = torch.from_numpy(run.order.permutation(training.numpy())).to(run.device)  # one copy: each waits for the GPU
    steps = max(1, len(order) // recipe.batch)
    share = max(1, recipe.batch // accelerator.num_processes)
    run.train_mode()
    losses, accuracies = [], []
    for number in range(steps):
        batch = order[number * recipe.batch :][accelerator.process_index * share :][:share]
        run.progress = run.step / (steps * recipe.epochs)
        for group in run.optimizer.param_groups:
            group["lr"] = recipe.rate * rate_at(run.progress, recipe)
        loss, accuracy = run.train_step(_floats(pixels[batch]), labels[batch])
        losses.append(loss)
        accuracies.append(accuracy)
    mean_loss, mean_accuracy = (
        float(accelerator.reduce(torch.stack(values).mean(), "mean")) for values in (losses, accuracies)
    )
    if not math.isfinite(mean_loss):
        raise TrainingError(
            f"the loss became {mean_loss} in epoch {len(run.history) + 1}; lower the rate (now {recipe.rate}) or clip "
            "gradients; the last checkpoint is untouched"
        )
    rate = run.optimizer.param_groups[0]["lr"]
    run.history.append(Epoch(len(run.history) + 1, rate, mean_loss, mean_accuracy, time.monotonic() - started))


def _floats(pixels: Tensor) -> Tensor:
    """Images uint8 [N, H, W, 3] as floats [N, 3, H, W] in [0, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 255


def rate_at(progress: float, recipe: Recipe) -> float:
    """The share of the full learning rate after a share of the steps.

    >>> cosine = Recipe(epochs=1, batch=1, optimizer="sgd", rate=1.0)
    >>> [round(rate_at(p, cosine), 2) for p in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    if recipe.warmup and progress < recipe.warmup:
        return max(progress / recipe.warmup, 0.01)
    if recipe.schedule == "step":
        return float(0.1 ** int(progress * recipe.epochs / recipe.step_epochs))
    decayed = (progress - recipe.warmup) / (1 - recipe.warmup)
    if recipe.schedule == "onecycle":
        return max(1 - decayed, 0.0)
    return 0.5 * (1 + math.cos(math.pi * min(decayed, 1.0)))


def _select(run: TrainingRun, selector: Selector) -> None:
    """Score the averaged weights, without augmentation, and keep them if they are within chance of the best."""
    model = copy.deepcopy(run.averaged).eval()
    with torch.no_grad(), run.autocast():
        clean, survival = (float(scores.float().mean()) for scores in selector(model))
    run.history[-1] = replace(run.history[-1], clean=clean, survival=survival)
    highest = max(epoch.survival for epoch in run.history if epoch.survival is not None)
    if selector.near(survival, highest):  # later ones had a smaller learning rate
        run.best = len(run.history), {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _accelerator(device: torch.device) -> Any:
    """One process, or as many as `accelerate launch` started; precision is set by the recipe."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependencyError.of("accelerate", "train") from error
    return Accelerator(mixed_precision="no", cpu=device.type == "cpu")


def require_classes(network: int | None, data: int) -> None:
    """Refuse a network with another number of classes than the data."""
    if network != data:
        raise ClassifierError(
            f"the network has {network} classes, the data has {data}; write trained:FOLDER?classes={data}, "
            f"net:NAME?classes={data} or timm:NAME?num_classes={data}"
        )
