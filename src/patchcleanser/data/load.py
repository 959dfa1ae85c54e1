"""A name or an address to a dataset."""

from __future__ import annotations

from pathlib import Path

from patchcleanser.data.base import Dataset
from patchcleanser.data.files import load_folder
from patchcleanser.data.named import NAMED, load_named
from patchcleanser.data.parquet import is_local, load_parquet
from patchcleanser.errors import DataError, TrustError

SAMPLE = Path(__file__).parent / "sample.parquet"
"""300 CIFAR-10 test images, 30 per class; where they come from stands in the file's metadata."""

DATASETS: dict[str, str] = {
    "sample": "300 CIFAR-10 test images that come with the package",
    **{name: known.words for name, known in NAMED.items()},
    "folder:PATH": "pictures in class folders, or beside labels.csv, or without labels",
    "parquet:PATH": "a file, folder or pattern in the Hugging Face image layout, here or at s3://, https://, …",
}
"""What can be named, and what it is."""


def load_dataset(
    name: str,
    *,
    split: str = "test",
    root: str | Path | None = None,
    trust_code: bool = False,
    named_by: str | Path | None = None,
) -> Dataset:
    """A dataset by name (one of DATASETS).

    `split` is train, val or test; val and test are the same where a dataset has only one of them,
    and sample, folder:PATH and parquet:PATH are taken whole. `root` is where the files of a named
    dataset lie; without it they are in the cache, or are downloaded into it.

    If the name was read from a file, `named_by` is that file. Then an address elsewhere (``parquet:https://…``) is a
    TrustError unless `trust_code` says that the file is trusted.
    """
    if name in NAMED:
        return load_named(name, split, root)
    kind, _, address = name.partition(":")
    if root is not None and (name == "sample" or kind in ("folder", "parquet")):
        raise DataError(f"{name} says itself where it lies and takes no root, got {root}")
    if name == "sample":
        return load_parquet(SAMPLE)
    if kind == "folder" and address:
        return load_folder(address)
    if kind == "parquet" and address:
        if named_by is not None and not trust_code and not is_local(address):
            raise TrustError.of(named_by, name, "is an address elsewhere")
        return load_parquet(address)
    raise DataError(f"no dataset {name!r}; there are {', '.join(DATASETS)}")
