"""Reference implementation of everything a certificate rests on, slow and independent of the rest of the package.

It takes from the package only the windows of the masks, the threat, and the classifier with its preprocessing. Masks
become pixels by loops. Covering is checked at every position. Labels come one masked image at a time, in float32. The
algorithms are written again, straight from the paper.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.cover import Mask
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import UNCERTAIN
from patchcleanser.core.threats import Threat
from patchcleanser.engine.float32 import strict_float32

Bools = NDArray[np.bool_]

NEAR = 1e-4
"""Two logits closer than this, relative to their size, may change order by rounding."""


@dataclass(frozen=True)
class ReferenceLabel:
    """The classifier's answer to one masked image."""

    label: int
    second: int
    """The class of the second largest logit."""
    margin: float
    confidence: float
    near_tie: bool

    def may_be(self, label: int) -> bool:
        """Whether rounding allows this label."""
        return label == self.label or (self.near_tie and label in (self.second, UNCERTAIN))


def hidden_pixels(mask: Mask, size: Size) -> Bools:
    """[H, W]: True where some window of the mask lies, pixel by pixel."""
    hidden = np.zeros(size, dtype=bool)
    for row in range(size[0]):
        for column in range(size[1]):
            for w in mask:
                if w.top <= row < w.top + w.height and w.left <= column < w.left + w.width:
                    hidden[row, column] = True
    return hidden


def hiding_sets(hidden: Sequence[Bools], threat: Threat, size: Size) -> list[frozenset[int]]:
    """For every placement of the threat's patches: the masks that hide all of them. Each distinct set once.

    One patch is tried at every position; a mask hides it if all of its pixels are hidden. K patches are
    hidden by the masks that hide each of them.
    """
    room = threat.room(size)
    single: set[frozenset[int]] = set()
    for height, width in threat.shapes(size):
        maps = np.stack([_inside(h[room.top : room.bottom, room.left : room.right], height, width) for h in hidden])
        for column in np.unique(maps.reshape(len(hidden), -1), axis=1).T:
            single.add(frozenset(np.flatnonzero(column).tolist()))
    return list({frozenset.intersection(*sets) for sets in combinations_with_replacement(single, threat.count)})


def _inside(hidden: Bools, height: int, width: int) -> Bools:
    """[tops, lefts]: whether all pixels of the rectangle from each corner are hidden; rows first, then columns."""
    rows = np.stack([hidden[t : t + height].all(axis=0) for t in range(hidden.shape[0] - height + 1)])
    return np.stack([rows[:, c : c + width].all(axis=1) for c in range(hidden.shape[1] - width + 1)], axis=1)


def reference_logits(
    classifier: Classifier, image: Tensor, hidden: Bools | None, *, prepared: bool
) -> tuple[Tensor, Tensor]:
    """Logits [classes] in float64 of one image [C, H, W] with these pixels hidden, and the network's input.

    The image is masked and then prepared; if it is `prepared` already, it is masked only.
    """
    masked = image.clone()
    if hidden is not None:
        preprocessing = classifier.preprocessing
        fill = preprocessing.input_fill(len(image)) if prepared else preprocessing.source_fill(len(image))
        for channel, value in enumerate(fill):
            masked[channel][torch.from_numpy(hidden)] = value
    batch = masked[None].to(classifier.device)
    with torch.inference_mode(), strict_float32(classifier.device):
        batch = batch if prepared else classifier.prepare(batch)
        if classifier.mask_aware:  # its last channel says which pixels are hidden
            channel_mask = np.zeros(image.shape[1:], dtype=bool) if hidden is None else hidden
            batch = torch.cat([batch, torch.from_numpy(channel_mask)[None, None].to(batch)], dim=1)
        return classifier.logits(batch)[0].double().cpu(), batch


def reference_label(classifier: Classifier, image: Tensor, hidden: Bools | None, *, prepared: bool) -> ReferenceLabel:
    """The label of one image with these pixels hidden."""
    logits, batch = reference_logits(classifier, image, hidden, prepared=prepared)
    order = logits.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    first, second = float(logits[order[0]]), float(logits[order[1]])
    near = first - second <= NEAR * max(1.0, abs(first), abs(second), _largest_local(classifier, batch))
    return ReferenceLabel(int(order[0]), int(order[1]), first - second, float(logits.softmax(0).max()), near)


def _largest_local(classifier: Classifier, batch: Tensor) -> float:
    """The size of the local logits of a network that pools visible ones: their rounding decides near ties; else 0."""
    local = getattr(getattr(classifier, "module", None), "local", None)
    if local is None or not classifier.mask_aware:
        return 0.0
    with torch.inference_mode(), strict_float32(classifier.device):
        return float(local(batch[:, :-1]).abs().nan_to_num().max())


class ReferenceClassifier:
    """The labels of one image under all masks, computed one by one."""

    def __init__(self, classifier: Classifier, image: Tensor, hidden: Sequence[Bools], *, grid: str) -> None:
        self.classifier, self.hidden = classifier, hidden
        self.prepared = grid == "input"
        if self.prepared:
            with torch.inference_mode(), strict_float32(classifier.device):
                image = classifier.prepare(image[None].to(classifier.device))[0].cpu()
        self.image = image
        self.by_pixels: dict[bytes, ReferenceLabel] = {}
        self.unmasked = reference_label(classifier, image, None, prepared=self.prepared)

    def under(self, first: int, second: int) -> ReferenceLabel:
        """The label under two masks. Masks that hide the same pixels are classified once."""
        union = self.hidden[first] | self.hidden[second]
        key = union.tobytes()
        if key not in self.by_pixels:
            self.by_pixels[key] = reference_label(self.classifier, self.image, union, prepared=self.prepared)
        return self.by_pixels[key]

    def one_mask(self) -> list[ReferenceLabel]:
        """The label under each mask alone."""
        return [self.under(i, i) for i in range(len(self.hidden))]

    @property
    def near_ties(self) -> int:
        """How many labels rounding may change."""
        return sum(label.near_tie for label in [self.unmasked, *self.by_pixels.values()])

    def masks_where(self, correct: Callable[[ReferenceLabel], bool]) -> set[int]:
        """Masks under which, with each other mask, the label is correct."""
        masks = range(len(self.hidden))
        return {i for i in masks if all(correct(self.under(i, j)) for j in masks)}


def majority_of(labels: Sequence[int]) -> int:
    """The most frequent label; of several the largest."""
    return max(set(labels), key=lambda label: (list(labels).count(label), label))


def slow_double_masking(labels: Sequence[int], pair: Callable[[int, int], int], options: Mapping[str, Any]) -> int:
    """Algorithm 1, as printed. `labels` are one-mask labels; pair(i, j) is the label under masks i and j."""
    majority = majority_of(labels)
    if all(label == majority for label in labels):
        return majority
    for i, label in enumerate(labels):
        if label != majority and all(pair(i, j) == label for j in range(len(labels))):
            return label
    return majority


def slow_challenger_masking(labels: Sequence[int], pair: Callable[[int, int], int], options: Mapping[str, Any]) -> int:
    """Algorithm 3, as printed: the candidate meets challengers of another label until none is left."""
    order = list(range(len(labels)))
    if options.get("seed") is not None:
        random.Random(options["seed"]).shuffle(order)
    candidate = order.pop(0)
    while True:
        rivals = [mask for mask in order if labels[mask] != labels[candidate]]
        if not rivals:
            return labels[candidate]
        order.remove(rivals[0])
        if pair(rivals[0], candidate) == labels[rivals[0]]:
            candidate = rivals[0]


REFERENCES = {"double_masking": slow_double_masking, "challenger_masking": slow_challenger_masking}
"""Recovery algorithms, by the `reference` of a defense's entry."""
