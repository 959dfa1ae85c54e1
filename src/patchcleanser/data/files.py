"""Folders of pictures: in class folders, beside a list of labels, or without labels."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchcleanser.data.base import EncodedDataset, labelled
from patchcleanser.data.splits import require_one_split
from patchcleanser.errors import DataError

SUFFIXES = {".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LISTS = ("labels.csv", "labels.txt")
CLASSES = "classes.txt"


class Files(Sequence[bytes]):
    """File contents, read when asked for, so that a folder of any size fits."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": [path.absolute() for path in self.paths]}  # another process may be in another folder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        path = self.paths[index]
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise DataError(f"cannot read {path}: it is no file")
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error


def load_folder(path: str | Path) -> EncodedDataset:
    """Pictures in class folders (class/picture.jpg), or those that labels.csv lists, or unlabelled ones.

    Every folder at the top is a class, in the order of names, also one without pictures, so that
    the classes keep their numbers. Pictures beside folders make all of them unlabelled.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"no folder at {root}")
    name = root.resolve().name
    for listed in LISTS:
        if (root / listed).is_file():
            return _listed(name, root, root / listed)
    ids = sorted(_pictures(root))
    if not ids:
        raise DataError(f"no pictures in {root}; known endings: {' '.join(sorted(SUFFIXES))}")
    files = Files([root / i for i in ids])
    if any("/" not in i for i in ids):
        return EncodedDataset(name, ids, files)
    folders = sorted(p.name for p in root.iterdir() if p.is_dir() and not _hidden(p.name))
    require_one_split(folders, f"folder:{root}", "/{}")
    number = {folder: label for label, folder in enumerate(folders)}
    labels = np.array([number[i.split("/")[0]] for i in ids], dtype=np.int64)
    return EncodedDataset(name, ids, files, labels, folders)


def has_class_folders(root: Path) -> bool:
    """Whether every folder at the top is a class: there is no list of labels, and no picture beside the folders."""
    if not root.is_dir() or any((root / listed).is_file() for listed in LISTS):
        return False
    return not any(path.suffix.lower() in SUFFIXES and path.is_file() for path in root.iterdir())


def _pictures(root: Path) -> list[str]:
    """Paths below `root`; links to folders are followed, unless they lead back up."""
    found = []
    for folder, folders, files in os.walk(root, followlinks=True):
        here = Path(folder)
        folders[:] = [f for f in folders if not _hidden(f) and not _leads_up(here / f)]
        below = "" if here == root else here.relative_to(root).as_posix() + "/"
        found += [below + f for f in files if not _hidden(f) and Path(f).suffix.lower() in SUFFIXES]
    return found


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # what a Mac leaves in zip files


def _leads_up(folder: Path) -> bool:
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


class _Line(NamedTuple):
    number: int
    path: str
    label: str


def _listed(name: str, root: Path, listed: Path) -> EncodedDataset:
    """The pictures that a list names, in its order, with its labels: class numbers or class names."""
    lines = _lines(root, listed)
    for line in lines:
        if not (root / line.path).is_file():
            raise DataError(f"line {line.number} of {listed} names {line.path!r}, which is not in {root}")
    names = _class_names(root)
    if all(re.fullmatch(r"-?\d+|", line.label) for line in lines):
        numbers = [int(line.label) if line.label else None for line in lines]
    else:
        names = names or sorted({line.label for line in lines if line.label})
        numbers = [_number(line, names, listed) for line in lines]
    labels, classes = labelled(numbers, names, lambda at: f"line {lines[at].number} of {listed}")
    ids = [line.path for line in lines]
    return EncodedDataset(name, ids, Files([root / i for i in ids]), labels, classes)


def _number(line: _Line, names: Sequence[str], listed: Path) -> int | None:
    if not line.label:
        return None
    if line.label not in names:
        raise DataError(f"line {line.number} of {listed} has label {line.label!r}, which is not in {CLASSES}")
    return names.index(line.label)


def _lines(root: Path, listed: Path) -> list[_Line]:
    lines: dict[str, _Line] = {}
    for number, text in enumerate(_text(listed).splitlines(), start=1):
        cells = next(csv.reader([text])) if "," in text else text.split(maxsplit=1)
        if not cells:
            continue
        if len(cells) != 2:
            raise DataError(f"line {number} of {listed} has {len(cells)} columns; write path,label")
        path, label = cells[0].strip(), cells[1].strip()
        if not lines and label.lower() in ("label", "class") and not (root / path).is_file():
            continue  # the heading of the columns
        if path in lines:
            raise DataError(f"line {number} of {listed} names {path!r} again, after line {lines[path].number}")
        lines[path] = _Line(number, path, label)
    return list(lines.values())


def _class_names(root: Path) -> list[str]:
    """The lines of classes.txt, if there is one."""
    path = root / CLASSES
    return [line.strip() for line in _text(path).splitlines() if line.strip()] if path.is_file() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a mark at the start
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; it must be UTF-8 text") from error
