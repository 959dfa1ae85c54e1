"""Training that is killed with kill -9, again and again, by the real commands."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchcleanser import load_classifier

TRAIN = ["train", "--model", "net:tiny", "--data", "sample", "--limit", "60", "--set", "epochs=6", "--set", "batch=20"]
HARDEN = ["harden", "--model", "zoo:tiny", "--images", "sample", "--limit", "30", "--epochs", "4", "--batch", "10"]
COMMANDS = {"train": TRAIN, "harden": [*HARDEN, "--tries", "1", "--patch", "5"]}


def start(words: list[str], out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "patchcleanser", *words, "--device", "cpu", "--json", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def weights(out: Path) -> str:
    return str(json.loads((out / "card.json").read_text())["weights_sha256"])


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_killed_in_the_middle_goes_on_and_ends_with_the_same_weights(
    words: list[str], tmp_path: Path
) -> None:
    out, draw = tmp_path / "killed", random.Random(0)
    for kill in range(3):
        child = start(words, out)
        while child.poll() is None and not (out / "checkpoint.pt").is_file() and not list(out.glob(".checkpoint*")):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 2) if kill else 0)  # the first as soon as anything is written
        child.kill()
        child.communicate()
    if not (out / "card.json").is_file():  # or the last one had ended before it was killed
        child = start(words, out)
        _, errors = child.communicate()
        assert child.returncode == 0, errors
    unbroken = start(words, tmp_path / "whole")
    assert unbroken.communicate()[1] is not None
    assert unbroken.returncode == 0
    assert weights(out) == weights(tmp_path / "whole")
    assert load_classifier(f"trained:{out}", device="cpu").classes == 10
    assert not (out / "checkpoint.pt").exists()
    assert not list(out.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_half_written_checkpoint_is_left_out_and_a_damaged_one_is_named(words: list[str], tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.pt.abc").write_bytes(b"half")
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    child = start(words, tmp_path)
    errors = child.communicate()[1].decode()
    assert child.returncode == 2
    assert "checkpoint.pt is damaged" in errors
    assert "delete it to start again" in errors
    (tmp_path / "checkpoint.pt").unlink()
    child = start(words, tmp_path)
    assert child.communicate()[1] is not None
    assert child.returncode == 0
    assert not list(tmp_path.glob(".*"))
