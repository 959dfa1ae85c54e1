"""Random search in the pixels of a patch, after the Square Attack (Andriushchenko et al. 2020): no gradients."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from patchcleanser.attacks.patch_attack import Attack
from patchcleanser.attacks.patch_problem import BestImages, PatchProblem, wide
from patchcleanser.core.geometry import Window

FIRST_SHARE = 0.8
"""The share of a patch that the first proposals repaint; it is halved as in the paper."""
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""After these shares of the iterations."""


def square(problem: PatchProblem, iterations: int) -> BestImages:
    """Repaint a random square of a patch with a random corner of the colour cube; keep it if the loss falls."""
    best = BestImages.none(problem)
    images = problem.pasted(_stripes(problem))
    found = problem.objective(images, slope=False)
    best.keep(images, found.margin)
    loss = found.loss
    for number in range(1, iterations + 1):
        share = FIRST_SHARE / 2 ** sum(number > at * iterations for at in HALVINGS)
        tried = _repainted(problem, images, share)
        found = problem.objective(tried, slope=False)
        best.keep(tried, found.margin)
        better = found.loss < loss
        images, loss = torch.where(wide(better), tried, images), torch.where(better, found.loss, loss)
    return best


def _stripes(problem: PatchProblem) -> Tensor:
    """Vertical stripes of pure colours: strong starts for most networks."""
    channels, height, width = problem.clean.shape[1:]
    drawn = [torch.randint(2, (channels, 1, width), generator=draw).float() for draw in problem.draws]
    return torch.stack(drawn).expand(-1, -1, height, -1).to(problem.clean.device)


def _repainted(problem: PatchProblem, images: Tensor, share: float) -> Tensor:
    tried = images.clone()
    for n, draw in enumerate(problem.draws):
        place = problem.places[n]
        window = _part(place[int(torch.randint(len(place), (1,), generator=draw))], share, draw)
        colour = torch.randint(2, (images.shape[1], 1, 1), generator=draw).float().to(images.device)
        tried[n, :, window.top : window.bottom, window.left : window.right] = colour
    return tried


def _part(window: Window, share: float, draw: torch.Generator) -> Window:
    """A random rectangle inside a window that holds about this share of it."""
    height, width = (max(1, round(side * share**0.5)) for side in (window.height, window.width))
    top = int(torch.randint(window.height - height + 1, (1,), generator=draw))
    left = int(torch.randint(window.width - width + 1, (1,), generator=draw))
    return Window(window.top + top, window.left + left, height, width)


class PatchSquare(Attack):
    """For classifiers without gradients: ONNX files, functions, services. An iteration is one query."""

    needs_gradients: ClassVar[bool] = False

    def optimise(self, problem: PatchProblem, iterations: int) -> BestImages:
        """Random search."""
        return square(problem, iterations)
