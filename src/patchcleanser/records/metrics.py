"""Accuracies of rows, with the uncertainty of a finite sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.results import Case
from patchcleanser.records.columns import BOUNDS, kind_of

Z95 = 1.959963984540054

OVERLAP = 0.5
"""An object counts as detected if a box of its class covers at least this share of it."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Proportion:
    """A count out of a total. `float(proportion)` is the share from 0 to 1, `percent` the same in percent.

    >>> Proportion(77, 100)
    Proportion(77/100 = 77.00% 95%: 67.8 to 84.2)
    >>> Proportion(77, 100).percent, tuple(round(b, 1) for b in Proportion(77, 100).interval)
    (77.0, (67.8, 84.2))
    >>> float(Proportion(77, 100))
    0.77
    """

    count: int
    total: int

    def __add__(self, other: Proportion) -> Proportion:
        return Proportion(self.count + other.count, self.total + other.total)

    @property
    def percent(self) -> float:
        """In percent; NaN if the total is 0."""
        return 100 * self.count / self.total if self.total else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval, in percent."""
        if not self.total:
            return 0.0, 100.0
        n, p = self.total, self.count / self.total
        middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
        return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)

    def __float__(self) -> float:
        """The share, from 0 to 1; NaN if the total is 0."""
        return self.percent / 100

    def with_interval(self) -> str:
        low, high = self.interval
        return f"{self.percent:6.2f}%   95%: {low:.1f} to {high:.1f}"

    def to_dict(self) -> dict[str, object]:
        """Percent, count and the bounds of the 95% interval, as `json.dumps` takes them."""
        interval = [round(bound, 4) for bound in self.interval]
        return {"percent": round(self.percent, 4), "count": self.count, "interval95": interval}

    def __repr__(self) -> str:
        return f"Proportion({self.count}/{self.total} = {' '.join(self.with_interval().split())})"

    def __str__(self) -> str:
        return f"{self.percent:.2f}%"


@dataclass(frozen=True)
class Summary:
    """Counts over the rows of a run. Detection is a weaker guarantee, so it is never counted as certified.

    `shares` are proportions by name: `float(summary.shares["certified"])` is the certified accuracy, from 0 to 1.
    """

    images: int
    skipped: int
    shares: dict[str, Proportion]
    cases: dict[str, int]
    classifications: int
    seconds: float = field(compare=False)

    def __add__(self, other: Summary) -> Summary:
        if not (self.images and other.images):  # without answers it is not known which shares there are
            return replace(self if self.images else other, skipped=self.skipped + other.skipped)
        return Summary(
            self.images + other.images,
            self.skipped + other.skipped,
            {name: self.shares[name] + other.shares[name] for name in self.shares if name in other.shares},
            {c: self.cases.get(c, 0) + other.cases.get(c, 0) for c in {**self.cases, **other.cases}},
            self.classifications + other.classifications,
            self.seconds + other.seconds,
        )

    def __repr__(self) -> str:
        shares = ", ".join(f"{name}={share}" for name, share in self.shares.items())
        return f"Summary(images={self.images}, {f'skipped={self.skipped}, ' if self.skipped else ''}{shares})"

    def to_dict(self) -> dict[str, object]:
        """All counts as values that `json.dumps` takes; a share of nothing is left out."""
        return {
            "images": self.images,
            "skipped": self.skipped,
            **{name: share.to_dict() for name, share in self.shares.items() if share.total},
            "cases": self.cases,
            "classifications": self.classifications,
            "seconds": round(self.seconds, 3),
        }


def summary(rows: pa.Table) -> Summary:
    """Summarise all rows that have an answer; cases and classifications of an attack are those under attack.

    Shares of a detector are shares of objects, and precision and recall those of classes in images, at the run's own
    threshold; neither are shares of images.
    """
    answered = rows.filter(compute.is_null(rows["skipped"]))
    case, cost = ("attacked_case", "queries") if kind_of(rows) == "attack" else ("case", "classifications")
    cases = answered[case].to_pylist() if case in answered.column_names else []
    return Summary(
        images=len(answered),
        skipped=len(rows) - len(answered),
        shares=shares_of(answered),
        cases={case.value: cases.count(case.value) for case in Case if case.value in cases},
        classifications=int(sum(answered[cost].to_pylist())),
        seconds=float(sum(answered["seconds"].to_pylist())),
    )


def shares_of(answered: pa.Table) -> dict[str, Proportion]:
    """The shares of a summary."""
    return SHARES.get(kind_of(answered), _shares_of_outcomes)(answered)


def _shares_of_outcomes(answered: pa.Table) -> dict[str, Proportion]:
    return {name: Proportion(int(hits.sum()), len(hits)) for name, hits in outcomes(answered).items()}


def _precisions_and_recalls(answered: pa.Table) -> dict[str, Proportion]:
    shares: dict[str, Proportion] = {}
    for bound in BOUNDS:
        precision, recall = precision_and_recall(answered, bound)
        shares |= {f"{bound}_precision": precision[0], f"{bound}_recall": recall[0]}
    return shares


def attacked_classes(answered: pa.Table) -> dict[str, Proportion]:
    """Shares of attacked classes that are right without and with the defense, and of those certified with it."""
    certified, undefended, defended = (
        object_values(answered, name).astype(bool) for name in ("certified", "undefended_wrong", "defended_wrong")
    )
    return {
        "undefended_under_attack": Proportion(int((~undefended).sum()), len(undefended)),
        "robust": Proportion(int((~defended).sum()), len(defended)),
        "certified_undefended_under_attack": Proportion(int((certified & ~undefended).sum()), int(certified.sum())),
        "certified_robust": Proportion(int((certified & ~defended).sum()), int(certified.sum())),
    }


SHARES: dict[str, Callable[[pa.Table], dict[str, Proportion]]] = {
    "multilabel": _precisions_and_recalls,
    "multilabel-attack": attacked_classes,
}
"""The shares of a summary by the kind of run, where these are not shares of what `outcomes` says."""


def certificates_beaten(rows: pa.Table) -> pa.Table:
    """Rows of attacked classes that refute a certificate, by a class or by the counts: there must be none."""
    answered = rows.filter(compute.is_null(rows["skipped"]))

    def beaten(row: dict[str, Any]) -> bool:
        wrong = any(a and b for a, b in zip(row["certified"], row["defended_wrong"], strict=True))
        few = min(row["true_positives"], default=row["promised_true"]) < row["promised_true"]
        return wrong or few or max(row["false_positives"], default=0) > row["promised_false"]

    return answered.filter(pa.array([beaten(row) for row in answered.to_pylist()], pa.bool_()))


def precision_and_recall(answered: pa.Table, bound: str) -> tuple[list[Proportion], list[Proportion]]:
    """Precision and recall at each threshold, of the true and false positives of all images together.

    Without any image there is one threshold, of which nothing is counted.
    """
    positives = len(object_values(answered, "classes"))
    true, false = (label_counts(answered, f"{bound}_{what}") for what in ("true", "false"))
    pairs = zip(true.tolist(), false.tolist(), strict=True)
    return [Proportion(t, t + f) for t, f in pairs], [Proportion(t, positives) for t in true.tolist()]


def label_counts(answered: pa.Table, name: str) -> NDArray[np.int64]:
    """A column of counts at each threshold, summed over all images."""
    values = object_values(answered, name).astype(np.int64)
    return values.reshape(max(1, len(answered)), -1).sum(axis=0) if len(values) else np.zeros(1, dtype=np.int64)


def outcomes(rows: pa.Table) -> dict[str, Bools]:
    """For each share, which of the answered images count; only shares that this kind of defense has.

    For a detection defense, an alert on a clean image counts as wrong.
    """
    if kind_of(rows) == "detect":
        return object_outcomes(rows, OVERLAP)
    label = numbers(rows, "label")
    right = numbers(rows, "answer") == label
    attacked, detects = kind_of(rows) == "attack", len(rows) > 0 and rows["alert"].null_count == 0
    hits = {"undefended": numbers(rows, "undefended") == label}
    if attacked:
        hits["undefended_under_attack"] = ~flags(rows, "undefended_fooled")
    if detects:
        alert = flags(rows, "alert")
        hits |= {"clean": right & ~alert, "alerts": alert}
        if attacked:
            hits["never_wrong_silently"] = ~flags(rows, "fooled")
            hits["alerts_under_attack"] = flags(rows, "attacked_alert")
        return hits | {"detection_certified": flags(rows, "detection_certified")}
    hits["clean"] = right
    if attacked:
        hits["robust"] = ~flags(rows, "fooled")
    hits["certified"] = flags(rows, "certified")
    if not len(rows) or rows["row_certified"].null_count < len(rows):  # defenses without masks have none
        hits["row_certified"] = flags(rows, "row_certified")
    return hits


def object_outcomes(rows: pa.Table, overlap: float) -> dict[str, Bools]:
    """For each share, which objects count at this overlap; those without a placement of the class are left out."""
    columns = {"undefended": "undefended", "clean": "defended"}
    columns |= {f"certified_{place}": place for place in ("over", "near", "far")}
    shares = {name: object_values(rows, column) for name, column in columns.items()}
    shares = {name: values[~np.isnan(values)] for name, values in shares.items()}
    return {name: (values >= overlap) & (values > 0) for name, values in shares.items()}


def object_values(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """The values of a list column of all rows, one for each object."""
    values: NDArray[np.float64] = rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values


def certified_fooled(rows: pa.Table) -> pa.Table:
    """Rows of certified images that were fooled: there must be none."""
    answered = rows.filter(compute.is_null(rows["skipped"]))
    row, detection = (compute.fill_null(answered[f"{name}_certified"], False) for name in ("row", "detection"))
    return answered.filter(compute.and_(answered["fooled"], compute.or_(row, detection)))


def per_class(rows: pa.Table) -> dict[int, dict[str, Proportion]]:
    """The same shares for the images of each true class."""
    answered = rows.filter(compute.is_null(rows["skipped"]))
    label, hits = numbers(answered, "label"), outcomes(answered)
    return {
        int(y): {name: Proportion(int(hit[label == y].sum()), int((label == y).sum())) for name, hit in hits.items()}
        for y in np.unique(label)
    }


def numbers(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers; null is NaN, for which every comparison except != is False."""
    values: NDArray[np.float64] = rows[name].to_numpy().astype(np.float64)
    return values


def flags(rows: pa.Table, name: str) -> Bools:
    """A column of flags; null is False."""
    values: Bools = compute.fill_null(rows[name], False).to_numpy()
    return values


def error_rate_bound(errors: int, trials: int) -> float:
    """Upper bound of an error rate, with 95% confidence (Clopper and Pearson).

    >>> round(error_rate_bound(0, 3000), 4), round(error_rate_bound(2, 3000), 4), error_rate_bound(0, 0)
    (0.001, 0.0021, 1.0)
    """
    if errors >= trials:
        return 1.0
    low, high = errors / trials, 1.0
    binomials = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(errors + 1)]
    for _ in range(60):
        rate = (low + high) / 2
        terms = (b + k * math.log(rate) + (trials - k) * math.log1p(-rate) for k, b in enumerate(binomials))
        at_most = sum(map(math.exp, terms))
        low, high = (rate, high) if at_most > 0.05 else (low, rate)
    return high


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """McNemar's exact test of two runs on the same images, two-sided, by the images that only one of them gets right.

    The probability of a split at least as uneven if either run were as likely to be the better one on each image.

    >>> mcnemar_p_value(8, 2), mcnemar_p_value(0, 0)
    (0.109375, 1.0)
    """
    differing = only_first + only_second
    binomial = tail = 1
    for k in range(min(only_first, only_second)):
        binomial = binomial * (differing - k) // (k + 1)
        tail += binomial
    return min(1.0, 2 * tail / (1 << differing))
