"""Folders of image files: in class folders, beside a list of labels, or without labels."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchcleanser.data.dataset import EncodedDataset, parse_labels, require_one_split
from patchcleanser.errors import DataError

SUFFIXES = {".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LISTS = ("labels.csv", "labels.txt")
CLASSES = "classes.txt"


class FileContents(Sequence[bytes]):
    """The bytes of files, read when they are needed, so that folders of any size can be used."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": [path.absolute() for path in self.paths]}  # another process may be in another folder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        path = self.paths[index]
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise DataError(f"cannot read {path}: it is not a regular file")
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error


def load_folder(path: str | Path) -> EncodedDataset:
    """Images in class folders (class/picture.jpg), or those that labels.csv lists, or unlabelled ones.

    Every folder at the top is a class, in the order of names, also one without images, so that
    classes keep their numbers. Images beside folders make all of them unlabelled.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"{root} is a file, not a folder" if root.is_file() else f"no folder at {root}")
    name = root.resolve().name
    for file in LISTS:
        if (root / file).is_file():
            return _load_listed(name, root, root / file)
    ids = sorted(_image_files(root))
    if not ids:
        raise DataError(f"no pictures in {root}; known endings: {' '.join(sorted(SUFFIXES))}")
    contents = FileContents([root / i for i in ids])
    if any("/" not in i for i in ids):
        return EncodedDataset(name, ids, contents)
    folders = sorted(p.name for p in root.iterdir() if p.is_dir() and not _is_hidden(p.name))
    require_one_split(folders, f"folder:{root}", "/{}")
    numbers = {folder: number for number, folder in enumerate(folders)}
    labels = np.array([numbers[i.split("/")[0]] for i in ids], dtype=np.int64)
    return EncodedDataset(name, ids, contents, labels, folders)


def has_class_folders(root: Path) -> bool:
    """Whether every folder at the top is a class: there is no list of labels, and no image beside the folders."""
    if not root.is_dir() or any((root / file).is_file() for file in LISTS):
        return False
    return not any(path.suffix.lower() in SUFFIXES and path.is_file() for path in root.iterdir())


def _image_files(root: Path) -> list[str]:
    """Paths relative to `root`; links to folders are followed, unless they lead back up."""
    paths = []
    for name, folders, files in os.walk(root, followlinks=True):
        folder = Path(name)
        folders[:] = [f for f in folders if not _is_hidden(f) and not _leads_up(folder / f)]
        prefix = "" if folder == root else folder.relative_to(root).as_posix() + "/"
        paths += [prefix + f for f in files if not _is_hidden(f) and Path(f).suffix.lower() in SUFFIXES]
    return paths


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # macOS leaves this in zip files


def _leads_up(folder: Path) -> bool:
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


class _ListedImage(NamedTuple):
    line: int
    path: str
    label: str


def _load_listed(name: str, root: Path, list_file: Path) -> EncodedDataset:
    """The images in a list, in its order, with its labels: class numbers or class names."""
    rows = _read_list(root, list_file)
    for row in rows:
        if not (root / row.path).is_file():
            raise DataError(f"line {row.line} of {list_file} names {row.path!r}, which is not in {root}")
    lines = _read_text(root / CLASSES).splitlines() if (root / CLASSES).is_file() else []
    names = [line.strip() for line in lines if line.strip()]
    if all(re.fullmatch(r"-?\d+|", row.label) for row in rows):
        numbers = [int(row.label) if row.label else None for row in rows]
    else:
        names = names or sorted({row.label for row in rows if row.label})
        numbers = [_class_number(row, names, list_file) for row in rows]
    labels, classes = parse_labels(numbers, names, lambda index: f"line {rows[index].line} of {list_file}")
    ids = [row.path for row in rows]
    return EncodedDataset(name, ids, FileContents([root / i for i in ids]), labels, classes)


def _class_number(row: _ListedImage, names: Sequence[str], list_file: Path) -> int | None:
    if not row.label:
        return None
    if row.label not in names:
        raise DataError(f"line {row.line} of {list_file} has label {row.label!r}, which is not in {CLASSES}")
    return names.index(row.label)


def _read_list(root: Path, list_file: Path) -> list[_ListedImage]:
    rows: dict[str, _ListedImage] = {}
    for line, text in enumerate(_read_text(list_file).splitlines(), start=1):
        cells = next(csv.reader([text])) if "," in text else text.split(maxsplit=1)
        if not cells:
            continue
        if len(cells) != 2:
            raise DataError(f"line {line} of {list_file} has {len(cells)} columns; write path,label")
        path, label = cells[0].strip(), cells[1].strip()
        if not rows and label.lower() in ("label", "class") and not (root / path).is_file():
            continue  # the heading of the columns
        if path in rows:
            raise DataError(f"line {line} of {list_file} names {path!r} again, after line {rows[path].line}")
        rows[path] = _ListedImage(line, path, label)
    return list(rows.values())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; it must be UTF-8 text") from error
