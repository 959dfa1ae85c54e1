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
from numpy.typing import NDArray
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
    files = _read_files(str(address))
    where = [f"row {row} of {file.name}" for file, row in _rows(files)]
    labels, classes = parse_labels(
        [label for file in files for label in file.labels], files[0].classes, where.__getitem__
    )
    return _images(str(address), files, labels, classes)


def load_parquet_lists(address: str) -> tuple[EncodedDataset, list[list[int]], tuple[str, ...]]:
    """Images, a list of class numbers for each, and class names, which the files must hold."""
    files = _read_files(address, lists=True)
    classes = tuple(files[0].classes)
    if not classes:
        raise DataError(
            f"{files[0].path} names no classes; write them into the schema's metadata, in class_names as a JSON list"
        )
    for file, row in _rows(files):
        labels = file.labels[row]
        if labels is None or not all(label is not None and 0 <= label < len(classes) for label in labels):
            raise DataError(f"row {row} of {file.name} has the labels {labels}; they go from 0 to {len(classes) - 1}")
    return _images(address, files), [labels for file in files for labels in file.labels], classes


def _read_files(address: str, *, lists: bool = False) -> list[_File]:
    files = [_read_file(files, path, name, lists=lists) for files, path, name in _list_files(address)]
    for file in files[1:]:
        if file.classes != files[0].classes:
            raise DataError(f"{files[0].name} and {file.name} name different classes; load them one by one")
    return files


def _rows(files: list[_File]) -> list[tuple[_File, int]]:
    return [(file, row) for file in files for row in range(sum(file.groups))]


def _images(
    address: str, files: list[_File], labels: NDArray[np.int64] | None = None, classes: Sequence[str] = ()
) -> EncodedDataset:
    ids = [f"{file.name}:{row}:{file.paths[row] or ''}" for file, row in _rows(files)]
    return EncodedDataset(PurePosixPath(address.rstrip("/")).name, ids, _ImageColumn(files), labels, classes)


@dataclass(frozen=True)
class _File:
    """One Parquet file: everything but the images. Labels are whole numbers, or lists of them."""

    files: Any  # the fsspec file system it is on
    path: str
    name: str
    column: str  # that of the images
    groups: tuple[int, ...]  # rows of each row group
    paths: list[str | None]
    labels: list[Any]
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


def _read_file(files: Any, path: str, name: str, *, lists: bool) -> _File:
    with _open(files, path) as file:
        schema, meta = file.schema_arrow, file.metadata
        image = _image_column(schema, path)
        label = next((column for column in LABELS if column in schema.names), None)
        _check_labels(schema, label, path, lists=lists)
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


def _check_labels(schema: Any, label: str | None, path: str, *, lists: bool) -> None:
    kind = pa.null() if label is None else schema.field(label).type
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if several and not lists and pa.types.is_integer(kind.value_type):
        raise DataError(
            f"{path} has several labels for each image; train with --recipe multilabel, certify with --task multilabel"
        )
    if lists and not (several and pa.types.is_integer(kind.value_type)):
        held = "no labels" if label is None else f"{kind} in {label!r}"
        raise DataError(f"{path} has {held}; wanted are lists of whole numbers, list<int>, in 'labels'")
    if not lists and label is not None and not pa.types.is_integer(kind):
        raise DataError(f"{path} has {kind} in {label!r}; labels are whole numbers from 0")


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
            feature = features.get(label, {})
            names = feature.get("names") or feature.get("feature", {}).get("names") or []  # of a list: those inside it
        return [str(name) for name in names]
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path} has class names that are no JSON list: {error}") from error
