"""Training and scoring of multi-label networks: each class is decided by itself."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.networks.wrapper import logits_in
from patchcleanser.training.cutout import masked_inputs
from patchcleanser.training.selection import Selector

THRESHOLD = 0.0
"""The logit from which on a class is present: a probability of one half, as binary cross-entropy learns it."""


def binary_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each image [N], the mean over its classes.

    >>> binary_losses(torch.tensor([[0.0, 0.0]]), torch.tensor([[1, 0]])).item()  # ln 2
    0.6931471824645996
    """
    return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none").mean(1)


def top_class_is_shown(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether each image shows the class of its largest logit, bool [N]."""
    return targets.gather(1, logits.argmax(1, keepdim=True))[:, 0].bool()


def mean_average_precision(scores: NDArray[np.floating], targets: NDArray[np.bool_]) -> float:
    """The mean, over classes that some image shows, of the mean precision at the scores of the images that show it.

    Scores and targets are [N, classes]. Images of one score are retrieved together.

    >>> mean_average_precision(np.array([[3.0, 1.0], [2.0, 1.0], [1.0, 1.0]]), np.array([[1, 0], [0, 0], [1, 1]]) > 0)
    0.5833333333333333
    """
    precisions = [_average_precision(scores[:, c], targets[:, c]) for c in np.flatnonzero(targets.any(axis=0))]
    return float(np.mean(precisions)) if precisions else float("nan")


def _average_precision(scores: NDArray[np.floating], shown: NDArray[np.bool_]) -> float:
    ends, positives = np.sort(scores), np.sort(scores[shown])
    retrieved, right = (len(s) - np.searchsorted(s, positives) for s in (ends, positives))
    return float(np.mean(right / retrieved))


class ScoreSelector(Selector):
    """Scores multi-label networks on held-out inputs by their mean average precision; `labels` are targets [N, C]."""

    criterion = "the highest mean average precision of the worst scores"

    def __call__(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Mean average precision without masks, and of the worst scores.

        The worst score of a class, of all views and the unmasked image, is the lowest if the image shows the class,
        and the highest if it does not. No choice of a view for each image and class gives a lower precision.
        """
        plain, worst = [], []
        for part, targets in zip(*(torch.split(t, self.batch) for t in (self.inputs, self.labels)), strict=True):
            inputs, shown = part.to(self.views.device), targets.bool()
            plain.append(_scores(model, inputs))
            worst.append(plain[-1])
            for hidden in self.views:
                scores = _scores(model, inputs, hidden)
                worst[-1] = torch.where(shown, worst[-1].minimum(scores), worst[-1].maximum(scores))
        shown = self.labels.bool().cpu().numpy()
        precisions = [mean_average_precision(torch.cat(s).cpu().numpy(), shown) for s in (plain, worst)]
        return torch.tensor(precisions[0]), torch.tensor(precisions[1])

    def near(self, score: float, best: float) -> bool:
        """Whether it is the best one: precision is no share of images, so it has no such standard error."""
        return score >= best


def _scores(model: nn.Module, inputs: Tensor, hidden: Tensor | None = None) -> Tensor:
    hidden = None if hidden is None else hidden.expand(len(inputs), -1, -1)
    return logits_in(model(masked_inputs(model, inputs, hidden))).float()
