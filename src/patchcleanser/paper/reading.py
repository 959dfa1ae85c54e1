"""What experiments read off finished runs; everything here follows from rows, without a model."""

from __future__ import annotations

import numpy as np
from pyarrow import compute

from patchcleanser.evaluation.attack_rows import attack_shares
from patchcleanser.evaluation.timing import Latencies
from patchcleanser.paper.base import Values
from patchcleanser.records.derive import detection, verdicts
from patchcleanser.records.metrics import COLUMNS, Proportion, per_class, summary
from patchcleanser.records.run import Run


def accuracies(run: Run, variant: str = "") -> Values:
    """Undefended, clean, certified and row-certified, and what an image cost."""
    found = summary(run.read(COLUMNS))
    images = max(1, found.images)
    return {**found.shares, "classifications": found.classifications / images, "seconds": found.seconds / images}


def answers(run: Run, variant: str) -> Values:
    """A recovery defense on the stored two-mask labels: clean accuracy and classifications an image."""
    clean, spent = verdicts(run, variant)
    certified = summary(run.read(COLUMNS)).shares["certified"]
    return {"clean": clean, "certified": certified, "classifications": spent}


RECOVERY = "double-masking"
"""The variant that stands beside Minority Reports at its thresholds."""


def promises(run: Run, variant: str) -> Values:
    """Minority Reports at a threshold, from the stored one-mask labels; or double-masking of the same run."""
    if variant == RECOVERY:
        return accuracies(run)
    (at,) = detection(run, [float(variant)])
    return {"clean": at.clean, "detection_certified": at.detection_certified, "alerts": at.alerts}


def attacked(run: Run, variant: str = "") -> Values:
    """Under the attack that was run, and what was certified beforehand."""
    shares = attack_shares(run.read())
    return {name.replace(" ", "_"): share for name, share in shares.items()}


def timed(times: Latencies, variant: str) -> Values:
    """Milliseconds an image of one defense, or of the classifier alone."""
    return {"milliseconds": times.milliseconds[variant], "classifications": times.classifications[variant]}


PARTS = {"least certified class": 0.0, "10% of the classes below": 0.1, "median class": 0.5}
PARTS |= {"90% of the classes below": 0.9, "most certified class": 1.0}


def by_class(run: Run, variant: str) -> Values:
    """The certified share of the class at a quantile of all classes."""
    shares = sorted((s["certified"] for s in per_class(run.read(COLUMNS)).values()), key=lambda s: s.percent)
    return {"certified": shares[round(PARTS[variant] * (len(shares) - 1))]}


def sized(run: Run, shares: dict[str, float], low: float, high: float) -> Values:
    """Clean and certified accuracy of the images whose objects take more than `low` of the picture, up to `high`."""
    rows = run.read(["id", "label", "answer", "certified", "skipped"])
    rows = rows.filter(compute.is_null(rows["skipped"]))
    taken = np.array([shares.get(name, np.nan) for name in rows["id"].to_pylist()])
    mine = (taken > low) & (taken <= high)
    right = rows["answer"].to_numpy() == rows["label"].to_numpy()
    certified = rows["certified"].to_numpy(zero_copy_only=False).astype(bool)
    total = int(mine.sum())
    return {
        "clean": Proportion(int(right[mine].sum()), total),
        "certified": Proportion(int(certified[mine].sum()), total),
    }
