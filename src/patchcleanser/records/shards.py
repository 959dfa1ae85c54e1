"""Shards: the rows of one batch in a Parquet file that says where they belong, with a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from patchcleanser.errors import RecordError
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.checksums import checksum
from patchcleanser.records.consistency import first_contradiction

SEAL = b"patchcleanser"
"""Where a shard keeps its header and checksum, among the metadata of its Parquet schema."""

Header = Mapping[str, Any]
"""Where rows belong: the key of their job, how many images and how many to a batch, and the indices of these."""


class DamageError(Exception):
    """What is wrong with a shard, in words that go on from its name."""


def write_shard(path: Path, rows: pa.Table, header: Header, checksum: str) -> None:
    """Keep rows with their header and checksum, whole or not at all."""
    seal = json.dumps({**header, "checksum": checksum})
    with whole_file(path) as part:
        parquet.write_table(rows.replace_schema_metadata({SEAL: seal}), part, compression="zstd")


def read_shard(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a shard, unchecked; the columns that the schema names have its types."""
    try:
        table = parquet.ParquetFile(path).read(columns=None if columns is None else list(columns))
        names = {field.name: field for field in schema}
        return table.cast(pa.schema([names.get(f.name, f) for f in table.schema], table.schema.metadata))
    except OSError as error:
        if error.errno:
            raise RecordError(f"cannot read {path}: {error.strerror}; make it readable") from error
        raise DamageError(f"is damaged ({error})") from error
    except (pa.ArrowException, ValueError) as error:
        raise DamageError(f"is damaged ({error})") from error


def read_header(path: Path) -> dict[str, Any] | None:
    """The header of a shard, its checksum included; None where it has none, or none that can be read."""
    try:
        return _header(parquet.read_schema(path))
    except (pa.ArrowException, OSError, DamageError):
        return None


def check_shard(rows: pa.Table, header: Header, required: Sequence[str], *, must_be_sealed: bool) -> str:
    """The checksum of a whole shard; DamageError if these are not the rows that belong there, as they were written."""
    missing = [name for name in required if name not in rows.column_names]
    if missing:
        raise DamageError(f"has no column {missing[0]!r}")
    seal = _header(rows.schema)
    if seal is None and must_be_sealed:
        raise DamageError("has no checksum, and the other rows of its run have")
    if seal is not None:
        stored = seal.pop("checksum", None)
        if seal != header:
            raise DamageError(_elsewhere(seal, header))
    content = checksum(rows, header)
    if seal is not None and stored != content:
        raise DamageError("does not match its checksum: it was changed after it was written")
    _require_consistent(rows, header)
    return content


def _require_consistent(rows: pa.Table, header: Header) -> None:
    first, stop = header["indices"]
    indices = rows["index"].to_pylist()
    if indices != list(range(first, stop)):
        raise DamageError(f"holds other rows than {first} to {stop - 1}, each once: {_listed(indices)}")
    if wrong := first_contradiction(rows):
        raise DamageError(f"has a row that contradicts itself, row {wrong[0]}: {wrong[1]}")


def _elsewhere(seal: Header, header: Header) -> str:
    """Whose rows these are instead."""
    differs = [f"{name} {seal.get(name)}, not {value}" for name, value in header.items() if seal.get(name) != value]
    return f"belongs elsewhere: it was written for {'; '.join(differs) or 'another version'}"


def _listed(indices: Sequence[int | None]) -> str:
    some = ", ".join(map(str, indices[:5]))
    return f"{some}, … ({len(indices)} in all)" if len(indices) > 5 else some or "none"


def _header(schema: pa.Schema) -> dict[str, Any] | None:
    content = (schema.metadata or {}).get(SEAL)
    if content is None:
        return None
    try:
        header = json.loads(content)
    except ValueError as error:
        raise DamageError(f"has a damaged header ({error})") from error
    if not isinstance(header, dict):
        raise DamageError("has a damaged header (it is no JSON object)")
    return header
