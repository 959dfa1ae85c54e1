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

from patchcleanser.data.dataset import EncodedDataset, parse_labels, require_one_split
from patchcleanser.errors import DataError, MissingDependencyError, PatchCleanserError

IMAGES = ("image", "img")
LABELS = ("label", "fine_label", "labels")
IN_MEMORY = 2 << 30
"""Bytes of encoded images that stay in memory, so that small datasets are read once and large ones fit."""


def load_parquet(address: str | Path) -> EncodedDataset:
    """Images and, if there are any, labels of a file, a folder or a pattern; ``s3://…`` and the like too.

    The image column (image or img) holds encoded bytes, or struct<bytes, path>. Labels are whole
    numbers in label, fine_label or labels. Class names stand in the schema's metadata: in
    class_names as a JSON list, or where Hugging Face puts them.
    """
    files = [_read_file(files, path, name) for files, path, name in _list_files(str(address))]
    for file in files[1:]:
        if file.classes != files[0].classes:
            raise DataError(f"{files[0].name} and {file.name} name different classes; load them one by one")
    rows = [(file, row) for file in files for row in range(sum(file.groups))]
    labels, classes = parse_labels(
        [file.labels[row] for file, row in rows],
        files[0].classes,
        lambda index: f"row {rows[index][1]} of {rows[index][0].name}",
    )
    ids = [f"{file.name}:{row}:{file.paths[row] or ''}" for file, row in rows]
    name = PurePosixPath(str(address).rstrip("/")).name
    return EncodedDataset(name, ids, _ImageColumn(files), labels, classes)


@dataclass(frozen=True)
class _File:
    """One Parquet file: everything but the images."""

    files: Any  # the fsspec file system it is on
    path: str
    name: str
    column: str  # that of the images
    groups: tuple[int, ...]  # rows of each row group
    paths: list[str | None]
    labels: list[int | None]
    classes: list[str]


class _ImageColumn(Sequence[bytes]):
    """The bytes of images, read by row group when they are needed."""

    def __init__(self, files: list[_File]) -> None:
        self.groups = [(file, group) for file in files for group in range(len(file.groups))]
        self.ends = np.cumsum([file.groups[group] for file, group in self.groups])
        self.columns: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "columns": {}}  # another process reads for itself

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: Any) -> Any:
        number = int(np.searchsorted(self.ends, index, side="right"))
        file, group = self.groups[number]
        row = index - int(self.ends[number]) + file.groups[group]
        value = self._column(number)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None:
            raise DataError(
                f"row {row + sum(file.groups[:group])} of {file.path} holds no image bytes in {file.column!r}; "
                "write the file again with the images inside it"
            )
        return content

    def _column(self, number: int) -> Any:
        columns = self.columns
        if number not in columns:
            file, group = self.groups[number]
            with _open(file.files, file.path) as opened:
                column = opened.read_row_group(group, columns=[file.column])[file.column]
            if sum(stored.nbytes for stored in list(columns.values())) + column.nbytes > IN_MEMORY:
                columns = self.columns = {}
            columns[number] = column
        return columns[number]


def is_local(address: str) -> bool:
    """Whether an address is a path on this machine, and names no other file system, also not in a chain.

    >>> [is_local(a) for a in ("data/*.parquet", "file:///data", "s3://bucket/a", "simplecache::file:///a", "data:,x")]
    [True, True, False, False, False]
    """
    path = address.removeprefix("file://")
    return "://" not in path and "::" not in path and not path.startswith(("data:", "//", "\\\\"))


def _list_files(address: str) -> list[tuple[Any, str, str]]:
    """File system, path and name of every file at an address."""
    import fsspec  # type: ignore[import-untyped,unused-ignore]

    try:
        files, path = fsspec.core.url_to_fs(address)
        if files.isfile(path):
            paths = [path]
        elif files.isdir(path):
            paths = sorted(p for p in files.ls(path, detail=False) if p.endswith(".parquet"))
        else:
            paths = sorted(files.glob(path))
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


@contextmanager
def _open(files: Any, path: str) -> Iterator[Any]:
    try:
        with files.open(path, "rb") as raw, parquet.ParquetFile(raw) as file:
            yield file
    except PatchCleanserError:
        raise
    except Exception as error:  # Arrow's, the operating system's or the file system's
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error


def _read_file(files: Any, path: str, name: str) -> _File:
    with _open(files, path) as file:
        schema, meta = file.schema_arrow, file.metadata
        image = _image_column(schema, path)
        label = next((column for column in LABELS if column in schema.names), None)
        if label is not None and not pa.types.is_integer(schema.field(label).type):
            raise DataError(f"{path} has {schema.field(label).type} in {label!r}; labels are whole numbers from 0")
        has_paths = _has_field(schema.field(image).type, "path")
        table = file.read(columns=[f"{image}.path"] * has_paths + [label] * (label is not None))
    return _File(
        files,
        path,
        name,
        column=image,
        groups=tuple(meta.row_group(group).num_rows for group in range(meta.num_row_groups)),
        paths=[value and value["path"] for value in table[image].to_pylist()] if has_paths else [None] * meta.num_rows,
        labels=table[label].to_pylist() if label is not None else [None] * meta.num_rows,
        classes=_class_names(schema, label, path),
    )


def _image_column(schema: Any, path: str) -> str:
    column = next((column for column in IMAGES if column in schema.names), None)
    if column is None:
        raise DataError(f"{path} has no column 'image' or 'img', only {schema.names}")
    kind = schema.field(column).type
    inner = kind.field("bytes").type if _has_field(kind, "bytes") else kind
    if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
        raise DataError(f"{path} has {kind} in {column!r}; encoded images are binary, or struct<bytes, path>")
    return str(column)


def _has_field(kind: Any, field: str) -> bool:
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
