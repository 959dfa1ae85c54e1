"""What made a result: the command, package versions and hardware."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import patchcleanser


def origin() -> dict[str, Any]:
    """How a run or weights came about: the command and what it ran on."""
    return {"command": shlex.join(["patchcleanser", *sys.argv[1:]]), "versions": versions()}


def versions() -> dict[str, str]:
    """What the numbers depend on besides the settings: package versions and hardware."""
    return {
        "patchcleanser": patchcleanser.__version__,
        **{name: version(name) for name in ("torch", "timm", "numpy")},
        "python": platform.python_version(),
        "hardware": _gpu() or _processor(),
    }


def _gpu() -> str | None:
    """The name of the GPU, if there is one; who never loaded torch used none."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


def _processor() -> str:
    """The processor's name, where the system tells it, and its cores."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(named or [platform.processor() or platform.machine()])[0]}, {os.cpu_count()} cores"
