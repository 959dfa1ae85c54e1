"""Folders that cannot be written, at first or in the middle of a run: one sentence, and no finished row is lost."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from patchcleanser.records.run import TIMES, Run

pytestmark = pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may write anywhere, and setpriv is not here"
)

# Without these capabilities root is held to the permissions of files as everybody else is.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
CERTIFY = ["certify", "--limit", "24", "--masks", "3", "--batch", "2", "--device", "cpu", "--json", "--out"]


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [*ORDINARY, sys.executable, "-m", "patchcleanser", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def outcome(child: subprocess.Popen[str]) -> tuple[int, str]:
    """How a command ended, and what it said of it."""
    _, message = child.communicate()
    return child.returncode, message


def rows(folder: Path) -> pa.Table:
    return Run.open(folder).read().drop_columns(list(TIMES))


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write into."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


def test_a_run_into_a_read_only_folder_is_refused_in_one_sentence(closed: Path) -> None:
    code, message = outcome(start(*CERTIFY, closed / "run"))
    assert code == 2
    assert message == f"error: cannot write {closed / 'run' / 'manifest.json'}: Permission denied; use another folder\n"


def read_only(child: subprocess.Popen[str], folder: Path) -> None:
    folder.chmod(0o555)


def full(child: subprocess.Popen[str], folder: Path) -> None:
    """As on a full disk no file can be written; what is there stays."""
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "fix"), [(read_only, "use another folder"), (full, "free space, or use another folder")]
)
def test_a_disk_that_fails_in_the_middle_costs_no_finished_row(
    tmp_path: Path, harm: Callable[[subprocess.Popen[str], Path], None], fix: str
) -> None:
    folder = tmp_path / "run"
    child = start(*CERTIFY, folder)
    while child.poll() is None and not list(folder.glob("rows-*")):
        time.sleep(0.01)
    harm(child, folder)
    code, message = outcome(child)
    folder.chmod(0o755)
    assert code == 2, message
    assert message.startswith(f"error: cannot write {folder}/")
    assert fix in message
    assert message.count("\n") == 1
    left = Run.open(folder)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("rows-*")}
    assert done
    assert left.missing()
    assert len(left.read()) == 2 * len(done)
    assert not list(folder.glob(".*"))  # no half-written file
    assert outcome(start(*CERTIFY, folder))[0] == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert outcome(start(*CERTIFY, tmp_path / "unbroken"))[0] == 0
    assert rows(folder).equals(rows(tmp_path / "unbroken"))


@pytest.mark.slow
def test_a_finished_run_in_a_read_only_folder_is_reported_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert outcome(start(*CERTIFY, folder))[0] == 0
    folder.chmod(0o555)
    try:
        code, message = outcome(start("report", folder))
        elsewhere = outcome(start("report", folder, "--out", tmp_path / "report"))
    finally:
        folder.chmod(0o755)
    assert (code, message.count("\n")) == (2, 1)
    assert message.startswith(f"error: cannot write {folder / 'report'}")
    assert elsewhere[0] == 0, elsewhere[1]
