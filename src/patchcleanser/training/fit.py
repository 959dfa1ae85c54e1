"""The fit loop: seeded, resumable after a kill, on one device or several."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcleanser.classifiers.fingerprints import module_digest
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.engine.float32 import cudnn_benchmark
from patchcleanser.errors import ClassifierError, MissingDependencyError, TrainingError
from patchcleanser.training.checkpoints import Checkpoint
from patchcleanser.training.cutout import Cutout, GreedyCutout, shown
from patchcleanser.training.guidance import Guide, Telling
from patchcleanser.training.journal import Epoch, draw, open_board, write_log
from patchcleanser.training.judge import Judge, as_good
from patchcleanser.training.recipes import Recipe
from patchcleanser.training.steps import Run, Step, Teacher, require_inner

CRITERION = "the last within one standard error of the highest survival"


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
    on_progress: Watcher | None = None,
    every: int = 5,
) -> Fitted:
    """Train a module, in place, on labelled images of one size, and return it with the best weights.

    Images are resized (and normalised) on the device, as the preprocessing says, and a teacher's own. The best epoch
    is the one whose averaged weights give most held-out images the right label under every
    one of a fixed set of two-mask views of the threat (`survival`), the last of those within one
    standard error of it; the test set is never looked at. A checkpoint in `out` is taken up if it belongs to the same
    recipe, seed and data, so a killed run goes on where it stopped. It is left in place until
    `write_model` has written the weights down.
    """
    device = next(module.parameters()).device
    accelerator = _accelerator(device)
    require_inner(module, recipe.loss, accelerator.num_processes)
    torch.manual_seed(seed)
    asked = None if teacher is None else Teacher(teacher, accelerator.device)
    telling = guide = None
    if recipe.guidance:
        if asked is None or accelerator.num_processes > 1:
            raise TrainingError("guidance needs a teacher, and one process: start it without accelerate launch")
        telling, guide = _guided(module.to(accelerator.device), asked, data.images[:2], preprocessing)
    run = Run(module, recipe, seed, accelerator, guide)
    threat = threat or Threat.share(0.024)
    checkpoint = Checkpoint(out, _key(data, recipe, seed, threat, teacher))
    if (state := checkpoint.read(run.device)) is not None:
        run.restore(state)
        del state  # or its tensors would stay on the device
    split = np.random.default_rng(seed).permutation(len(data))
    held, kept = np.split(split, [int(recipe.holdout * len(data))])
    pixels = torch.from_numpy(data.images).to(run.device)
    labels = torch.from_numpy(data.labels).to(run.device)
    judge = Judge(_floats(pixels, held), labels[torch.as_tensor(held, device=run.device)], preprocessing, threat)
    steps = recipe.epochs * len(kept) // recipe.batch if accelerator.num_processes == 1 else 0
    if asked is not None:
        asked.compile(steps)
    step = Step(run, preprocessing, steps, asked, telling)
    board = open_board(out) if accelerator.is_main_process else None
    while len(run.history) < recipe.epochs:
        with cudnn_benchmark(run.device):
            _epoch(run, step, pixels, labels, kept)
        number = len(run.history)
        if number % every == 0 or number == recipe.epochs:
            _judged(run, judge)
        if accelerator.is_main_process:
            checkpoint.write(run.state, last=number == recipe.epochs)
            if board is not None:
                draw(board, run.history[-1])
            if on_progress is not None:
                on_progress(run.history[-1], recipe.epochs)
    if board is not None:
        board.close()
    if accelerator.is_main_process:
        write_log(run.history, out / "metrics.csv")
    return _fitted(run)


def _key(
    data: ArrayDataset, recipe: Recipe, seed: int, threat: Threat, teacher: TorchClassifier | None
) -> dict[str, Any]:
    """What a checkpoint must agree in to be taken up."""
    return {
        "recipe": recipe.fingerprint,
        "seed": seed,
        "data": data.fingerprint,
        "images": len(data),
        "patch": str(threat),
        "teacher": None if teacher is None else module_digest(teacher.module),
        "criterion": CRITERION,
    }


def _fitted(run: Run) -> Fitted:
    """The module with the best weights, or the last ones if nothing was held out to choose by."""
    if run.best is not None:
        run.module.load_state_dict(run.best[1])
    elif run.ema is not None:
        run.module.load_state_dict(run.ema.module.state_dict())
    best = run.history[run.best[0] - 1] if run.best is not None else run.history[-1]
    return Fitted(run.module.eval(), run.history, best, run.accelerator.is_main_process)


def _guided(
    module: nn.Module, teacher: Teacher, images: NDArray[np.uint8], preprocessing: Preprocessing
) -> tuple[Telling, Guide]:
    """A network and a teacher that show their feature maps, and what is learnt to compare them."""
    some = _floats(torch.from_numpy(images).to(next(module.parameters()).device), range(len(images)))
    own = Telling(module, shown(module, preprocessing(some)), within=2 / 3)
    return own, Guide(own.widths, teacher.telling(some).widths)


def _epoch(run: Run, step: Step, pixels: Tensor, labels: Tensor, kept: Any) -> None:
    recipe, accelerator, started = run.recipe, run.accelerator, time.monotonic()
    greedy = isinstance(recipe.cutout, GreedyCutout) and len(run.history) < recipe.greedy_from * recipe.epochs
    step.cutout = Cutout(**_plain(recipe.cutout)) if greedy else recipe.cutout
    order = torch.from_numpy(run.order.permutation(kept)).to(run.device)  # at once: a GPU comes to rest for each
    steps = max(1, len(order) // recipe.batch)
    share = max(1, recipe.batch // accelerator.num_processes)
    run.module.train()
    losses, rights = [], []
    for number in range(steps):
        mine = order[number * recipe.batch :][accelerator.process_index * share :][:share]
        step.progress = run.step / (steps * recipe.epochs)
        for group in run.optimizer.param_groups:
            group["lr"] = recipe.rate * rate_at(step.progress, recipe)
        loss, right = step(_floats(pixels, mine), labels[mine])
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


def _judged(run: Run, judge: Judge) -> None:
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


def require_classes(found: int | None, wanted: int) -> None:
    """Refuse a network with another number of classes than the data."""
    if found != wanted:
        raise ClassifierError(
            f"the network has {found} classes, the data has {wanted}; write trained:FOLDER?classes={wanted}, "
            f"net:NAME?classes={wanted} or timm:NAME?num_classes={wanted}"
        )
