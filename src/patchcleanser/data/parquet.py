"""Parquet files in the Hugging Face image layout, from this machine or any fsspec address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from patchcleanser.data.base import EncodedDataset, labelled
from patchcleanser.data.splits import require_one_split
from patchcleanser.errors import DataError, MissingDependencyError, PatchCleanserError

IMAGES = ("image", "img")
LABELS = ("label", "fine_label", "labels")
IN_MEMORY = 2 << 30
"""Bytes of encoded images that are kept, so that small sets are read once and large ones fit."""


def load_parquet(address: str | Path) -> EncodedDataset:
    """Images and, if there are any, labels of a file, a folder or a pattern; ``s3://…`` and the like too.

    The image column (image or img) holds encoded bytes, or struct<bytes, path>. Labels are whole
    numbers in label, fine_label or labels. Class names stand in the schema's metadata: in
    class_names as a JSON list, or where Hugging Face puts them.
    """
    parts = [_part(files, path, name) for files, path, name in _found(str(address))]
    names = _one_list_of_classes(parts)
    spots = [(part, row) for part in parts for row in range(part.rows)]
    ids = [f"{part.name}:{row}:{part.paths[row] or ''}" for part, row in spots]
    labels, classes = labelled(
        [part.labels[row] for part, row in spots],
        names,
        lambda at: f"row {spots[at][1]} of {spots[at][0].name}",
    )
    name = PurePosixPath(str(address).rstrip("/")).name
    return EncodedDataset(name, ids, _Rows(parts), labels, classes)


@dataclass(frozen=True)
class _Part:
    """One file: all of it but the images."""

    files: Any  # the fsspec file system it is on
    path: str
    name: str
    column: str
    groups: tuple[int, ...]
    paths: list[str | None]
    labels: list[int | None]
    classes: list[str]

    @property
    def rows(self) -> int:
        return sum(self.groups)


class _Rows(Sequence[bytes]):
    """The images' bytes, read by row group when asked for."""

    def __init__(self, parts: list[_Part]) -> None:
        self.groups = [(part, group) for part in parts for group in range(len(part.groups))]
        self.ends = np.cumsum([part.groups[group] for part, group in self.groups])
        self.kept: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": {}}  # another process reads for itself

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: Any) -> Any:
        at = int(np.searchsorted(self.ends, index, side="right"))
        part, group = self.groups[at]
        row = index - int(self.ends[at]) + part.groups[group]
        value = self._column(at)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None:
            raise DataError(
                f"row {row + sum(part.groups[:group])} of {part.path} holds no image bytes in {part.column!r}; "
                "write the file again with the images inside it"
            )
        return content

    def _column(self, at: int) -> Any:
        kept = self.kept
        if at not in kept:
            part, group = self.groups[at]
            with _opened(part.files, part.path) as file:
                column = file.read_row_group(group, columns=[part.column])[part.column]
            if sum(other.nbytes for other in list(kept.values())) + column.nbytes > IN_MEMORY:
                kept = self.kept = {}
            kept[at] = column
        return kept[at]


def is_local(address: str) -> bool:
    """Whether an address is a path on this machine, and names no other file system, also not in a chain.

    >>> [is_local(a) for a in ("data/*.parquet", "file:///data", "s3://bucket/a", "simplecache::file:///a", "data:,x")]
    [True, True, False, False, False]
    """
    path = address.removeprefix("file://")
    return "://" not in path and "::" not in path and not path.startswith(("data:", "//", "\\\\"))


def _found(address: str) -> list[tuple[Any, str, str]]:
    """File system, path and name of every file at an address."""
    import fsspec  # type: ignore[import-untyped,unused-ignore]

    try:
        files, path = fsspec.core.url_to_fs(address)
        paths = _paths(files, path)
    except ImportError as error:
        raise MissingDependencyError(f"parquet:{address} needs another package: {error}") from error
    except Exception as error:  # every file system has errors of its own
        raise DataError(f"cannot look for Parquet files at {address}: {error}") from error
    if not paths:
        raise DataError(f"no Parquet file at {address}; name a file, a folder that holds some, or a pattern")
    names = [PurePosixPath(p).name for p in paths]
    if "*" not in address:  # a pattern may mean to mix
        require_one_split((re.split("[-.]", name)[0] for name in names), f"parquet:{address}", "/{}*.parquet")
    unique = len(set(names)) == len(names)
    return [(files, p, name if unique else p) for p, name in zip(paths, names, strict=True)]


def _paths(files: Any, path: str) -> list[str]:
    if files.isfile(path):
        return [path]
    if files.isdir(path):
        return sorted(p for p in files.ls(path, detail=False) if p.endswith(".parquet"))
    return sorted(files.glob(path))


@contextmanager
def _opened(files: Any, path: str) -> Iterator[Any]:
    try:
        with files.open(path, "rb") as raw, parquet.ParquetFile(raw) as file:
            yield file
    except PatchCleanserError:
        raise
    except Exception as error:  # Arrow's, the operating system's or the file system's
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error


def _part(files: Any, path: str, name: str) -> _Part:
    with _opened(files, path) as file:
        schema, meta = file.schema_arrow, file.metadata
        image = _image_column(schema, path)
        label = next((column for column in LABELS if column in schema.names), None)
        if label is not None and not pa.types.is_integer(schema.field(label).type):
            raise DataError(f"{path} has {schema.field(label).type} in {label!r}; labels are whole numbers from 0")
        named = _has(schema.field(image).type, "path")
        table = file.read(columns=[f"{image}.path"] * named + [label] * (label is not None))
    rows = meta.num_rows
    return _Part(
        files,
        path,
        name,
        column=image,
        groups=tuple(meta.row_group(group).num_rows for group in range(meta.num_row_groups)),
        paths=[value and value["path"] for value in table[image].to_pylist()] if named else [None] * rows,
        labels=table[label].to_pylist() if label is not None else [None] * rows,
        classes=_class_names(schema, label, path),
    )


def _image_column(schema: Any, path: str) -> str:
    column = next((column for column in IMAGES if column in schema.names), None)
    if column is None:
        raise DataError(f"{path} has no column 'image' or 'img', only {schema.names}")
    kind = schema.field(column).type
    inner = kind.field("bytes").type if _has(kind, "bytes") else kind
    if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
        raise DataError(f"{path} has {kind} in {column!r}; encoded images are binary, or struct<bytes, path>")
    return str(column)


def _has(kind: Any, field: str) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index(field) >= 0)


def _class_names(schema: Any, label: str | None, path: str) -> list[str]:
    """Ours (class_names), else Hugging Face's (features.LABEL.names), else none."""
    metadata = schema.metadata or {}
    try:
        names = json.loads(metadata.get(b"class_names", b"null"))
        if names is None:
            features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
            names = features.get(label, {}).get("names") or []
        return [str(name) for name in names]
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path} has class names that are no JSON list: {error}") from error


def _one_list_of_classes(parts: list[_Part]) -> list[str]:
    first = parts[0]
    for part in parts[1:]:
        if part.classes != first.classes:
            raise DataError(f"{first.name} and {part.name} name different classes; load them one by one")
    return first.classes
