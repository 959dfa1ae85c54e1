"""What a report proposes can be copied, and runs."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from patchcleanser.cli.app import main
from patchcleanser.records.run import Run
from patchcleanser.reports.next_steps import go_on, next_steps
from patchcleanser.reports.run_results import RunResult, read_result

from .test_report import Page, reported

MakeRun = Callable[..., Run]
OPTIONS = {"model": "zoo:tiny", "data": "sample", "patch": "2", "masks": "2", "defense": "double-masking", "limit": 6}


def facts(**options: Any) -> dict[str, Any]:
    named = {"model": "zoo:tiny", "data": "sample", "command": "patchcleanser certify"}
    return {**named, "options": {"certify": {**OPTIONS, **options}}}


def result_of(run: Run) -> RunResult:
    result = read_result(run, None)
    assert result is not None
    return result


def commands(*runs: Run, attacked: bool = False) -> list[str]:
    steps = next_steps([result_of(run) for run in runs], [], attacked=attacked)
    return [command for step in steps for command in step.commands]


def test_steps_name_the_folder_and_the_options_of_the_run(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands(make_run("a b", table=False, metadata=facts())) == [
        "patchcleanser audit 'a b'",
        "patchcleanser attack --model zoo:tiny --data sample --patch 2x2 --masks 2 "
        "--attack adaptive --limit 20 --out 'a b-attack'",
        "patchcleanser report 'a b' 'a b-attack'",
        "patchcleanser certify --config 'a b' --table --out 'a b-table'",
        "patchcleanser report 'a b-table'",
        "patchcleanser certify --config 'a b' --masks 4 --out 'a b-4x4'",
        "patchcleanser report 'a b' 'a b-4x4'",
        "patchcleanser certify --config 'a b' --limit 24 --out 'a b-24'",
    ]


def test_one_run_of_a_sweep_is_not_the_whole_sweep_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(table=False, metadata=facts(patch="2,3", masks="2,3"))
    again = [words for words in commands(run) if "--config" in words]
    assert "patchcleanser certify --config run --patch 2x2 --masks 2 --table --out run-table" in again
    assert "patchcleanser certify --config run --patch 2x2 --masks 4 --out run-4x4" in again


def test_what_is_done_or_cannot_run_is_not_proposed(make_run: MakeRun, make_attack: MakeRun, tmp_path: Path) -> None:
    tabled = make_run("tabled", metadata=facts(data="folder:/home/me/photos"))
    assert not any("--table" in words or " attack " in words for words in commands(tabled))
    assert not any(" attack " in words for words in commands(make_run("attacked", metadata=facts()), attacked=True))
    assert commands(make_run("plain", metadata={})) == []
    unfinished = make_run("unfinished", metadata=facts())
    unfinished.shard(1).unlink()
    assert not any(" audit " in words for words in commands(unfinished))
    assert commands(make_attack()) == []
    odd = {**facts(), "options": {"certify": ["--limit", "4"]}}
    assert commands(make_run("odd", metadata=odd)) == [f"patchcleanser audit {os.path.relpath(tmp_path / 'odd')}"]


def test_a_run_is_continued_without_its_private_paths(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = make_run("plain", metadata=facts())
    assert go_on(result_of(plain)) == "patchcleanser certify"
    private = "patchcleanser certify --data folder:/home/me/photos --trust-code"
    run = make_run("private", metadata={**facts(), "command": private})
    assert go_on(result_of(run)) == "patchcleanser certify --config private --out private --trust-code"
    assert go_on(result_of(make_run("python", metadata={"command": private}))) is None


@pytest.mark.slow
def test_every_command_that_a_page_proposes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(line: str) -> None:
        monkeypatch.setattr("sys.argv", shlex.split(line))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, line

    monkeypatch.chdir(tmp_path)
    typed("patchcleanser certify --patch 5 --masks 2 --limit 4 --device cpu --out run")
    page = reported(tmp_path / "report", Run.open("run"), derived=False)
    lines = unescape("\n".join(re.findall(r"<pre>(patchcleanser.*?)</pre>", page, flags=re.DOTALL))).splitlines()
    assert len(lines) == 8
    for line in lines:
        typed(line.replace("--limit 20", "--limit 2 --iterations 2 --device cpu"))
    assert json.loads(Path("run/audit/audit.json").read_text(encoding="utf-8"))["contradictions"] == []
    assert "Store the tables" in Page(page).text
