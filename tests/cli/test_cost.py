"""What a run will cost is said before it works, and how far it is fits a narrow terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from patchcleanser.cli.progress import LOGGER, notes
from patchcleanser.progress import progress_bar
from patchcleanser.records.run import Run

from .conftest import Command

QUICK = ["--device", "cpu", "-p", "5", "--masks", "2"]


def test_a_run_says_its_cost_before_its_first_batch(run: Command) -> None:
    done = run("certify", *QUICK, "-n", "4")
    first, *rest = done.err.splitlines()
    assert re.fullmatch(
        r"4 images × 11 classifications, 5×5 patch = 2\.4% of 32×32, about \d+ s at the speed measured now", first
    )
    assert rest[-1].startswith("5x5 patch, 2×2 masks, double-masking 4/4  certified ")


def test_the_papers_masks_cost_666_classifications_and_the_unmasked_one(run: Command) -> None:
    done = run("certify", "--device", "cpu", "-p", "5", "-n", "1", "--dry-run", "--json")
    (cost,) = json.loads(done.out)
    assert (cost["images"], cost["classifications_per_image"]) == (1, 667)
    assert cost["seconds"] > 0
    assert not Path("runs").exists()


def test_a_sweep_says_each_and_the_sum(run: Command) -> None:
    done = run("certify", *QUICK[:-1], "2,3", "-n", "2", "--dry-run")
    assert done.code == 0
    assert "2×2 masks, double-masking: 2 images × 11 classifications" in done.out
    assert "3×3 masks, double-masking: 2 images × 46 classifications" in done.out
    assert "2 runs: 114 classifications" in done.out


def test_a_run_that_goes_on_costs_what_is_left(run: Command) -> None:
    words = ["certify", *QUICK, "-n", "4", "-b", "2", "-o", "run"]
    assert run(*words).code == 0
    next(iter(sorted(Path("run").glob("rows-*")))).unlink()
    done = run(*words)
    assert done.err.startswith("2 of 4 images × 11 classifications")
    assert "run: 2 of 4 images are already done" in done.err
    assert run(*words, "--dry-run").out == "all 4 images are done, nothing is left to compute\n"
    done = run(*words)
    assert done.err == "note: run: 4 of 4 images are already done\n"


def test_a_batch_that_takes_long_is_said_with_one_that_loses_less(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.cli.cost.seconds_per_label", lambda *words: 1.0)
    long = run("certify", *QUICK, "-n", "40", "--dry-run")
    assert (
        "rows are written after every 32 images, so a stop loses about 6 min of work; with --batch 1 less" in long.out
    )
    assert "rows are written" not in run("certify", *QUICK, "-n", "40", "-b", "1", "--dry-run").out


def test_other_defenses_and_attacks_have_costs_too(run: Command) -> None:
    done = run("certify", *QUICK, "-n", "1", "--defense", "minority-reports", "--dry-run")
    assert "1 image × 5 classifications" in done.out
    done = run("certify", "--device", "cpu", "-n", "1", "--defense", "ds", "--option", "keep=4", "--dry-run")
    assert "1 image × 33 classifications" in done.out
    for attack in ("apgd", "adaptive"):
        words = ["-n", "3", "--iterations", "7", "--locations", "2", "--target", "5", "--attack", attack, "--dry-run"]
        done = run("attack", *QUICK, *words)
        assert "3 images × (11 classifications and 14 attack steps)" in done.out, done.err
        assert "s at the speed measured now" in done.out
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["certify", "-n", "4"], ["attack", "-n", "2", "--iterations", "3"]])
def test_timing_beforehand_changes_no_row(words: list[str], run: Command) -> None:
    for out, more in (("timed", []), ("untimed", ["--quiet"])):
        assert run(*words, *QUICK, "-o", out, *more).code == 0
    timed, untimed = (Run.open(out).read().drop_columns(["seconds"]) for out in ("timed", "untimed"))
    assert timed.equals(untimed)


def test_many_masks_say_how_many_pairs_before_they_are_checked(run: Command) -> None:
    done = run("certify", "--device", "cpu", "-p", "5", "-n", "1", "--masks", "500", "--dry-run")
    assert done.err.startswith("note: 500×500 masks are more than the 28×28 places of a patch in an image of 32×32 px")
    assert "784 masks are used, and a certificate tries all 307,720 pairs of them" in done.err
    assert "307,721 classifications" in done.out
    done = run("certify", "--device", "cpu", "-p", "5", "-n", "1", "--masks", "28", "--dry-run")
    assert done.err == "note: 784 masks make 307,720 pairs; checking them takes a while\n"


def test_quiet_leaves_errors_and_results_only(run: Command) -> None:
    done = run("certify", *QUICK, "-n", "2", "--quiet")
    assert done.err == ""
    assert "certified" in done.out
    assert run("certify", *QUICK, "-n", "0", "--quiet").err.startswith("error: ")


@pytest.mark.parametrize(
    ("level", "shown"), [(logging.INFO, "note: few\nnote: odd\n"), (logging.WARNING, "note: odd\n")]
)
def test_what_the_package_logs_is_shown_as_notes(level: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with notes(level):
        LOGGER.info("few")
        logging.getLogger("patchcleanser.data").warning("odd")
    LOGGER.warning("after the command")
    assert capsys.readouterr().err.startswith(shown)


def lines(text: str) -> list[str]:
    """What a terminal shows, line by line."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_progress_line_fits_the_terminal_with_all_its_parts(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, highlight=False)
    with notes(logging.INFO), progress_bar("a run", True, total=50_000, seconds=3.9e6, console=console) as show:
        show(12_800, 50_000, "certified 61.2%  12.34 images/s")
    assert max(map(len, lines(screen.getvalue()))) <= width
    bars = [line for line in lines(screen.getvalue()) if "50000" in line]
    before, after = bars[0], bars[-1]
    assert re.match(r"━+ 0/50000 +1083:19:59 left", before)
    assert re.match(r"[━╸╺]{4,} 12800/50000 certified 61\.2%  12\.34 images/s 0:\d\d left", after)


def test_a_real_run_shows_its_bar_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "patchcleanser", "certify", *QUICK, "-n", "4", "-b", "2"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    child = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while chunk := _read(ours):
        text += chunk
    assert child.wait() == 0
    shown = lines(text.decode())
    bars = [line for line in shown if "/4" in line and "━" in line]
    assert "0/4" in bars[0]
    assert re.search(r"4/4 certified +[\d.]+%  [\d.]+ images/s in \d:\d\d", bars[-1])
    assert max(map(len, bars)) <= 80


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's end of file, once the child has closed its side
        return b""
