"""attack and audit: words, numbers, failures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from patchcleanser import load_dataset
from patchcleanser.cli.app import app
from patchcleanser.data.codec import as_picture
from patchcleanser.errors import ContradictionError, InputError, RecordError
from patchcleanser.evaluation import attack_jobs
from patchcleanser.records.run import Row, Run

SMALL = ["--limit", "4", "--masks", "2", "--device", "cpu"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_attack_says_accuracies_before_and_after_and_draws_some(folder: Path) -> None:
    done = run("attack", *SMALL, "--iterations", "5", "--out", "a")
    assert done.exit_code == 0, done.output
    for words in ("undefended clean", "undefended under attack", "robust", "certified images fooled       0", "95%"):
        assert words in done.stdout
    assert len(Run.open("a").read()) == 4
    with Image.open("a/attacked.png") as sheet:
        assert sheet.height > 4 * 256
    again = run("attack", *SMALL, "--iterations", "5", "--out", "a", "--json")
    result = json.loads(again.stdout)
    assert result["certified_images_fooled"] == 0
    assert result["robust"]["count"] >= result["row_certified"]["count"]
    assert (result["attack"], result["iterations"], result["locations"], result["images"]) == ("apgd", 5, 1, 4)


def test_an_attack_by_fast_labels_says_that_its_certificates_are_statistical(folder: Path) -> None:
    words = ["attack", "--limit", "10", "--masks", "3", "--patch", "5", "--device", "cpu", "--iterations", "2"]
    done = run(*words, "--precision", "fast", "--out", "a", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["statistical"].startswith(
        f"{result['row_certified']['count']} certificates are statistical, not proofs"
    )
    assert json.loads(run(*words, "--out", "b", "--json").stdout)["statistical"] is None


def test_answers_that_the_data_have_no_name_for_are_drawn_by_number(folder: Path) -> None:
    sample = load_dataset("sample")
    for index in range(2):  # one class, which is not the model's first: all answers are others
        (folder / "data" / "thing").mkdir(parents=True, exist_ok=True)
        as_picture(sample.image(index)).save(folder / "data" / "thing" / f"{index}.png")
    data = ["--data", "folder:data", "--labels", "number", "--masks", "2", "--device", "cpu"]
    done = run("attack", *data, "--iterations", "1", "--out", "a")
    assert done.exit_code == 0, done.output
    assert Path("a/attacked.png").is_file()


def test_the_same_attack_continues_the_same_run(folder: Path) -> None:
    words = ["attack", *SMALL, "--attack", "adaptive", "--iterations", "2", "--json"]
    first, second = (json.loads(run(*words).stdout) for _ in range(2))
    assert first["run"] == second["run"]


def test_a_fooled_certified_image_ends_the_attack_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_jobs, "is_fooled", lambda verdict, label: True)
    done = run("attack", *SMALL, "--iterations", "1", "--patch", "2", "--masks", "3")
    assert isinstance(done.exception, ContradictionError)
    assert " fooled (" in str(done.exception)
    assert "gallery" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attack", "magic"], "--attack is pgd, apgd, square or adaptive"),
        (["--iterations", "0"], "iterations is a whole number of at least 1, got 0"),
        (["--loss", "l1"], "--loss is margin, ce or dlr"),
        (["--places", "worst"], "--places is random or searched"),
        (["--batch", "0"], "--batch is at least 1"),
    ],
)
def test_a_wrong_argument_of_attack_is_named(folder: Path, words: list[str], message: str) -> None:
    done = run("attack", *SMALL, *words)
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
    assert not list(folder.rglob("rows-*"))


def flip(run_folder: str, change: Any) -> None:
    result = Run.open(run_folder)
    rows = result.read_batch(0).to_pylist()
    change(rows[2])
    result.write(0, rows)


def test_audit_passes_an_honest_run_and_fails_a_changed_one(folder: Path) -> None:
    run("certify", *SMALL, "--table", "--out", "r")
    words = ["audit", "r", "--sample", "4", "--attack", "1", "--iterations", "2", "--locations", "1"]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "4 derived again" in done.stdout
    assert "no contradiction" in done.stdout
    report = re.search(r"^  (patchcleanser report \S+) shows it$", done.stdout, flags=re.MULTILINE)
    assert report is not None
    assert run(*report[1].split()[1:]).exit_code == 0
    assert json.loads(Path("r/audit/audit.json").read_text())["contradictions"] == []

    assert json.loads(Path("r/audit/audit.json").read_text())["digest"] == Run.open("r").digest

    def change(row: Row) -> None:
        row["undefended"] = (row["undefended"] + 1) % 10

    flip("r", change)
    done = run(*words, "--json")
    assert isinstance(done.exception, ContradictionError)
    assert "patchcleanser audit r --sample 4 --attack 1" in str(done.exception)
    result = json.loads(done.stdout)["contradictions"]
    assert {entry["index"] for entry in result} == {2}
    assert "CONTRADICTION image 2" in run(*words).stdout


def test_audit_finds_one_changed_label_of_a_table(folder: Path) -> None:
    run("certify", *SMALL, "--table", "--out", "r")

    def change(row: Row) -> None:
        row["table"][7] = (row["table"][7] + 1) % 10

    flip("r", change)
    done = run("audit", "r", "--sample", "4", "--attack", "0", "--json")
    assert isinstance(done.exception, ContradictionError)
    assert any("two-mask label" in entry["what"] for entry in json.loads(done.stdout)["contradictions"])


@pytest.mark.parametrize(("target", "why"), [("99", "from 0 to 9, got 99"), ("-1", "from 0, got -1")])
def test_a_target_that_is_no_class_is_refused_before_images_are_attacked(folder: Path, target: str, why: str) -> None:
    done = run("attack", *SMALL, "--target", target, "--out", "a")
    assert isinstance(done.exception, InputError)
    assert f"a target (--target) is a class {why}" in str(done.exception)
    assert not (folder / "a").exists()


def test_audit_refuses_other_kinds_of_runs_and_nothing_to_do(folder: Path) -> None:
    run("certify", *SMALL, "--out", "r")
    done = run("audit", "r", "--sample", "0", "--attack", "0")
    assert "--attack are 0 or more, one of them at least 1; got --sample 0 --attack 0" in str(done.exception)
    run("attack", *SMALL, "--iterations", "1", "--out", "a")
    done = run("audit", "a")
    assert isinstance(done.exception, RecordError)
    assert "holds no certificates to audit" in str(done.exception)
