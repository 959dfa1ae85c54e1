"""A name or an address to a dataset."""

from __future__ import annotations

from pathlib import Path

from patchcleanser.data.base import Dataset
from patchcleanser.data.cifar10 import load_cifar10
from patchcleanser.data.files import load_folder, load_parquet
from patchcleanser.errors import DataError

SAMPLE = Path(__file__).parent / "sample.parquet"
"""300 CIFAR-10 test images, 30 per class; where they come from stands in the file's metadata."""


def load_dataset(name: str, *, split: str = "test", root: str | Path | None = None) -> Dataset:
    """``sample``, ``cifar10``, ``folder:PATH`` or ``parquet:PATH`` (a file, a folder, or a pattern).

    ``sample`` is 300 CIFAR-10 test images that come with the package. `root` is where the files
    of a named dataset lie; without it they are fetched and cached.
    """
    kind, _, rest = name.partition(":")
    if kind == "folder" and rest:
        return load_folder(rest)
    if kind == "parquet" and rest:
        return load_parquet(rest)
    if name == "sample":
        return load_parquet(SAMPLE)
    if name == "cifar10":
        return load_cifar10(split, root)
    raise DataError(f"no dataset {name!r}; write sample, cifar10, folder:PATH or parquet:PATH")
