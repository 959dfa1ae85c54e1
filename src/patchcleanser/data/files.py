"""Folders of pictures and Parquet files in the Hugging Face image layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import ArrowInvalid, parquet

from patchcleanser.data.base import Dataset, EncodedDataset
from patchcleanser.errors import DataError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class _Files(Sequence[bytes]):
    """File contents, read when asked for, so that a folder of any size fits."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.paths[index].read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.paths[index]}: {error.strerror}") from error


def load_folder(path: str | Path) -> Dataset:
    """Pictures in class folders (class/picture.jpg), or, without any folders, unlabelled ones."""
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"no folder at {root}")
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"no pictures in {root}; known endings: {' '.join(sorted(SUFFIXES))}")
    ids = [p.relative_to(root).as_posix() for p in files]
    folders = sorted({i.split("/")[0] for i in ids if "/" in i})
    if not folders or any("/" not in i for i in ids):
        return EncodedDataset(root.name, ids, _Files(files))
    labels = np.array([folders.index(i.split("/")[0]) for i in ids], dtype=np.int64)
    return EncodedDataset(root.name, ids, _Files(files), labels, folders)


def load_parquet(path: str | Path) -> Dataset:
    """Parquet with image: struct<bytes, path> and, if labelled, label; a file, a folder or a pattern."""
    root = Path(path)
    found = sorted(root.glob("*.parquet")) if root.is_dir() else sorted(root.parent.glob(root.name))
    if not found:
        raise DataError(f"no Parquet file at {path}")
    ids: list[str] = []
    contents: list[bytes] = []
    labels: list[int] = []
    classes: list[str] = []
    for file in found:
        try:
            table = parquet.read_table(file)
        except (ArrowInvalid, OSError) as error:
            raise DataError(f"{file} is not a whole Parquet file: {error}") from error
        if "image" not in table.column_names:
            raise DataError(f"{file} has no column 'image', only {table.column_names}")
        for row, image in enumerate(table["image"].to_pylist()):
            ids.append(f"{file.name}:{row}:{image.get('path') or ''}")
            contents.append(image["bytes"])
        if "label" in table.column_names:
            labels += table["label"].to_pylist()
        names = (table.schema.metadata or {}).get(b"class_names")
        classes = json.loads(names) if names else classes
    if not labels:
        return EncodedDataset(root.name, ids, contents)
    classes = classes or [str(k) for k in range(max(labels) + 1)]
    return EncodedDataset(root.name, ids, contents, np.array(labels, dtype=np.int64), classes)
