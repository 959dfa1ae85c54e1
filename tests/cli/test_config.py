"""--config: options from a TOML file or a run; what is typed wins, and a stranger's run names no code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchcleanser.cli.app import COMMANDS
from patchcleanser.records.provenance import write_manifest
from patchcleanser.records.run import Run

from .conftest import Command

FILE = 'limit = 4\npatch = 5\nquiet = true\n[certify]\nmasks = 2\ndevice = "cpu"\n[attack]\niterations = 3\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "options.toml"
    path.write_text(FILE)
    return path


def test_options_come_from_a_file_and_what_is_typed_wins(run: Command, file: Path) -> None:
    done = run("certify", "--config", str(file), "--limit", "3", "--out", "run")
    assert done.code == 0, done.err
    assert done.err == ""
    stored = Run.open("run")
    assert stored.images == 3
    assert stored.job["masks"] == [2, 2]
    assert stored.job["threat"]["shape"] == "5x5"


def test_lists_are_comma_lists_and_repeated_options(run: Command, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        'patch = [2, "5"]\ndefense = "minority-reports"\noption = ["threshold=0.3"]\n'
        'masks = 2\nlimit = 2\ndevice = "cpu"\n'
    )
    rows = json.loads(run("certify", "-c", "sweep.toml", "-o", "sweep", "--json").out)
    assert [row["job"]["threat"]["shape"] for row in rows] == ["2x2", "5x5"]
    assert {row["job"]["options"]["threshold"] for row in rows} == {0.3}


def test_a_run_holds_its_options_and_repeats_with_them(run: Command) -> None:
    words = ["-p", "5", "--masks", "2", "-n", "3", "--seed", "7", "--device", "cpu", "--quiet"]
    assert run("certify", *words, "-o", "first").code == 0
    options = Run.open("first").metadata["options"]["certify"]
    assert (options["patch"], options["limit"], options["seed"]) == ("5", 3, 7)
    assert not {"out", "quiet", "trust-code", "config", "on", "address"} & options.keys()
    for config in ("first", "first/manifest.json"):
        assert run("certify", "--config", config, "-o", config.replace("/", "-") + "-again").code == 0
    assert Run.open("first-again").key == Run.open("first").key
    done = run("attack", "--config", "first")
    assert "first holds options of certify, not of attack" in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ptach = 5", "options.toml: ptach is no option of certify; did you mean patch?"),
        ("trust-code = true", "options.toml: trust-code can only be typed"),
        ("config = 'other.toml'", "config can only be typed"),
        ("[certfy]\nlimit = 3", "[certfy] is no command; did you mean certify?"),
        ("limit = ", "options.toml is no TOML file of options"),
        ("limit = 'many'", "limit"),
    ],
)
def test_a_wrong_file_gets_one_sentence(text: str, message: str, run: Command, file: Path) -> None:
    file.write_text(text)
    done = run("certify", "--config", "options.toml")
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert "cannot read nowhere.toml" in run("certify", "--config", "nowhere.toml").err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "python:evil:make", "runs code of its author"),
        ("data", "parquet:https://example.org/a.parquet", "is an address elsewhere"),
        ("on", "ray", "on can only be typed"),
        ("trust-code", True, "trust-code can only be typed"),
    ],
)
def test_a_strangers_run_cannot_ask_for_code_or_addresses(
    name: str, value: object, message: str, run: Command, tmp_path: Path
) -> None:
    run("certify", "-n", "2", "--masks", "2", "--device", "cpu", "-o", "run")
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a stranger ran')")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["about"]["options"]["certify"][name] = value
    Path("run/manifest.json").write_text(json.dumps(manifest))
    done = run("certify", "--config", "run", "-o", "again")
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"certify", "attack", "demo"}))
def test_only_commands_that_store_their_options_take_them_from_a_run(
    command: str, run: Command, tmp_path: Path
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a stranger ran')")
    options = {command: {"model": "python:evil:make"}}
    (tmp_path / "run").mkdir()
    write_manifest(tmp_path / "run", {"job": {}, "images": 1, "batch": 1}, {"options": options})
    for config in ("run", "run/manifest.json"):
        done = run(command, "--config", config)
        assert done.code == 2
        assert f"run is a run, and {command} takes no options from one" in done.err
