"""Match the classes of a dataset with those of a classifier: by name where both have names, else by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.data.dataset import Dataset, DatasetView
from patchcleanser.data.imagenet import imagenet_classes
from patchcleanser.errors import DataError, InputError, PatchCleanserError


class Relabelled(DatasetView):
    """A dataset under other class numbers."""

    def __init__(self, dataset: Dataset, labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self.dataset, self.name, self.origin = dataset, dataset.name, dataset.origin
        self.labels, self.classes = labels, classes

    def __len__(self) -> int:
        return len(self.dataset)

    def _source(self, index: int) -> tuple[Dataset, int]:
        return self.dataset, index


def match_labels(dataset: Dataset, classifier: Classifier, how: str = "auto") -> tuple[Dataset, str | None]:
    """The dataset under the classifier's class numbers, and a note for the user about how they were matched, if any.

    By name: every class of the data must be one of the classifier's. By number: label k is class k.
    "auto" goes by name where both have names, and raises if they do not match.
    """
    if how not in ("auto", "name", "number"):
        raise InputError(f"labels are matched by name or number, or auto, got {how!r}")
    classifier.require_one_label("here the data has")
    ours = dataset.classes
    theirs = classifier.names or (None if how == "number" else _imagenet_names(dataset, classifier))
    if dataset.labels is None or ours == theirs:
        return dataset, None
    if how == "number" or not (ours and theirs) or all(name.isdigit() for name in ours):
        if how == "name":
            raise InputError("labels cannot be matched by name: the classifier or the data has no names of classes")
        if ours:
            count_classes(classifier, dataset)
        if classifier.classes is None or len(ours) in (0, classifier.classes):
            return dataset, None
        counts = f"the classifier has {classifier.classes} classes and {dataset.name} {len(ours)}"
        return dataset, f"{counts}; label 0 is taken for class 0, and so on"
    numbers = _numbers_by_name(ours, theirs)
    unmatched = [name for name, number in numbers.items() if number is None]
    if unmatched:
        more = f" (and {len(unmatched) - 1} more)" if unmatched[1:] else ""
        names = ", ".join(theirs[:10]) + (", …" if theirs[10:] else "")
        raise DataError(
            f"the class {unmatched[0]!r}{more} of {dataset.name} is none of the classifier's, which are {names}; "
            "rename the data's classes, or take label 0 for class 0 and so on with --labels number"
        )
    new_labels = np.array([numbers[name] for name in ours], dtype=np.int64)[dataset.labels]
    pairs = ", ".join(f"{name} is {number}" for name, number in list(numbers.items())[:6])
    assumed = "" if classifier.names else ", the classifier's 1000 being taken for ImageNet's"
    return Relabelled(dataset, new_labels, theirs), f"classes are matched by name{assumed}: {pairs}"


def _numbers_by_name(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, int | None]:
    """The class number of each of our names among theirs: spelled the same, else the only one spelled alike.

    ImageNet has a Cardigan and a cardigan, so ignoring case is not enough.
    """
    exact = {name: number for number, name in enumerate(theirs)}
    counts = Counter(map(_normalized, theirs))
    alike = {_normalized(name): number for name, number in exact.items() if counts[_normalized(name)] == 1}
    return {name: exact.get(name, alike.get(_normalized(name))) for name in ours}


def _imagenet_names(dataset: Dataset, classifier: Classifier) -> tuple[str, ...] | None:
    """ImageNet's names for a classifier of 1,000 nameless classes, if the data has fewer classes, all of them there.

    By number, label 0 of a subset of ImageNet's classes would be taken for the tench.
    """
    names = imagenet_classes()[1]
    if not 0 < len(dataset.classes) < 1000 or None in _numbers_by_name(dataset.classes, names).values():
        return None
    count_classes(classifier, dataset)
    return names if classifier.classes == 1000 else None


def count_classes(classifier: Classifier, dataset: Dataset) -> None:
    """Some classifiers know the number of their classes after their first image."""
    if classifier.classes is None and len(dataset):
        with suppress(PatchCleanserError), torch.inference_mode():
            classifier.checked_logits(classifier.prepare(dataset.image(0)[None].to(classifier.device)))


def _normalized(name: str) -> str:
    return name.strip().lower().replace("_", " ")
