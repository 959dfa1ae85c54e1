"""The same attacks through the Adversarial Robustness Toolbox: ours are at least as strong on the same budget."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Threat, TorchClassifier, Window
from patchcleanser.attacks import PatchAPGD, PatchPGD
from patchcleanser.attacks.objectives import goal_margin
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.attacks.patch_problem import pixels_inside
from patchcleanser.attacks.universal import Printing, UniversalPatch, apply_patch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    evasion = pytest.importorskip("art.attacks.evasion")
    estimators = pytest.importorskip("art.estimators.classification")

STEPS = 40
NOISE = 0.01
"""Logits by which ours may lose on average: starts are random."""


class Pasted(nn.Module):
    """A network that sees free pixels of its input, and the clean image elsewhere.

    ART's Auto-PGD honours a mask only in its steps: it starts from noise all over the image. So the
    patch is enforced here, for all of ART's attacks alike.
    """

    def __init__(self, model: TorchClassifier, clean: Tensor, free: Tensor) -> None:
        super().__init__()
        self.module, self.model, self.clean, self.free = model.module, model, clean, free

    def forward(self, images: Tensor) -> Tensor:
        return self.model.logits(self.model.prepare(torch.where(self.free, images, self.clean)))


def theirs(attack: str, model: TorchClassifier, image: Tensor, label: int, free: Tensor) -> float:
    """The margin that ART reaches on one image with one random start; below 0 the classifier is fooled."""
    net = Pasted(model, image[None], free).eval()
    shape = tuple(image.shape)
    wrapped = estimators.PyTorchClassifier(net, nn.CrossEntropyLoss(), shape, 5, clip_values=(0.0, 1.0))
    if attack == "pgd":
        art_attack: Any = evasion.ProjectedGradientDescent(
            wrapped, eps=1.0, eps_step=0.1, max_iter=STEPS, num_random_init=1, verbose=False
        )
    else:
        art_attack = evasion.AutoProjectedGradientDescent(
            wrapped, eps=1.0, eps_step=1.0, max_iter=STEPS, nb_random_init=1, loss_type="cross_entropy", verbose=False
        )
    result = torch.from_numpy(art_attack.generate(image[None].numpy(), y=np.array([label])))
    with torch.no_grad():
        return float(goal_margin(net(result), torch.tensor([label])))


@pytest.mark.parametrize(("name", "attack"), [("pgd", PatchPGD), ("apgd", PatchAPGD)])
def test_ours_is_at_least_as_strong_as_arts_at_the_same_places_and_steps(
    curved: TorchClassifier, name: str, attack: Any
) -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    images = [torch.rand(3, 9, 9, generator=draw) for _ in range(8)]
    labels = [int(curved.logits(curved.prepare(image[None])).argmax()) for image in images]
    result = attack(curved, Threat.square(3), AttackSettings(iterations=STEPS, loss="ce")).candidates(images, labels)
    ours = [own[0].margin for own in result]
    art = [
        theirs(name, curved, image, label, pixels_inside([own[0].windows], (9, 9)))
        for image, label, own in zip(images, labels, result, strict=True)
    ]
    assert np.mean(ours) <= np.mean(art) + NOISE


def test_our_printed_patch_is_at_least_as_strong_as_arts_at_one_place() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(8 * 6 * 6, 5)).eval()
    draw, window = torch.Generator().manual_seed(3), Window(5, 5, 5, 5)
    images = [torch.rand(3, 16, 16, generator=draw) for _ in range(16)]
    stack = torch.stack(images)
    labels = net(stack).argmax(1)
    fixed = Printing(scale=(1, 1), rotation=0, brightness=(1, 1))
    threat, settings = Threat.square(5, region=window), AttackSettings(iterations=STEPS, loss="ce")
    fitted = UniversalPatch(TorchClassifier(net), threat, settings, printing=fixed, batch=16)
    pixels = fitted.fit(images, labels.tolist()).pixels
    wrapped = estimators.PyTorchClassifier(net, nn.CrossEntropyLoss(), (3, 16, 16), 5, clip_values=(0.0, 1.0))
    art_attack = evasion.AdversarialPatchPyTorch(
        wrapped,
        rotation_max=0.0,
        scale_min=0.99,
        scale_max=1.0,
        learning_rate=0.05,
        max_iter=STEPS,
        patch_shape=(3, 5, 5),
        patch_location=(5, 5),
        patch_type="square",
        targeted=False,
        verbose=False,
    )
    result, _ = art_attack.generate(stack.numpy(), y=labels.numpy())
    theirs = torch.from_numpy(art_attack.apply_patch(stack.numpy(), scale=1.0, patch_external=result)).float()
    ours = torch.stack([apply_patch(image, pixels, window) for image in images])
    with torch.no_grad():
        margins = [float(goal_margin(net(attacked), labels).mean()) for attacked in (ours, theirs)]
    assert margins[0] <= margins[1] + NOISE
