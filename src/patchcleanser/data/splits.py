"""Names of splits: train, val and test."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from patchcleanser.errors import DataError

SPLITS = frozenset({"train", "test", "val", "valid", "validation"})
TWINS = {"test": "val", "val": "test"}


def split_of(title: str, splits: Collection[str], split: str) -> str:
    """The split that is meant; test and val are one where a dataset has only one of them.

    >>> split_of("ImageNet", ("train", "val"), "test")
    'val'
    """
    for name in (split, TWINS.get(split, split)):
        if name in splits:
            return name
    raise DataError(f"{title} has the splits {', '.join(splits)}; got {split!r}")


def require_one_split(found: Iterable[str], address: str, example: str) -> None:
    """Refuse to take several splits for one dataset, or splits for classes."""
    splits = sorted(set(found))
    if len(splits) > 1 and SPLITS.issuperset(splits):
        raise DataError(
            f"{address} holds the splits {', '.join(splits)}; name one: {address}{example.format(splits[0])}"
        )
