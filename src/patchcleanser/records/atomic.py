"""Write files completely or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from patchcleanser.errors import DataError


class KeptInterrupt(KeyboardInterrupt):
    """Ctrl-C after something was written, from which the same work goes on."""


@contextmanager
def interruptible(written: Callable[[], bool]) -> Iterator[None]:
    """Make Ctrl-C a KeptInterrupt if something was written by then."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if written():
            raise KeptInterrupt from stop
        raise


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a path that leads out of its folder: a folder from elsewhere may hold symbolic links."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path} is a link that leads to {path.resolve()}, outside of {folder}; delete the link")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes `target` if the block succeeds and is removed otherwise."""
    part: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        part = Path(name)
        yield part
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # the mode that open() gives; temporary files are private
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
        part.replace(target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        free = "free space, or use another folder (downloads go to PATCHCLEANSER_CACHE)"
        fix = free if full else "use another folder"
        raise DataError(f"cannot write {target}: {error.strerror or error}; {fix}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
