"""Commands that need no model never import torch, which takes seconds and 700 MB."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patchcleanser import Job, Threat, evaluate, load_classifier, load_dataset
from patchcleanser.data import chosen

SCRIPT = """
import sys
from patchcleanser.cli.app import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
sys.exit("torch" in sys.modules)
"""


def words(folder: Path) -> list[str]:
    job = Job(load_classifier("zoo:tiny", device="cpu"), chosen(load_dataset("sample"), 2), Threat.square(5), masks=2)
    run = evaluate(job, folder / "run")
    return ["report", str(run.folder), "--out", str(folder / "report")]


def claiming(folder: Path) -> list[str]:
    words(folder)
    return ["claim", "run", "--by", "A. Author", "--out", "claim.json"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "help": lambda _: ["--help"],
    "help of certify": lambda _: ["certify", "--help"],
    "masks": lambda _: ["masks", "--patch", "32", "--image", "224"],
    "data": lambda _: ["data"],
    "report": words,
    "claim": claiming,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_a_model_does_not_import_torch(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, *COMMANDS[name](tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
