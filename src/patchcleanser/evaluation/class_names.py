"""Whether the data's classes are the classifier's: by name where both have names, else by number."""

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

    def __init__(self, whole: Dataset, labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self.whole, self.name = whole, whole.name
        self.labels, self.classes = labels, classes

    def __len__(self) -> int:
        return len(self.whole)

    def _source(self, index: int) -> tuple[Dataset, int]:
        return self.whole, index


def match_labels(dataset: Dataset, classifier: Classifier, how: str = "auto") -> tuple[Dataset, str | None]:
    """The dataset under the classifier's class numbers, and a sentence if somebody should know what was done.

    By name: every class of the data must be one of the classifier's. By number: label k is class k.
    "auto" goes by name where both sides have names, and refuses names that do not match.
    """
    if how not in ("auto", "name", "number"):
        raise InputError(f"labels are matched by name or number, or auto, got {how!r}")
    ours, theirs = dataset.classes, classifier.names or (None if how == "number" else _imagenet(dataset, classifier))
    if dataset.labels is None or ours == theirs:
        return dataset, None
    if how == "number" or not (ours and theirs) or all(name.isdigit() for name in ours):
        if how == "name":
            raise InputError("labels cannot be matched by name: the classifier or the data has no names of classes")
        return dataset, _numbers(dataset, classifier)
    found = _found(ours, theirs)
    strange = [name for name, number in found.items() if number is None]
    if strange:
        more = f" (and {len(strange) - 1} others)" if strange[1:] else ""
        some = ", ".join(theirs[:10]) + (", …" if theirs[10:] else "")
        raise DataError(
            f"the class {strange[0]!r}{more} of {dataset.name} is none of the classifier's, which are {some}; rename "
            "the data's classes, or take label 0 for class 0 and so on with --labels number"
        )
    numbers = np.array([found[name] for name in ours], dtype=np.int64)
    said = ", ".join(f"{name} is {number}" for name, number in list(zip(ours, numbers.tolist(), strict=True))[:6])
    taken = "" if classifier.names else ", the classifier's 1000 being taken for ImageNet's"
    return Relabelled(dataset, numbers[dataset.labels], theirs), f"classes are matched by name{taken}: {said}"


def _found(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, int | None]:
    """The number of each name among theirs: exactly so written, or else the only one that is written alike.

    ImageNet has a Cardigan and a cardigan.
    """
    exact = {name: number for number, name in enumerate(theirs)}
    often = Counter(map(_plain, theirs))
    alike = {_plain(name): number for name, number in exact.items() if often[_plain(name)] == 1}
    return {name: exact.get(name, alike.get(_plain(name))) for name in ours}


def _imagenet(dataset: Dataset, classifier: Classifier) -> tuple[str, ...] | None:
    """ImageNet's names for a classifier of 1,000 nameless classes, if the data has fewer, all of them among these.

    By number label 0 of a part of ImageNet would be taken for the tench.
    """
    names = imagenet_classes()[1]
    if not 0 < len(dataset.classes) < 1000 or None in _found(dataset.classes, names).values():
        return None
    return names if _number(dataset, classifier) == 1000 else None


def _number(dataset: Dataset, classifier: Classifier) -> int | None:
    """How many classes a classifier has; some say so only when they are asked about an image."""
    if classifier.classes is None and len(dataset):
        with suppress(PatchCleanserError), torch.inference_mode():
            classifier.checked_logits(classifier.prepare(dataset.image(0)[None].to(classifier.device)))
    return classifier.classes


def _numbers(dataset: Dataset, classifier: Classifier) -> str | None:
    if classifier.classes is None or len(dataset.classes) in (0, classifier.classes):
        return None
    return (
        f"the classifier has {classifier.classes} classes and {dataset.name} {len(dataset.classes)}; "
        "label 0 is taken for class 0, and so on"
    )


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
