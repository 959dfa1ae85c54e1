"""Records to accuracies, with the uncertainty of a finite sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

Z95 = 1.959963984540054

COLUMNS = (
    "label",
    "skipped",
    "undefended",
    "answer",
    "case",
    "alert",
    "certified",
    "row_certified",
    "detection_certified",
    "margin",
    "classifications",
    "seconds",
)
"""What a summary needs of the rows."""

ATTACK_COLUMNS = (
    "label",
    "skipped",
    "undefended",
    "answer",
    "alert",
    "certified",
    "row_certified",
    "detection_certified",
    "undefended_fooled",
    "fooled",
    "attacked_answer",
    "attacked_alert",
    "attacked_case",
    "queries",
    "seconds",
)
"""The same for the rows of an attack."""

COLUMNS_OF = {"certify": COLUMNS, "attack": ATTACK_COLUMNS}
"""By the kind of run."""


@dataclass(frozen=True)
class Proportion:
    """A count out of a total, with Wilson's 95% interval.

    >>> Proportion(77, 100).percent, tuple(round(b, 1) for b in Proportion(77, 100).interval)
    (77.0, (67.8, 84.2))
    """

    count: int
    total: int

    def __add__(self, other: Proportion) -> Proportion:
        return Proportion(self.count + other.count, self.total + other.total)

    @property
    def percent(self) -> float:
        """In percent; 0 of 0 is NaN."""
        return 100 * self.count / self.total if self.total else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies in 95 of 100 samples, in percent."""
        if not self.total:
            return 0.0, 100.0
        n, p = self.total, self.count / self.total
        middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
        return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)

    @property
    def told(self) -> str:
        """In percent, with the interval."""
        low, high = self.interval
        return f"{self.percent:6.2f}%   95%: {low:.1f} to {high:.1f}"

    def to_json(self) -> dict[str, object]:
        """Plain numbers."""
        interval = [round(bound, 4) for bound in self.interval]
        return {"percent": round(self.percent, 4), "count": self.count, "interval95": interval}

    def __str__(self) -> str:
        return f"{self.percent:.2f}%"


@dataclass(frozen=True)
class Summary:
    """What a run shows. Detection has its own shares, and never shares a column with certified."""

    images: int
    skipped: int
    shares: dict[str, Proportion]
    cases: dict[str, int]
    classifications: int
    seconds: float

    def __add__(self, other: Summary) -> Summary:
        if not self.images:  # which shares there are shows only in answers
            return replace(other, skipped=self.skipped + other.skipped)
        if not other.images:
            return replace(self, skipped=self.skipped + other.skipped)
        shares = {name: self.shares[name] + other.shares[name] for name in self.shares if name in other.shares}
        cases = {c: self.cases.get(c, 0) + other.cases.get(c, 0) for c in {**self.cases, **other.cases}}
        return Summary(
            self.images + other.images,
            self.skipped + other.skipped,
            shares,
            cases,
            self.classifications + other.classifications,
            self.seconds + other.seconds,
        )

    def percent(self, name: str) -> float | None:
        """One share in percent, or None where the defense has no such thing."""
        return self.shares[name].percent if name in self.shares else None

    def to_json(self) -> dict[str, object]:
        """Plain numbers."""
        return {
            "images": self.images,
            "skipped": self.skipped,
            **{name: share.to_json() for name, share in self.shares.items() if share.total},
            "cases": self.cases,
            "classifications": self.classifications,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Detection:
    """Minority Reports at one threshold, on clean images."""

    threshold: float
    clean: Proportion
    detection_certified: Proportion
    alerts: Proportion


@dataclass(frozen=True)
class Derived:
    """What follows from stored two-mask tables without a model (evaluation/derive.py makes it)."""

    smaller: list[tuple[int, Proportion]]
    """Side of a square patch in px, and the images row-certified against it by the run's masks."""
    weakness: NDArray[np.float64]
    """[rows, columns]: share of images whose proof does not reach a patch with its corner there."""
    answers: dict[str, tuple[Proportion, float]]
    """Per recovery defense: clean accuracy, and classifications an image."""
    detection: list[Detection]


def summary(rows: pa.Table) -> Summary:
    """Accuracies of all rows that have an answer; cases and classifications of an attack are those under attack."""
    kept = rows.filter(compute.is_null(rows["skipped"]))
    case, spent = ("attacked_case", "queries") if is_attack(rows) else ("case", "classifications")
    cases = [case for case in kept[case].to_pylist() if case is not None]
    return Summary(
        images=len(kept),
        skipped=len(rows) - len(kept),
        shares={name: Proportion(int(hits.sum()), len(hits)) for name, hits in outcomes(kept).items()},
        cases={case: cases.count(case) for case in ("agreed", "disagreer", "majority") if case in cases},
        classifications=int(sum(kept[spent].to_pylist())),
        seconds=float(sum(kept["seconds"].to_pylist())),
    )


def outcomes(kept: pa.Table) -> dict[str, NDArray[np.bool_]]:
    """For each share, which of the answered images count; only what this kind of defense promises.

    A detection's clean accuracy counts an alert on a clean image as wrong.
    """
    label = _ints(kept, "label")
    found = {"undefended": _ints(kept, "undefended") == label}
    right = _ints(kept, "answer") == label
    attacked = is_attack(kept)
    if attacked:
        found["undefended_under_attack"] = ~_bools(kept, "undefended_fooled")
    if len(kept) and kept["alert"].null_count == 0:
        alert = _bools(kept, "alert")
        found |= {"clean": right & ~alert, "alerts": alert}
        if attacked:
            found["never_wrong_silently"] = ~_bools(kept, "fooled")
            found["alerts_under_attack"] = _bools(kept, "attacked_alert")
        return found | {"detection_certified": _bools(kept, "detection_certified")}
    found["clean"] = right
    if attacked:
        found["robust"] = ~_bools(kept, "fooled")
    found["certified"] = _bools(kept, "certified")
    if len(kept) and kept["row_certified"].null_count == len(kept):
        return found  # only defenses with masks have rows of masks
    return found | {"row_certified": _bools(kept, "row_certified")}


def is_attack(rows: pa.Table) -> bool:
    """Whether these are the rows of an attack."""
    return "fooled" in rows.column_names


def certified_fooled(rows: pa.Table) -> pa.Table:
    """Rows of certified images that were fooled: there must be none."""
    kept = rows.filter(compute.is_null(rows["skipped"]))
    promised = compute.or_kleene(
        compute.fill_null(kept["row_certified"], False), compute.fill_null(kept["detection_certified"], False)
    )
    return kept.filter(compute.and_(kept["fooled"], promised))


def per_class(rows: pa.Table) -> dict[int, dict[str, Proportion]]:
    """The same shares for the images of each true class."""
    kept = rows.filter(compute.is_null(rows["skipped"]))
    label, hits = _ints(kept, "label"), outcomes(kept)
    return {
        int(y): {name: Proportion(int(hit[label == y].sum()), int((label == y).sum())) for name, hit in hits.items()}
        for y in np.unique(label)
    }


def _ints(table: pa.Table, name: str) -> NDArray[np.int64]:
    values: NDArray[np.int64] = table[name].to_numpy().astype(np.int64)
    return values


def _bools(table: pa.Table, name: str) -> NDArray[np.bool_]:
    values: NDArray[np.bool_] = table[name].to_numpy(zero_copy_only=False).astype(bool)
    return values


def most_wrong(wrong: int, seen: int) -> float:
    """The share that is wrong, at most, with 95% confidence, if so many of those seen were (Clopper and Pearson).

    >>> round(most_wrong(0, 3000), 4), round(most_wrong(2, 3000), 4), most_wrong(0, 0)
    (0.001, 0.0021, 1.0)
    """
    if wrong >= seen:
        return 1.0
    low, high = wrong / seen, 1.0
    ways = [math.lgamma(seen + 1) - math.lgamma(k + 1) - math.lgamma(seen - k + 1) for k in range(wrong + 1)]
    for _ in range(60):
        share = (low + high) / 2
        few = sum(
            math.exp(number + k * math.log(share) + (seen - k) * math.log1p(-share)) for k, number in enumerate(ways)
        )
        low, high = (share, high) if few > 0.05 else (low, share)
    return high
