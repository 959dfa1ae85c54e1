"""Checksums of rows: hashes of what the rows say, not of how a file stores it.

Equal rows have equal checksums, whatever the compression, the encoding, the order of the columns and
the version of Arrow that wrote them. So columns are hashed by name, one after the other: how many
values, which of them are null, then the values themselves, little-endian. All NaNs count as one
value, and so do 0 and -0. A list column is hashed as the lengths of its lists and the values of all of them.

A checksum catches damage and careless edits. It is no signature: whoever changes rows on purpose can
compute it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute


def checksum(rows: pa.Table, header: Mapping[str, Any]) -> str:
    """A hash of rows and of the header that says where they belong.

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


def type_name(kind: pa.DataType) -> str:
    """A type's name; what a file calls the items of a list does not matter.

    >>> type_name(pa.list_(pa.field("element", pa.int32())))
    'list<int32>'
    """
    return f"list<{type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _canonical(values: pa.Array) -> Iterator[bytes]:
    """The bytes that a column of this content always has."""
    yield len(values).to_bytes(8, "little")
    yield np.packbits(values.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    if pa.types.is_list(values.type):
        yield _lengths(compute.list_value_length(values))
        yield from _canonical(values.flatten())
    elif pa.types.is_string(values.type):
        yield _lengths(compute.binary_length(values))
        yield "".join(values.drop_null().to_pylist()).encode()
    elif pa.types.is_floating(values.type):
        numbers = compute.fill_null(values, 0.0).to_numpy(zero_copy_only=False) + 0.0  # so that -0 becomes 0
        yield _bytes(np.where(np.isnan(numbers), np.float32(np.nan), numbers))
    else:
        nothing = False if pa.types.is_boolean(values.type) else 0
        yield _bytes(compute.fill_null(values, nothing).to_numpy(zero_copy_only=False))


def _lengths(lengths: pa.Array) -> bytes:
    return _bytes(compute.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64))


def _bytes(values: NDArray[Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
