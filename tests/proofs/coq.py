"""Values computed by Coq from the definitions in proofs/."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

PROOFS = Path(__file__).parents[2] / "proofs"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PROOFS.glob("*.v"))}

needs_coq = pytest.mark.skipif(shutil.which("coqc") is None, reason="needs coqc (apt-get install coq)")


def run_coq(folder: Path, text: str) -> str:
    """What Coq prints for a file that imports the compiled proofs."""
    path = folder / "Query.v"
    path.write_text(text, encoding="utf-8")
    command = ["coqc", "-q", "-noglob", "-Q", ".", "PatchCleanser", path.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compute(folder: Path, modules: str, expressions: Iterable[str]) -> list[Any]:
    """The values of expressions: numbers, booleans, pairs, options and lists of them."""
    header = (
        f"From Coq Require Import List ZArith.\nFrom PatchCleanser Require Import {modules}.\nImport ListNotations.\n"
    )
    header += "Set Printing Width 1000000. Set Printing Depth 1000000.\n"
    printed = run_coq(folder, header + "\n".join(f"Eval vm_compute in ({e})." for e in expressions))
    return [
        python_value(text) for text in re.findall(r"^     = (.*?)\n     : ", printed, flags=re.DOTALL | re.MULTILINE)
    ]


def python_value(text: str) -> Any:
    """Coq's notation as Python's: a list for a list, a tuple for a pair, `Some x` as (x,)."""
    text = re.sub(r"Some (\w+)", r"(\1,)", text.replace(";", ",").replace("%Z", ""))
    return ast.literal_eval(text.replace("true", "True").replace("false", "False"))


def coq(value: Any) -> str:
    """A Python value in Coq's notation."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({', '.join(map(coq, value))})"
    if isinstance(value, Sequence):
        return f"[{'; '.join(map(coq, value))}]"
    return str(value)
