"""A name or an address to a dataset."""

from __future__ import annotations

from pathlib import Path

from patchcleanser.data.base import Dataset
from patchcleanser.data.cifar10 import load_cifar10
from patchcleanser.data.files import load_folder, load_parquet
from patchcleanser.errors import DataError


def load_dataset(name: str, *, split: str = "test", root: str | Path | None = None) -> Dataset:
    """``cifar10``, ``folder:PATH`` or ``parquet:PATH`` (a file, a folder of them, or a pattern).

    `root` is where the files of a named dataset lie; without it they are fetched and cached.
    """
    kind, _, rest = name.partition(":")
    if kind == "folder" and rest:
        return load_folder(rest)
    if kind == "parquet" and rest:
        return load_parquet(rest)
    if name == "cifar10":
        return load_cifar10(split, root)
    raise DataError(f"no dataset {name!r}; write cifar10, folder:PATH or parquet:PATH")
