"""Random search in the pixels of a patch, after the Square Attack (Andriushchenko et al. 2020): no gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser.attacks.patch_attack import Attack
from patchcleanser.attacks.patch_problem import BestImages, Objective, PatchProblem, per_image
from patchcleanser.core.geometry import Window

FIRST_SHARE = 0.8
"""The share of a patch that the first proposals repaint; it is halved as in the paper."""
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""After these shares of the iterations."""


def square_search(problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
    """Repaint a random square of a patch with a random corner of the colour cube; keep it if the loss falls."""
    best, images = BestImages(problem), problem.paste(_stripes(problem))
    loss, margin, _ = objective(images, gradient=False)
    best.update(images, margin)
    for number in range(1, iterations + 1):
        share = FIRST_SHARE / 2 ** sum(number > at * iterations for at in HALVINGS)
        proposed = _repainted(problem, images, share)
        values = objective(proposed, gradient=False)
        best.update(proposed, values.margin)
        better = values.loss < loss
        images, loss = torch.where(per_image(better), proposed, images), torch.where(better, values.loss, loss)
    return best


def _stripes(problem: PatchProblem) -> Tensor:
    """Vertical stripes of pure colours: strong starts for most networks."""
    channels, height, width = problem.clean.shape[1:]
    stripes = [torch.randint(2, (channels, 1, width), generator=draw).float() for draw in problem.draws]
    return torch.stack(stripes).expand(-1, -1, height, -1).to(problem.clean.device)


def _repainted(problem: PatchProblem, images: Tensor, share: float) -> Tensor:
    repainted = images.clone()
    for image, placement, draw in zip(repainted, problem.placements, problem.draws, strict=True):
        window = _part(placement[int(torch.randint(len(placement), (1,), generator=draw))], share, draw)
        colour = torch.randint(2, (images.shape[1], 1, 1), generator=draw).float().to(images.device)
        image[(..., *window.slices)] = colour
    return repainted


def _part(window: Window, share: float, draw: torch.Generator) -> Window:
    """A random rectangle inside a window that holds about this share of it."""
    height, width = (max(1, round(side * share**0.5)) for side in (window.height, window.width))
    top = int(torch.randint(window.height - height + 1, (1,), generator=draw))
    left = int(torch.randint(window.width - width + 1, (1,), generator=draw))
    return Window(window.top + top, window.left + left, height, width)


class PatchSquare(Attack):
    """For classifiers without gradients: ONNX files, functions, services. An iteration is one query."""

    needs_gradients = False

    def optimise(self, problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
        return square_search(problem, objective, iterations)
