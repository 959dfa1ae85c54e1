"""Attack: a search for patch pixels that mislead the undefended classifier, within a budget."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from patchcleanser.attacks.objectives import Loss, UndefendedObjective, class_logits, goal_margin
from patchcleanser.attacks.patch_problem import (
    BestImages,
    Objective,
    PatchProblem,
    Placement,
    random_placements,
    scan_placements,
    size_of,
)
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.preprocessing import checked_image
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import is_integer
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.errors import InputError

GROUP_VALUES = 100_000_000
"""Most pixel values of attacked images that are optimised together."""
SCANNED = 64
"""Places that `places="searched"` tries."""
SCAN_ITERATIONS = 8
"""Iterations it spends on each."""


@dataclass(frozen=True)
class AttackSettings:
    """The attacker's budget and goal."""

    iterations: int = 100
    locations: int = 1
    """Places tried for each image; the defense must survive them all."""
    restarts: int = 1
    """Random starts at each place."""
    places: Literal["random", "searched"] = "random"
    """Random, or the worst of a coarse scan after a few iterations."""
    loss: Loss = "margin"
    target: int | None = None
    """The label wanted; by default any wrong one."""
    seed: int = 0
    chunk: int | None = None
    """Inputs that go through the classifier at once; by default what memory allows."""

    def __post_init__(self) -> None:
        for name in ("iterations", "locations", "restarts", "chunk"):
            value = getattr(self, name)
            if (value is not None or name != "chunk") and (not is_integer(value) or value < 1):
                raise InputError(f"{name} is a whole number of at least 1, got {value!r}")
        if self.places not in ("random", "searched"):
            raise InputError(f"places are random or searched, got {self.places!r}")
        if self.loss not in get_args(Loss):
            raise InputError(f"a loss is {', '.join(get_args(Loss))}, got {self.loss!r}")
        if self.target is not None and (not is_integer(self.target) or self.target < 0):
            raise InputError(f"a target (--target) is a class from 0, got {self.target!r}")

    def require_target(self, classes: int | None) -> None:
        """InputError if a classifier of so many classes, if it knows them, does not have the target."""
        if self.target is not None and classes is not None and self.target >= classes:
            raise InputError(f"a target (--target) is a class from 0 to {classes - 1}, got {self.target}")


@dataclass(frozen=True)
class AttackResult:
    """An attacked image, and its label by the undefended classifier.

    `image` is [C, H, W] in [0, 1] on the threat's grid: for `source` the original image with the patch; for `input`
    the resized and cropped image with the patch, still to be normalised. Patch pixels are multiples of 1/255, so a PNG
    stores them exactly.
    """

    image: Tensor = field(repr=False)
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
    """Searches for patch pixels that mislead the undefended classifier; a subclass says how.

    All images, places and restarts are optimised side by side. The result for an image depends on the image and the
    seed only, not on what else is attacked with it (but for rounding: kernels of other batch sizes round differently,
    and sign steps can amplify that).
    """

    needs_gradients: ClassVar[bool] = True

    def __init__(
        self,
        classifier: AnyClassifier,
        threat: AnyThreat,
        settings: AttackSettings | None = None,
    ) -> None:
        self.classifier, self.threat = as_classifier(classifier), Threat.of(threat)
        if self.needs_gradients:
            require_gradients(self.classifier)
        self.settings = settings or AttackSettings()
        self.grid_classifier = classifier_on_grid(self.classifier, self.threat)

    @abstractmethod
    def optimise(self, problem: PatchProblem, objective: Objective, iterations: int) -> BestImages:
        """The best images found for every candidate."""

    def attack(self, image: Tensor, label: int) -> AttackResult:
        """The worst patch found for one clean image [C, H, W] in [0, 1] with its true label."""
        return min(self.candidates([image], [label])[0], key=lambda result: result.margin)

    def candidates(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[list[AttackResult]]:
        """For each image, the best restart at each location; a defense must survive every one of them."""
        if len(images) != len(labels):
            raise InputError(f"{counted(len(labels), 'label')} for {counted(len(images), 'image')}")
        if self.settings.target is not None and self.settings.target in labels:
            raise InputError(f"the target {self.settings.target} is the true label of an image; leave such images out")
        pixels = [image_on_grid(image, self.classifier, self.threat) for image in images]
        results: list[list[AttackResult]] = []
        for start, stop in self._groups(pixels):
            results += self._attack_group(pixels[start:stop], labels[start:stop])
        return results

    def _groups(self, images: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Runs of images of one size that fit into memory together."""
        groups: list[tuple[int, int]] = []
        each = self.settings.locations * self.settings.restarts
        if self.settings.places == "searched":
            each = max(each, SCANNED)
        for number, image in enumerate(images):
            start = groups[-1][0] if groups else 0
            alike = bool(groups) and images[start].shape == image.shape
            if alike and (number + 1 - start) * each * image.numel() <= GROUP_VALUES:
                groups[-1] = start, number + 1
            else:
                groups.append((number, number + 1))
        return groups

    def _attack_group(self, images: Sequence[Tensor], labels: Sequence[int]) -> list[list[AttackResult]]:
        draws = [generator_for(image, self.settings.seed) for image in images]
        placements = self._placements(images, labels, draws)
        restarts = range(self.settings.restarts)
        repeated = [[placement for placement in own for _ in restarts] for own in placements]
        problem = PatchProblem.build(images, labels, repeated, draws)
        best = self.optimise(problem, self._objective(problem), self.settings.iterations)
        results = iter(attack_results(best, problem, self.grid_classifier, self.settings))
        return [[min([next(results) for _ in restarts], key=lambda r: r.margin) for _ in own] for own in placements]

    def _placements(
        self, images: Sequence[Tensor], labels: Sequence[int], draws: list[torch.Generator]
    ) -> list[list[Placement]]:
        size, number = size_of(images[0]), self.settings.locations
        if self.settings.places == "random":
            return [random_placements(self.threat, size, number, draw) for draw in draws]
        scans = [scan_placements(self.threat, size, max(SCANNED, number), draw) for draw in draws]
        problem = PatchProblem.build(images, labels, scans, draws)
        best = self.optimise(problem, self._objective(problem), SCAN_ITERATIONS)
        margins = torch.split(best.margin.cpu(), [len(scan) for scan in scans])
        return [
            [scan[i] for i in margin.argsort(stable=True)[:number].tolist()]
            for scan, margin in zip(scans, margins, strict=True)
        ]

    def _objective(self, problem: PatchProblem) -> UndefendedObjective:
        settings = self.settings
        return UndefendedObjective(self.grid_classifier, problem.labels, settings.loss, settings.target, settings.chunk)


def require_gradients(classifier: Classifier) -> None:
    """Raise InputError unless the classifier has gradients."""
    if not isinstance(classifier, TorchClassifier):
        raise InputError(
            f"this attack needs gradients, and so a torch classifier, got {type(classifier).__name__}; "
            "without gradients use --attack square (in Python: SquareAttack)"
        )


def classifier_on_grid(classifier: Classifier, threat: Threat) -> Classifier:
    """The classifier of images on the threat's grid: on the input grid it neither resizes nor crops."""
    if threat.grid == "source":
        return classifier
    view = copy.copy(classifier)
    view.preprocessing = replace(classifier.preprocessing, resize=None, crop=None)
    return view


def image_on_grid(image: Tensor, classifier: Classifier, threat: Threat) -> Tensor:
    """A checked image on the threat's grid, in [0, 1] on the device; ThreatError if the threat does not fit it."""
    pixels = checked_image(image, classifier.preprocessing.channels).to(classifier.device)
    if threat.grid == "input":
        pixels = classifier.preprocessing.geometry(pixels[None])[0].clamp(0, 1)
    threat.shapes(size_of(pixels))  # raises if no patch fits
    return pixels


def generator_for(image: Tensor, seed: int) -> torch.Generator:
    """A random generator that depends on the image and the seed only, not on batches or a resumed run."""
    content = image.detach().cpu().contiguous().numpy().tobytes()
    digest = hashlib.sha256(f"{seed}:{tuple(image.shape)}:".encode() + content).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def attack_results(
    best: BestImages, problem: PatchProblem, classifier: Classifier, settings: AttackSettings
) -> list[AttackResult]:
    """The best images with pixels rounded to 1/255, and their labels in strict float32."""
    images = problem.paste((best.images * 255).round() / 255)
    with torch.inference_mode(), strict_float32(classifier.device):
        logits = torch.cat([class_logits(classifier, part) for part in torch.split(images, settings.chunk or 256)])
    margins = goal_margin(logits, problem.labels, settings.target).cpu().tolist()
    labels, truths = logits.argmax(1).cpu().tolist(), problem.labels.cpu().tolist()
    return [
        AttackResult(
            image=images[n].cpu(),
            windows=problem.placements[n],
            label=labels[n],
            fooled=labels[n] != truths[n] if settings.target is None else labels[n] == settings.target,
            margin=margins[n],
            queries=best.queries + 1,
        )
        for n in range(len(images))
    ]
