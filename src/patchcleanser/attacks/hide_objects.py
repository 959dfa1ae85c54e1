"""A patch that hides an object from a detector: random search, at the placements where a certificate promises least.

An attack can refute a certificate; it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.core.detections import Detections, coverage
from patchcleanser.core.geometry import Window
from patchcleanser.core.hiding import PLACES, Place
from patchcleanser.data.object_sets import ObjectDataset
from patchcleanser.defenses.object_seeker import ObjectSeeker, best_coverage
from patchcleanser.records.metrics import OVERLAP


@dataclass(frozen=True)
class HidingResult:
    """One object under attack at one placement."""

    image: str
    place: Place
    patch: Window
    promised: float
    """The share that the certificate promises."""
    undefended: float
    """The share that a box of the object's class covers under attack, without the defense."""
    defended: float
    """The same with the defense."""

    @property
    def broken(self) -> bool:
        """Whether the certificate is refuted: this must never be."""
        return self.defended < self.promised


def attack_objects(
    defense: ObjectSeeker, dataset: ObjectDataset, *, images: int = 100, iterations: int = 30, seed: int = 0
) -> Iterator[HidingResult]:
    """Attack objects that are certified at OVERLAP, in the first `images` images that have one.

    In each image and for each class of placements, the attack takes the object with the largest promise, and puts the
    patch where the promise is smallest.
    """
    attacked = 0
    for index in range(len(dataset)):
        image, objects = dataset.image(index), dataset.objects[index]
        if attacked == images or not len(objects):
            continue
        certificates = defense.certify(image, objects.boxes, objects.classes)
        attacked += any(c.certified(place, OVERLAP) for c in certificates for place in PLACES)
        for place in PLACES:
            promises = [getattr(c, place) or 0.0 for c in certificates]
            best = int(np.argmax(promises))
            if certificates[best].certified(place, OVERLAP):
                target, patch = objects.pick([best]), certificates[best].weakest[place]
                changed = hidden_object(defense, image, target, patch, iterations=iterations, seed=(seed, index))
                shares = (
                    best_coverage(target, boxes) for boxes in (defense.undefended(changed), defense.predict(changed))
                )
                yield HidingResult(dataset.id(index), place, patch, promises[best], *(float(s[0]) for s in shares))


def hidden_object(
    defense: ObjectSeeker, image: Tensor, target: Detections, patch: Window, *, iterations: int, seed: tuple[int, ...]
) -> Tensor:
    """The image with the patch that leaves the undefended detector the least score for the target.

    Random search: first noise, then rectangles of one colour in it, each kept if the score does not rise.
    """
    random = np.random.default_rng(seed)
    best = pasted(image, patch, random.random((3, patch.height, patch.width)))
    lowest = object_score(defense, best, target)
    for _ in range(iterations):
        if lowest == 0:
            break
        height, width = (int(random.integers(1, side + 1)) for side in (patch.height, patch.width))
        top, left = (int(random.integers(0, free + 1)) for free in (patch.height - height, patch.width - width))
        part = Window(patch.top + top, patch.left + left, height, width)
        colour = random.integers(0, 2, (3, 1, 1)).astype(np.float64)
        candidate = pasted(best, part, np.broadcast_to(colour, (3, height, width)))
        score = object_score(defense, candidate, target)
        if score <= lowest:
            best, lowest = candidate, score
    return best


def pasted(image: Tensor, patch: Window, content: NDArray[np.float64]) -> Tensor:
    """A copy of the image with this content in the patch."""
    copy = image.clone()
    copy[(..., *patch.slices)] = torch.from_numpy(np.ascontiguousarray(content)).to(copy)
    return copy


def object_score(defense: ObjectSeeker, image: Tensor, target: Detections) -> float:
    """The best score of an undefended box of the target's class that covers OVERLAP of it; 0 if there is none."""
    boxes = defense.undefended(image)
    shows = (boxes.classes == target.classes[0]) & (coverage(target.boxes, by=boxes.boxes)[0] >= OVERLAP)
    return float(boxes.scores[shows].max(initial=0.0))
