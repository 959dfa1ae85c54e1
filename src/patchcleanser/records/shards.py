"""Shards: the rows of one batch in a Parquet file, with a header that says where they belong, and a checksum.

The checksum is a hash of the values, not of the file. Equal rows have equal checksums, whatever the compression,
the encoding, the order of the columns and the version of Arrow. Columns are hashed by name, one after the other:
number of values, which of them are null, then the values, little-endian. All NaNs count as one value, and so do
0 and -0. A list column is hashed as the lengths of its lists and the values of all of them.

A checksum catches damage and careless edits. It is no signature: whoever changes rows on purpose can recompute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, parquet

from patchcleanser.errors import RecordError
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.columns import BOUNDS, kind_of
from patchcleanser.records.metrics import Bools, flags, numbers

HEADER = b"patchcleanser"
"""Key of the header and checksum among the metadata of the Parquet schema."""
ROUNDING = 1e-5
"""A confidence may exceed 1 by this much."""

Header = Mapping[str, Any]
"""Where rows belong: the key of their job, number of images, images per batch, and the indices of these rows."""


class DamageError(Exception):
    """What is wrong with a shard; the message continues a sentence that starts with the shard's name."""


def write_shard(path: Path, rows: pa.Table, header: Header, checksum: str) -> None:
    """Write rows with their header and checksum, completely or not at all."""
    metadata = {HEADER: json.dumps({**header, "checksum": checksum})}
    with whole_file(path) as part:
        parquet.write_table(rows.replace_schema_metadata(metadata), part, compression="zstd")


def read_shard(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of a shard, unchecked; columns that the schema names get its types."""
    try:
        table = parquet.ParquetFile(path).read(columns=None if columns is None else list(columns))
        fields = {field.name: field for field in schema}
        return table.cast(pa.schema([fields.get(f.name, f) for f in table.schema], table.schema.metadata))
    except OSError as error:
        if error.errno:
            raise RecordError(f"cannot read {path}: {error.strerror}; make it readable") from error
        raise DamageError(f"is damaged ({error})") from error
    except (pa.ArrowException, ValueError) as error:
        raise DamageError(f"is damaged ({error})") from error


def read_header(path: Path) -> dict[str, Any] | None:
    """Read the header of a shard, its checksum included; None if it has none or cannot be read."""
    try:
        return _header(parquet.read_schema(path))
    except (pa.ArrowException, OSError, DamageError):
        return None


def _header(schema: pa.Schema) -> dict[str, Any] | None:
    content = (schema.metadata or {}).get(HEADER)
    if content is None:
        return None
    try:
        header = json.loads(content)
    except ValueError as error:
        raise DamageError(f"has a damaged header ({error})") from error
    if not isinstance(header, dict):
        raise DamageError("has a damaged header (not a JSON object)")
    return header


def check_shard(rows: pa.Table, header: Header, required: Sequence[str], *, needs_checksum: bool) -> str:
    """The checksum of a shard's rows; DamageError if they are not the rows of this header, as they were written."""
    missing = [name for name in required if name not in rows.column_names]
    if missing:
        raise DamageError(f"has no column {missing[0]!r}")
    stored = _header(rows.schema)
    if stored is None and needs_checksum:
        raise DamageError("has no checksum, but the other rows of its run do")
    stored_checksum = stored.pop("checksum", None) if stored is not None else None
    if stored is not None and stored != header:
        differs = [f"{n} {stored.get(n)}, not {value}" for n, value in header.items() if stored.get(n) != value]
        raise DamageError(f"belongs elsewhere: it was written for {'; '.join(differs) or 'another version'}")
    content = checksum(rows, header)
    if stored is not None and stored_checksum != content:
        raise DamageError("does not match its checksum: it was changed after it was written")
    first, stop = header["indices"]
    indices = rows["index"].to_pylist()
    if indices != list(range(first, stop)):
        listed = ", ".join(map(str, indices[:5])) or "none"
        more = f", … ({len(indices)} in all)" if len(indices) > 5 else ""
        raise DamageError(f"holds other rows than {first} to {stop - 1}, each once: {listed}{more}")
    if contradiction := first_contradiction(rows):
        raise DamageError(f"has a row that contradicts itself, row {contradiction[0]}: {contradiction[1]}")
    return content


def checksum(rows: pa.Table, header: Header) -> str:
    """A hash of rows and of their header.

    >>> rows = pa.table({"a": pa.array([1, None]), "b": pa.array([[0.5], []])})
    >>> checksum(rows, {}) == checksum(rows.select(["b", "a"]), {})
    True
    >>> checksum(rows, {}) == checksum(rows.slice(0, 1), {})
    False
    """
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(rows.column_names):
        column = rows[name].combine_chunks()
        digest.update(f"{json.dumps(name)}:{type_name(column.type)}:".encode())
        for part in _canonical(column):
            digest.update(part)
    return digest.hexdigest()


def type_name(type_: pa.DataType) -> str:
    """A type's name, without what a file calls the items of a list.

    >>> type_name(pa.list_(pa.field("element", pa.int32())))
    'list<int32>'
    """
    return f"list<{type_name(type_.value_type)}>" if pa.types.is_list(type_) else str(type_)


def _canonical(values: pa.Array) -> Iterator[bytes]:
    """The bytes of a column, equal for equal values."""
    yield len(values).to_bytes(8, "little")
    yield np.packbits(values.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    if pa.types.is_list(values.type):
        yield _bytes(_lengths(values))
        yield from _canonical(values.flatten())
    elif pa.types.is_string(values.type):
        yield _bytes(_numpy(compute.binary_length(values), 0).astype(np.int64))
        yield "".join(values.drop_null().to_pylist()).encode()
    elif pa.types.is_floating(values.type):
        floats = _numpy(values, 0.0) + 0.0  # so that -0 becomes 0
        yield _bytes(np.where(np.isnan(floats), np.float32(np.nan), floats))
    else:
        yield _bytes(_numpy(values, False if pa.types.is_boolean(values.type) else 0))


def _bytes(values: NDArray[Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _numpy(values: pa.Array, null: float) -> NDArray[Any]:
    """Values as an array, with another value in place of nulls."""
    array: NDArray[Any] = compute.fill_null(values, null).to_numpy(zero_copy_only=False)
    return array


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    return _numpy(compute.list_value_length(lists), 0).astype(np.int64)


def first_contradiction(rows: pa.Table) -> tuple[int, str] | None:
    """The index of the first row that contradicts itself, and how; None if none does. Needs no model."""
    answered = rows.filter(compute.is_null(rows["skipped"]))
    labels = numbers(rows, "label") if "label" in rows.column_names else np.zeros(len(rows))
    if not (labels >= 0).all():
        return int(rows["index"][int((~(labels >= 0)).argmax())].as_py()), "it has no label"
    for text, wrong in CONTRADICTIONS[kind_of(rows)](answered):
        if wrong.any():
            return int(answered["index"][int(wrong.argmax())].as_py()), text
    return None


def _answer_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """Each way in which an answered row can contradict itself, and the rows that do."""
    label, answer, undefended = (numbers(rows, name) for name in ("label", "answer", "undefended"))
    certified, row_certified, detects, alert = (
        flags(rows, name) for name in ("certified", "row_certified", "detection_certified", "alert")
    )
    yield "it has no answer", ~((answer >= 0) & (undefended >= 0))
    yield "it does not say whether it is certified", _null(rows, "certified") & _null(rows, "detection_certified")
    yield "certified but not row-certified", certified & ~row_certified & ~_null(rows, "row_certified")
    yield "certified with a wrong answer", (certified | row_certified) & (answer != label)
    yield "detection-certified with a wrong answer or an alert", detects & ((answer != label) | alert)
    yield "it has no time", ~(numbers(rows, "seconds") >= 0)


def _object_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What must hold for the objects of an image. A share of an object is NaN where a patch has no placement."""
    objects = ListColumn.read(rows, "classes").lengths
    yield "its boxes are not one for each object", ListColumn.read(rows, "boxes").lengths != 4 * objects
    for name in ("undefended", "defended", "over", "near", "far"):
        each = ListColumn.read(rows, name)
        yield f"its {name} are not one for each object", each.lengths != objects
        yield f"a share of its {name} is out of range", each.count((each.values < 0) | (each.values > 1 + ROUNDING)) > 0
    first, second = ListColumn.read(rows, "undefended"), ListColumn.read(rows, "defended")
    yield "the defense covers less than the detector alone", first.count(second.values < first.values) > 0
    for place in ("over", "near", "far"):
        promised = ListColumn.read(rows, place)
        broken = promised.values > second.values + ROUNDING
        yield f"more is promised {place} an object than the clean image shows", promised.count(broken) > 0
    yield "it has no count of images", ~(numbers(rows, "classifications") >= 0)
    yield "it has no time", ~(numbers(rows, "seconds") >= 0)


def _label_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What must hold of several labels: scores within their bounds, and counts that do not promise more than is so."""
    undefended, *bounds = (
        ListColumn.read(rows, f"{name}_scores") for name in ("undefended", "clean", "lowest", "highest")
    )
    clean, lowest, highest = bounds
    classes = ListColumn.read(rows, "classes")
    for each in bounds:
        yield "its scores are not one for each class", each.lengths != undefended.lengths
    out_of_bounds = (clean.values < lowest.values) | (clean.values > highest.values)
    yield "a score of the clean image lies outside its bounds", clean.count(out_of_bounds) > 0
    limits = np.repeat(undefended.lengths, classes.lengths)
    yield "a true class has no score", classes.count((classes.values < 0) | (classes.values >= limits)) > 0
    true, false = ({name: ListColumn.read(rows, f"{name}_{what}") for name in BOUNDS} for what in ("true", "false"))
    for each in [*true.values(), *false.values()]:
        yield "its counts are not one for each threshold", each.lengths != true["clean"].lengths
    positives = np.repeat(classes.lengths, true["clean"].lengths)
    absent = np.repeat(undefended.lengths, true["clean"].lengths) - positives
    for name in BOUNDS:
        yield f"its {name} true positives are out of range", _outside(true[name], positives)
        yield f"its {name} false positives are out of range", _outside(false[name], absent)
    for weaker, stronger in [("certified", "clean"), ("one_mask", "certified"), ("each_class", "certified")]:
        more = true[weaker].values > true[stronger].values
        yield f"more {weaker} true positives than {stronger} ones", true[weaker].count(more) > 0
        fewer = false[weaker].values < false[stronger].values
        yield f"fewer {weaker} false positives than {stronger} ones", false[weaker].count(fewer) > 0
    yield "it has no count of classifications", ~(numbers(rows, "classifications") >= 0)
    yield "it has no time", ~(numbers(rows, "seconds") >= 0)


def _class_attack_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What must hold of attacked classes."""
    attacked = ListColumn.read(rows, "attacked").lengths
    for name in ("certified", "undefended_wrong", "defended_wrong", "true_positives", "false_positives"):
        yield f"its {name} are not one for each attacked class", ListColumn.read(rows, name).lengths != attacked
    for name in ("promised_true", "promised_false", "classifications", "seconds"):
        yield f"it has no {name}", ~(numbers(rows, name) >= 0)


def _outside(counts: ListColumn, limits: NDArray[np.int64]) -> Bools:
    """Rows with a count below 0 or above its limit."""
    return counts.count((counts.values < 0) | (counts.values > limits)) > 0


def _attack_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """An attacker may leave the image as it is, so a defense that is wrong on the clean image is fooled."""
    yield from _answer_contradictions(rows)
    label = numbers(rows, "label")
    silent = (numbers(rows, "answer") != label) & ~flags(rows, "alert")
    silent |= (numbers(rows, "attacked_answer") != label) & ~flags(rows, "attacked_alert")
    yield "a wrong answer, but not fooled", silent & ~flags(rows, "fooled")
    wrong = (numbers(rows, "undefended") != label) | (numbers(rows, "attacked_undefended") != label)
    yield "a wrong undefended answer, but not fooled", wrong & ~flags(rows, "undefended_fooled")
    yield "it has no count of queries", ~(numbers(rows, "queries") >= 0)


def _mask_contradictions(rows: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What must follow from labels under masks; rows of defenses without masks have null lists."""
    yield from _answer_contradictions(rows)
    ones, table = ListColumn.read(rows, "one_mask_labels"), ListColumn.read(rows, "table")
    truth = rows["label"].to_numpy()
    wrong_ones, wrong_table = (each.count(each.values != np.repeat(truth, each.lengths)) for each in (ones, table))
    certified = flags(rows, "certified")
    yield "a negative label under a mask", (ones.count(ones.values < 0) + table.count(table.values < 0)) > 0
    yield "certified with a wrong one-mask label", (certified | flags(rows, "detection_certified")) & (wrong_ones > 0)
    wrong_coarse = np.zeros(len(rows), dtype=int)
    if "coarse_labels" in rows.column_names:  # older rows do not have it
        coarse = ListColumn.read(rows, "coarse_labels")
        wrong_coarse = coarse.count(coarse.values != np.repeat(truth, coarse.lengths))
        yield "a negative label under a coarse mask", coarse.count(coarse.values < 0) > 0
    yield "certified with a wrong coarse label", certified & (wrong_coarse > 0)
    proved = (wrong_table == 0) & (wrong_coarse == 0)
    yield "certified does not follow from its table", ~table.null & (certified != proved)
    yield "its table is shorter than its one-mask labels", ~table.null & (table.lengths < ones.lengths)
    yield "its table begins with other one-mask labels", table.differs(ones)
    for name, most in (("one_mask_margins", np.inf), ("one_mask_confidences", 1 + ROUNDING)):
        each = ListColumn.read(rows, name)
        yield f"its {name} are not one for each mask", ~each.null & (each.lengths != ones.lengths)
        yield f"a value of its {name} is out of range", each.count((each.values < 0) | (each.values > most)) > 0
    yield "a negative margin", ~ones.null & (numbers(rows, "margin") < 0)
    yield "it has no count of classifications", ~(numbers(rows, "classifications") >= 0)
    for part, total in (("flipped", "rechecked"), ("caught", "audited")):
        if part in rows.column_names:  # older rows do not have all counts
            few, many = numbers(rows, part), numbers(rows, total)
            yield f"more labels {part} than {total}", (few < 0) | (few > many)


CONTRADICTIONS: dict[str, Callable[[pa.Table], Iterator[tuple[str, Bools]]]] = {
    "certify": _mask_contradictions,
    "attack": _attack_contradictions,
    "detect": _object_contradictions,
    "multilabel": _label_contradictions,
    "multilabel-attack": _class_attack_contradictions,
}
"""The ways in which rows can contradict themselves, by the kind of run."""


@dataclass(frozen=True)
class ListColumn:
    """A column of lists: the values of all rows in one array, and the length of each row's list (null: 0)."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]
    null: Bools

    @classmethod
    def read(cls, rows: pa.Table, name: str) -> ListColumn:
        column = rows[name].combine_chunks()
        return cls(column.flatten().to_numpy(zero_copy_only=False), _lengths(column), _null(rows, name))

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each row's values end in `values`."""
        return np.cumsum(self.lengths)

    def count(self, hits: Bools) -> NDArray[np.int64]:
        """Per row, the number of its values that are hits, of which there are few."""
        rows = np.searchsorted(self.ends, np.flatnonzero(hits), side="right")
        return np.bincount(rows, minlength=len(self.lengths))

    def differs(self, start: ListColumn) -> Bools:
        """Whether a row's list does not begin with that of `start`; False for nulls and lists that are too short."""
        offsets = np.arange(len(start.values)) - np.repeat(start.ends - start.lengths, start.lengths)
        comparable = np.repeat(~self.null & (self.lengths >= start.lengths), start.lengths)
        at = np.repeat(self.ends - self.lengths, start.lengths) + offsets
        unequal = np.zeros(len(start.values), dtype=bool)
        unequal[comparable] = self.values[at[comparable]] != start.values[comparable]
        return start.count(unequal) > 0


def _null(rows: pa.Table, name: str) -> Bools:
    nulls: Bools = rows[name].is_null().to_numpy()
    return nulls
