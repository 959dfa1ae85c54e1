"""Attack: a classifier, a threat, a budget, and one verb."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from patchcleanser.attacks.objectives import Loss, UndefendedObjective, class_logits, goal_margin
from patchcleanser.attacks.patch_problem import (
    BestImages,
    PatchProblem,
    Placement,
    random_placements,
    room_for,
    scan_placements,
)
from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.images import checked_image
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.threats import Threat
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.errors import InputError

TOGETHER = 100_000_000
"""Pixel values of attacked images that are optimised together."""
SCAN = 64
"""Places that a search for the worst ones tries."""
GLANCE = 8
"""Iterations it spends on each."""


@dataclass(frozen=True)
class AttackSettings:
    """The attacker's budget and goal."""

    iterations: int = 100
    locations: int = 1
    """Places tried for each image; the defender must survive them all."""
    restarts: int = 1
    """Random starts at each place."""
    places: Literal["random", "searched"] = "random"
    """Drawn from all places, or the worst of a coarse scan after a few iterations."""
    loss: Loss = "margin"
    target: int | None = None
    """The label wanted; without it any wrong one will do."""
    seed: int = 0
    chunk: int | None = None
    """Inputs that go through the classifier at once; what memory allows if not said."""

    def __post_init__(self) -> None:
        for name in ("iterations", "locations", "restarts", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is at least 1, got {value}")
        if self.places not in ("random", "searched"):
            raise InputError(f"places are random or searched, got {self.places!r}")
        if self.loss not in get_args(Loss):
            raise InputError(f"a loss is {', '.join(get_args(Loss))}, got {self.loss!r}")


@dataclass(frozen=True)
class AttackResult:
    """An attacked image, and what the undefended classifier says of it.

    `image` is [C, H, W] in [0, 1] on the threat's grid: for `source` the image as it came, with the
    patch; for `input` the resized and cropped image with the patch, still to be normalised. Patch
    pixels are whole 255ths, so a PNG keeps them.
    """

    image: Tensor
    windows: Placement
    label: int
    """The undefended label under attack."""
    fooled: bool
    """Whether the attack reached its goal: a wrong label, or the target."""
    margin: float
    """How far the goal is, in logits; below 0 it is reached."""
    queries: int
    """Classifications spent on this image and place."""


class Attack(ABC):
    """Looks for patch pixels that mislead the undefended classifier. Subclasses say how they search.

    All images, places and restarts are optimised side by side. What is found for an image depends on
    the image and the seed only, not on what else is attacked with it (but for rounding: kernels of
    other batch sizes round differently, and sign steps can carry that on).
    """

    needs_gradients: ClassVar[bool] = True

    def __init__(self, classifier: Classifier, threat: Threat, settings: AttackSettings | None = None) -> None:
        if self.needs_gradients:
            require_gradients(classifier)
        self.classifier, self.threat, self.settings = classifier, threat, settings or AttackSettings()
        self.seen = classifier_on_grid(classifier, threat)

    @abstractmethod
    def optimise(self, problem: PatchProblem, iterations: int) -> BestImages:
        """The best pixels found for every candidate."""

    def attack(self, image: Tensor, label: int) -> AttackResult:
        """The worst that was found for one clean image [C, H, W] in [0, 1] with its true label."""
        return min(self.candidates([image], [label])[0], key=lambda found: found.margin)

    def candidates(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[list[AttackResult]]:
        """For each image, the best restart at each location; a defense must survive every one of them."""
        if len(images) != len(labels):
            raise InputError(f"{len(labels)} labels for {len(images)} images")
        if self.settings.target is not None and self.settings.target in labels:
            raise InputError(f"the target {self.settings.target} is the true label of an image; leave such images out")
        placed = [image_on_grid(image, self.classifier, self.threat) for image in images]
        found: list[list[AttackResult]] = []
        for start, stop in self._groups(placed):
            found += self._group(placed[start:stop], labels[start:stop])
        return found

    def _groups(self, images: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Runs of images of one size that fit into memory together."""
        groups: list[tuple[int, int]] = []
        each = self.settings.locations * self.settings.restarts
        if self.settings.places == "searched":
            each = max(each, SCAN)
        for number, image in enumerate(images):
            start = groups[-1][0] if groups else 0
            alike = bool(groups) and images[start].shape == image.shape
            if alike and (number + 1 - start) * each * image.numel() <= TOGETHER:
                groups[-1] = start, number + 1
            else:
                groups.append((number, number + 1))
        return groups

    def _group(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[list[AttackResult]]:
        draws = [generator_for(image, self.settings.seed) for image in images]
        places = self._places(images, labels, draws)
        again = [[place for place in mine for _ in range(self.settings.restarts)] for mine in places]
        problem, truths = self._problem(images, labels, again, draws)
        best = self.optimise(problem, self.settings.iterations)
        found = attack_results(best, problem, self.seen, truths, self.settings)
        results: list[list[AttackResult]] = []
        restarts, at = self.settings.restarts, 0
        for mine in places:
            tries = [found[at + n * restarts : at + (n + 1) * restarts] for n in range(len(mine))]
            results.append([min(some, key=lambda f: f.margin) for some in tries])
            at += len(mine) * restarts
        return results

    def _places(
        self, images: Sequence[Tensor], labels: Sequence[int], draws: list[torch.Generator]
    ) -> list[list[Placement]]:
        size, number = size_of(images[0]), self.settings.locations
        if self.settings.places == "random":
            return [random_placements(self.threat, size, number, draw) for draw in draws]
        scans = [scan_placements(self.threat, size, max(SCAN, number), draw) for draw in draws]
        problem, _ = self._problem(images, labels, scans, draws)
        margins = torch.split(self.optimise(problem, GLANCE).margin.cpu(), [len(scan) for scan in scans])
        return [
            [scan[i] for i in margin.argsort(stable=True)[:number].tolist()]
            for scan, margin in zip(scans, margins, strict=True)
        ]

    def _problem(
        self,
        images: Sequence[Tensor],
        labels: Sequence[int],
        places: list[list[Placement]],
        draws: list[torch.Generator],
    ) -> tuple[PatchProblem, Tensor]:
        device = self.seen.device
        truths = torch.tensor([y for y, mine in zip(labels, places, strict=True) for _ in mine], device=device)
        objective = UndefendedObjective(
            self.seen, truths, self.settings.loss, self.settings.target, self.settings.chunk
        )
        clean = torch.stack([image for image, mine in zip(images, places, strict=True) for _ in mine]).to(device)
        seeds = [
            int(torch.randint(2**62, (1,), generator=d)) for d, mine in zip(draws, places, strict=True) for _ in mine
        ]
        return PatchProblem.of(clean, [place for mine in places for place in mine], objective, seeds), truths


def require_gradients(classifier: Classifier) -> None:
    """Raise InputError unless gradients can be had."""
    if not isinstance(classifier, TorchClassifier):
        raise InputError(
            f"this attack needs gradients, and so a torch classifier, got {type(classifier).__name__}; "
            "the square attack needs none"
        )


def classifier_on_grid(classifier: Classifier, threat: Threat) -> Classifier:
    """The classifier of images on the threat's grid: on the input grid, of images resized and cropped before."""
    if threat.grid == "source":
        return classifier
    view = copy.copy(classifier)
    view.preprocessing = replace(classifier.preprocessing, resize=None, crop=None)
    return view


def image_on_grid(image: Tensor, classifier: Classifier, threat: Threat) -> Tensor:
    """A checked image on the threat's grid, in [0, 1] on the device; InputError if the threat does not fit it."""
    pixels = checked_image(image, classifier.preprocessing.channels).to(classifier.device)
    if threat.grid == "input":
        pixels = classifier.preprocessing.geometry(pixels[None])[0].clamp(0, 1)
    room_for(threat, size_of(pixels))
    return pixels


def size_of(image: Tensor) -> tuple[int, int]:
    """(height, width) of [C, H, W]."""
    return image.shape[-2], image.shape[-1]


def generator_for(image: Tensor, seed: int) -> torch.Generator:
    """Chance that depends on the image and the seed only, so that batches and restarts of a run do not matter."""
    content = image.detach().cpu().contiguous().numpy().tobytes()
    digest = hashlib.sha256(f"{seed}:{tuple(image.shape)}:".encode() + content).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def attack_results(
    best: BestImages, problem: PatchProblem, classifier: Classifier, labels: Tensor, settings: AttackSettings
) -> list[AttackResult]:
    """Best pixels as whole 255ths, and what the classifier says of them in plain float32."""
    images = problem.pasted((best.images * 255).round() / 255)
    size = settings.chunk or 256
    with torch.inference_mode(), strict_float32(classifier.device):
        logits = torch.cat([class_logits(classifier, part) for part in torch.split(images, size)])
    margins = goal_margin(logits, labels, settings.target).cpu().tolist()
    said = logits.argmax(1).cpu().tolist()
    return [
        AttackResult(
            image=images[n].cpu(),
            windows=problem.places[n],
            label=said[n],
            fooled=said[n] != truth if settings.target is None else said[n] == settings.target,
            margin=margins[n],
            queries=best.queries + 1,
        )
        for n, truth in enumerate(labels.cpu().tolist())
    ]
