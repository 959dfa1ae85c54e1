"""What a folder holds before a run begins in it: nothing, what is left of a run, or somebody else's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchcleanser.errors import RecordError
from patchcleanser.records.provenance import MANIFEST, key_of
from patchcleanser.records.shards import read_header

LEFTOVERS = ("lock", "gallery", "report", "tensorboard")
"""What may be left of a run that lost its manifest or has no checkpoint yet, besides rows and hidden files."""

ANOTHER_FOLDER = "use another folder (--out, in Python folder=)"
"""What to do about a folder that cannot be written."""

RUNS_BELOW = f"*/{MANIFEST}"
"""The manifests of a sweep's runs, each in a folder of its own."""


def require_free(folder: Path, ours: str = "rows-*.parquet") -> None:
    """Refuse a folder of other files: among class folders, a run's own folder of pictures would be one more class.

    A folder that holds files of `ours` is taken, and `batch_of_shards` checks whose rows those are.
    """
    if not folder.is_dir() or not any(folder.glob(ours)):
        require_only(folder, LEFTOVERS, "is not empty and holds no run to continue")


def require_only(folder: Path, names: Collection[str], otherwise: str) -> None:
    """Refuse a file, and a folder with other files than these and hidden ones; `otherwise` says what it lacks."""
    if folder.is_file():
        raise RecordError(f"{folder} is a file, not a folder; {ANOTHER_FOLDER}")
    paths = folder.iterdir() if folder.is_dir() else ()
    foreign = sorted(path.name for path in paths if path.name not in names and path.name[0] != ".")
    if foreign:
        more = f" and {len(foreign) - 3:,} more" if len(foreign) > 3 else ""
        raise RecordError(f"{folder} {otherwise}, but {', '.join(foreign[:3])}{more}; {ANOTHER_FOLDER}")


def batch_of_shards(folder: Path, job: Mapping[str, Any], images: int) -> int | None:
    """The batch size by the shards of a lost manifest; RecordError if they are not of this job."""
    shards = sorted(folder.glob("rows-*.parquet"))
    headers = [header for header in map(read_header, shards) if header is not None]
    ours = [header for header in headers if (header.get("key"), header.get("images")) == (key_of(job), images)]
    if shards and not ours:
        raise RecordError(
            f"{folder} holds rows but no {MANIFEST}, and none of them belongs to this job; {ANOTHER_FOLDER}"
        )
    return int(ours[0]["batch"]) if ours else None


def require_no_links(paths: Sequence[Path]) -> None:
    """Refuse to write through a symbolic link: it may point anywhere."""
    for path in paths:
        if path.is_symlink():
            raise RecordError(
                f"{path} is a symbolic link, and nothing is written through links; replace it by a file, or delete it"
            )
