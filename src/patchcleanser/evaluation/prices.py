"""What recovery defenses with different settings cost on this device, and what they give, on the same images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.core.threats import AnyThreat
from patchcleanser.defenses.one_pass import answers_in_one_pass
from patchcleanser.engine import Precision
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
    precision: Precision
    prediction_labels: float
    prediction_ms: float
    certificate_labels: float
    certificate_ms: float
    clean: Proportion
    certified: Proportion
    statistical: int
    """Certificates that rest on labels of lower precision, and so are no proofs."""


def price_jobs(
    classifier: AnyClassifier,
    data: Any,
    threat: AnyThreat,
    *,
    settings: Iterable[tuple[int, int]],
    precisions: Sequence[Precision] = ("exact",),
) -> list[list[Job]]:
    """A job for each defense with each (masks, coarse) and precision; jobs in one list have the same certificates.

    The classifier, data and threat are what Job takes. One pass is compared if the classifier is a network for it.
    """
    groups = []
    for masks, coarse in settings:
        build = partial(Job, classifier, data, threat, masks=masks)
        for precision in precisions:
            options = {"coarse": coarse}
            groups.append([build(defense=name, precision=precision, options=options) for name in RECOVERY])
        if not coarse and answers_in_one_pass(groups[-1][0].classifier):
            groups.append([build(defense="one-pass")])
    return groups


def prices(groups: Iterable[Sequence[Job]]) -> Iterator[Price]:
    """Measure the defenses of all jobs on their clean images."""
    for jobs in groups:
        job = jobs[0]
        images, labels = [job.dataset.image(index) for index in range(len(job.dataset))], job.labels.tolist()
        job.masking.predict(images[:1])  # the first call of a network is slow
        certificates, certify_seconds = _timed(partial(job.masking.certify, images, labels))
        for each in jobs:
            defense = each.masking
            if defense.fast:
                defense.calibrate(images)
            verdicts, seconds = _timed(partial(defense.predict, images))
            yield Price(
                defense=each.defense,
                masks=each.masks,  # type: ignore[arg-type]  # price_jobs gives numbers
                coarse=each.options.get("coarse", 0),
                precision=each.precision,
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
