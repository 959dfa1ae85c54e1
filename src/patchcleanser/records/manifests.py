"""Manifests: what produced the rows of a run, with a checksum of all that must not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchcleanser.errors import RecordError
from patchcleanser.records.atomic import whole_file

FORMAT = 1
MANIFEST = "manifest.json"

RESTORE = "restore it, or delete it and run the same command again: rows that have checksums are kept"
"""What to do about a manifest that cannot be used."""


def key_of(facts: Any) -> str:
    """A hash of plain values, as of everything that decides the rows.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Keep the facts (job, images, batch, columns) with their checksum, and the circumstances, which decide nothing."""
    content = {"format": FORMAT, "key": key_of(facts["job"]), **facts}
    content |= {"checksum": key_of(content), "about": metadata}
    with whole_file(folder / MANIFEST) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run, checked; one of an older version has no checksum and no columns."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise RecordError(f"{path} is no file; use another folder")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise RecordError(f"{path} has format {content['format']}, this version reads {FORMAT}")
        for what in _changes(content):
            raise RecordError(f"{path} {what}; {RESTORE}")
        return dict(content)
    except FileNotFoundError as error:
        raise RecordError(f"no run in {folder}: it holds no {MANIFEST}") from error
    except PermissionError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; make it readable") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is damaged ({error}); {RESTORE}") from error


def _changes(content: Mapping[str, Any]) -> Iterator[str]:
    """How a manifest differs from what was written, or from what can be."""
    job, images, batch = content["job"], content["images"], content["batch"]
    if content["key"] != key_of(job):
        yield "was changed by hand: its key does not fit its job"
    facts = {name: value for name, value in content.items() if name not in ("checksum", "about")}
    if "checksum" in content and content["checksum"] != key_of(facts):
        yield "does not match its checksum: it was changed after it was written"
    if job.get("images", images) != images:
        yield f"was changed by hand: it has {short(images)} images, and its job {short(job['images'])}"
    for name, number in (("images", images), ("batch", batch)):
        if type(number) is not int or number < 1:
            yield f"is damaged: {name} is at least 1, got {short(number)}"
    if not isinstance(content["about"], dict):
        yield f"is damaged: its circumstances (about) are no object, got {short(content['about'])}"


def short(value: Any) -> str:
    """A value in a few words.

    >>> short([1, None])
    '[1, null]'
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"
