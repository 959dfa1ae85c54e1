"""The proofs, compiled once."""

import shutil
import subprocess
from pathlib import Path

import pytest

from proofs.coq import PROOFS


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of proofs/ that Coq has accepted."""
    folder = tmp_path_factory.mktemp("proofs") / "compiled"
    folder.mkdir()
    for source in [*PROOFS.glob("*.v"), PROOFS / "Makefile"]:  # not what Coq may have left there
        shutil.copy(source, folder)
    done = subprocess.run(["make", "-C", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
