"""Rows that contradict themselves: what can be seen to be wrong without a model, at hardly any cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

Bools = NDArray[np.bool_]
Values = NDArray[np.float64]

ROUNDING = 1e-5
"""A confidence may exceed 1 by so much."""


def first_contradiction(rows: pa.Table) -> tuple[int, str] | None:
    """The index of the first row that contradicts itself, and what it says; None if none does."""
    labels = _numbers(rows, "label")
    if not (labels >= 0).all():
        return _first(rows, ~(labels >= 0), "it has no label")
    answered = rows.filter(compute.is_null(rows["skipped"]))
    for what, wrong in _contradictions(answered):
        if wrong.any():
            return _first(answered, wrong, what)
    return None


def _first(rows: pa.Table, wrong: Bools, what: str) -> tuple[int, str]:
    return int(rows["index"][int(wrong.argmax())].as_py()), what


def _contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What answered rows may say against themselves, and which of them do."""
    label, answer, undefended = (_numbers(rows, name) for name in ("label", "answer", "undefended"))
    certified, row_certified, detects, alert = (
        _flags(rows, name) for name in ("certified", "row_certified", "detection_certified", "alert")
    )
    yield "it has no answer", ~((answer >= 0) & (undefended >= 0))
    yield "it says nothing of a certificate", _null(rows, "certified") & _null(rows, "detection_certified")
    yield "certified but not row-certified", certified & ~row_certified & ~_null(rows, "row_certified")
    yield "certified with a wrong answer", (certified | row_certified) & (answer != label)
    yield "detection-certified with a wrong answer or an alert", detects & ((answer != label) | alert)
    yield "it has no time", ~(_numbers(rows, "seconds") >= 0)
    yield from (_attacked if "fooled" in rows.column_names else _examined)(rows)


def _attacked(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """A clean image is one that the attacker may choose, so who is wrong there is fooled."""
    label = _numbers(rows, "label")
    silent = (_numbers(rows, "answer") != label) & ~_flags(rows, "alert")
    silent |= (_numbers(rows, "attacked_answer") != label) & ~_flags(rows, "attacked_alert")
    yield "a wrong answer, but not fooled", silent & ~_flags(rows, "fooled")
    lost = (_numbers(rows, "undefended") != label) | (_numbers(rows, "attacked_undefended") != label)
    yield "a wrong undefended answer, but not fooled", lost & ~_flags(rows, "undefended_fooled")
    yield "it has no count of queries", ~(_numbers(rows, "queries") >= 0)


def _examined(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What follows from labels under masks; defenses without masks have none, and their lists are null."""
    ones, table = Lists.of(rows, "one_mask_labels"), Lists.of(rows, "table")
    wrong = [each.count(each.values != np.repeat(rows["label"].to_numpy(), each.lengths)) for each in (ones, table)]
    certified = _flags(rows, "certified")
    yield "a negative label under a mask", (ones.count(ones.values < 0) + table.count(table.values < 0)) > 0
    yield "certified with a wrong one-mask label", (certified | _flags(rows, "detection_certified")) & (wrong[0] > 0)
    yield "certified does not follow from its table", ~table.null & (certified != (wrong[1] == 0))
    yield "its table is shorter than its one-mask labels", ~table.null & (table.lengths < ones.lengths)
    yield "its table begins with other one-mask labels", table.differs(ones)
    for name, most in (("one_mask_margins", np.inf), ("one_mask_confidences", 1 + ROUNDING)):
        each = Lists.of(rows, name)
        yield f"its {name} are not one for each mask", ~each.null & (each.lengths != ones.lengths)
        yield f"a value of its {name} is out of range", each.count((each.values < 0) | (each.values > most)) > 0
    yield "a negative margin", ~ones.null & (_numbers(rows, "margin") < 0)
    yield "it has no count of classifications", ~(_numbers(rows, "classifications") >= 0)
    for part, all_of in (("flipped", "rechecked"), ("caught", "audited")):
        if part in rows.column_names:  # older rows do not have all counts
            few, many = _numbers(rows, part), _numbers(rows, all_of)
            yield f"more labels {part} than {all_of}", (few < 0) | (few > many)


@dataclass(frozen=True)
class Lists:
    """A column of lists: all their values in one array, and how many each row has."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]
    null: Bools

    @classmethod
    def of(cls, rows: pa.Table, name: str) -> Lists:
        """The lists of a column; nulls are empty."""
        column = rows[name].combine_chunks()
        lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return cls(column.flatten().to_numpy(zero_copy_only=False), lengths.astype(np.int64), _null(rows, name))

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each row's values end, among all."""
        return np.cumsum(self.lengths)

    def count(self, hits: Bools) -> NDArray[np.int64]:
        """How many entries of each row's list are hits, of which there are few."""
        rows = np.searchsorted(self.ends, np.flatnonzero(hits), side="right")
        return np.bincount(rows, minlength=len(self.lengths))

    def differs(self, start: Lists) -> Bools:
        """Whether a row's list does not begin with that of another column; nulls, and lists too short, do not count."""
        place = np.arange(len(start.values)) - np.repeat(start.ends - start.lengths, start.lengths)
        both = np.repeat(~self.null & (self.lengths >= start.lengths), start.lengths)
        unequal = np.zeros(len(start.values), dtype=bool)
        at = np.repeat(self.ends - self.lengths, start.lengths) + place
        unequal[both] = self.values[at[both]] != start.values[both]
        return start.count(unequal) > 0


def _null(rows: pa.Table, name: str) -> Bools:
    nulls: Bools = rows[name].is_null().to_numpy()
    return nulls


def _flags(rows: pa.Table, name: str) -> Bools:
    """Null is False."""
    flags: Bools = compute.fill_null(rows[name], False).to_numpy()
    return flags


def _numbers(rows: pa.Table, name: str) -> Values:
    """Null is NaN, which no comparison but != is true of."""
    numbers: Values = rows[name].to_numpy().astype(np.float64)
    return numbers
