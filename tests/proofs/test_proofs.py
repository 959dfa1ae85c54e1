"""The proofs are complete, rest on no axioms, and are named where the program claims what they prove."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proofs.coq import SOURCES, needs_coq

ROOT = Path(__file__).parents[2]
STATEMENTS = r"\b(?:Theorem|Lemma|Corollary|Proposition|Fact|Remark|Property|Example)\s+([\w']+)"


def without_comments(text: str) -> str:
    return re.sub(r"\(\*.*?\*\)", "", text, flags=re.DOTALL)


THEOREMS = {
    (module, name) for module, text in SOURCES.items() for name in re.findall(STATEMENTS, without_comments(text))
}
PAGE = ROOT / "docs" / "internals" / "proofs.md"
CITATION = re.compile(r"proofs/(\w+)\.v:\s+(\w+)")


def test_nothing_is_admitted_or_assumed() -> None:
    words = r"\b(Admitted|admit|give_up|Axioms?|Parameters?|Conjecture|Unset|bypass_check|Declare ML)\b"
    assert {m: re.findall(words, without_comments(text)) for m, text in SOURCES.items()} == {m: [] for m in SOURCES}


@needs_coq
def test_every_theorem_is_closed_under_the_global_context(compiled: Path) -> None:
    done = subprocess.run(["make", "-s", "-C", str(compiled), "assumptions"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(THEOREMS)} theorems and lemmas" in done.stdout


@needs_coq
@pytest.mark.parametrize(
    "proof",
    [
        "Axiom all : 1 = 2.\nLemma wrong : 1 = 2. Proof. exact all. Qed.",
        "Lemma wrong : 1 = 2. Admitted.",
        "Hypothesis outside : 1 = 2.\nProposition wrong : 1 = 2. Proof. exact outside. Qed.",
        "From Coq Require Import Classical.\nRemark wrong : forall P, P \\/ ~ P. Proof. exact classic. Qed.",
    ],
)
def test_an_assumption_is_an_error(tmp_path: Path, compiled: Path, proof: str) -> None:
    shutil.copy(compiled / "Makefile", tmp_path)
    (tmp_path / "Wrong.v").write_text(proof)
    done = subprocess.run(["make", "-s", "-C", str(tmp_path), "assumptions"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "assumed, not proved" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_coq_the_missing_package_is_named(tmp_path: Path) -> None:
    make = shutil.which("make") or ""
    done = subprocess.run([make, "prove"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "install coq, e.g. apt-get install coq" in done.stdout


def test_the_theorems_that_docstrings_name_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = [citation for text in texts for citation in CITATION.findall(text)]
    assert len(named) > 30
    assert set(named) <= THEOREMS
    assert len(named) == sum(text.count("proofs/") for text in texts)  # each mention of a file names a theorem


def test_the_theorems_that_the_architecture_names_exist() -> None:
    promises = (PAGE.parent / "architecture.md").read_text(encoding="utf-8").split("## Where each promise is kept")[1]
    named = set(re.findall(r"; `(\w+)`", promises))
    assert len(named) == 7
    assert named <= {name for _, name in THEOREMS}


def test_the_theorems_and_functions_on_the_page_exist() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|") and ".v`" in line]
    assert len(rows) > 30
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    for row in rows:
        (module, names), *others = re.findall(r"`(\w+)\.v` (`\w+`(?:, `\w+`)*)", row)
        assert not others
        assert {(module, name) for name in re.findall(r"\w+", names)} <= THEOREMS, row
        for file, function in re.findall(r"`(\w+\.py)` `(\w+)`", row):
            assert re.search(rf"\b(def|class) {function}\b", sources[file]), row


def test_the_page_quotes_the_proofs_and_the_program_as_they_are() -> None:
    code = (ROOT / "src" / "patchcleanser" / "core" / "algorithms.py").read_text(encoding="utf-8")
    places = {"coq": "\n".join(SOURCES.values()), "py": re.sub("^    ", "", code, flags=re.MULTILINE)}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert [block for kind, block in blocks if block not in places[kind]] == []
