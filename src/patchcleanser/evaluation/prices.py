"""What recovery defenses with different masks cost on this device, and what they give, on the same images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from patchcleanser.core.threats import Threat
from patchcleanser.evaluation.certified_accuracy import is_statistical
from patchcleanser.evaluation.jobs import Job
from patchcleanser.records.metrics import Proportion

R = TypeVar("R")

RECOVERY = ("double-masking", "challenger-masking")
"""They have the same certificates, so these are computed once for both."""


@dataclass(frozen=True)
class Price:
    """One setting, measured on some images: means over all of them."""

    defense: str
    masks: int
    """Per axis."""
    coarse: int
    """Larger masks per axis that are tried first; 0 for none."""
    prediction_labels: float
    prediction_ms: float
    certificate_labels: float
    certificate_ms: float
    clean: Proportion
    certified: Proportion
    statistical: int
    """Certificates that rest on labels of lower precision, and so are no proofs."""


def prices(
    classifier: Any, data: Any, threat: Threat | str, *, settings: Iterable[tuple[int, int]], precision: Any = "exact"
) -> Iterator[Price]:
    """Measure both recovery algorithms with each (masks, coarse) on clean images; takes what Job takes."""
    for masks, coarse in settings:
        options: dict[str, Any] = {"masks": masks, "options": {"coarse": coarse}, "precision": precision}
        jobs = {name: Job(classifier, data, threat, name, **options) for name in RECOVERY}
        job = jobs["double-masking"]
        images, labels = [job.dataset.image(index) for index in range(len(job.dataset))], job.labels.tolist()
        job.masking.predict(images[:1])  # the first call of a network is slow
        certificates, certify_seconds = _timed(partial(job.masking.certify, images, labels))
        for name, defense in ((name, job.masking) for name, job in jobs.items()):
            if defense.fast:
                defense.calibrate(images)
            verdicts, seconds = _timed(partial(defense.predict, images))
            yield Price(
                defense=name,
                masks=masks,
                coarse=coarse,
                prediction_labels=sum(v.classifications for v in verdicts) / len(images),
                prediction_ms=1000 * seconds / len(images),
                certificate_labels=sum(c.classifications for c in certificates) / len(images),
                certificate_ms=1000 * certify_seconds / len(images),
                clean=Proportion(sum(v.label == y for v, y in zip(verdicts, labels, strict=True)), len(images)),
                certified=Proportion(sum(c.certified for c in certificates), len(images)),
                statistical=sum(map(is_statistical, certificates)),
            )


def _timed(work: Callable[[], R]) -> tuple[R, float]:
    """What the work returns, and its seconds. Labels are read from the device, so nothing is left running."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started
