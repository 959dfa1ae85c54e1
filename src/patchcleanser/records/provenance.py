"""What produced a result: the manifest of a run, with its key and checksum; command, versions and hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import patchcleanser
from patchcleanser.errors import RecordError
from patchcleanser.records.atomic import whole_file

FORMAT = 1
MANIFEST = "manifest.json"

RESTORE = "restore it, or delete it and run the same command again: rows that have checksums are kept"
"""What to do about a manifest that cannot be used."""


def key_of(facts: Any) -> str:
    """A hash of plain values, such as everything that decides the rows.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write the facts (job, images, batch, columns) with their checksum, and the metadata, which decides nothing."""
    content = {"format": FORMAT, "key": key_of(facts["job"]), **facts}
    content |= {"checksum": key_of(content), "about": metadata}
    with whole_file(folder / MANIFEST) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a run; one of an older version has no checksum and no columns."""
    path = folder / MANIFEST
    try:
        if folder.is_file():
            raise RecordError(f"{folder} is a file, not the folder of a run")
        if path.exists() and not path.is_file():  # reading a pipe or a device would never end
            raise RecordError(f"{path} is not a file; use another folder")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise RecordError(f"{path} has format {content['format']}, this version reads {FORMAT}")
        for problem in _problems(content):
            raise RecordError(f"{path} {problem}; {RESTORE}")
        return dict(content)
    except FileNotFoundError as error:
        below = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
        hint = f"; name one of those below it, such as {below[0]}" if below else ""
        raise RecordError(f"no run in {folder}: it holds no {MANIFEST}{hint}") from error
    except PermissionError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; make it readable") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is damaged ({error}); {RESTORE}") from error


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    """How a manifest differs from what was written, or from what can be true."""
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
            yield f"is damaged: {name} must be at least 1, got {short(number)}"
    if not isinstance(content["about"], dict):
        yield f"is damaged: its metadata (about) must be an object, got {short(content['about'])}"


def short(value: Any) -> str:
    """A value as text of at most 40 characters; of a hash the first 8.

    >>> short([1, None]), short(key_of({}))
    ('[1, null]', '44136fa3…')
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    length = 8 if text.isalnum() else 37
    return text if len(text) <= 40 else f"{text[:length]}…"


def origin() -> dict[str, Any]:
    """The command that makes a run or weights, and what it runs on."""
    return {"command": shlex.join(["patchcleanser", *sys.argv[1:]]), "versions": versions()}


def versions() -> dict[str, str]:
    """What numbers depend on besides the settings: package versions and hardware."""
    return {
        "patchcleanser": patchcleanser.__version__,
        **{name: version(name) for name in ("torch", "timm", "numpy")},
        "python": platform.python_version(),
        "hardware": _gpu() or _processor(),
        **({"threads": str(sys.modules["torch"].get_num_threads())} if "torch" in sys.modules else {}),
    }


def _gpu() -> str | None:
    """The name of the GPU, if there is one and torch was loaded: otherwise none was used."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


def _processor() -> str:
    """The processor's name, where the system reports it, and its number of cores."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor() or platform.machine()])[0]}, {os.cpu_count()} cores"
