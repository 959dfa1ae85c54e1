"""The claim of a run, from the command line: certify, audit, claim, check."""

from __future__ import annotations

import json
from pathlib import Path

from patchcleanser.records.run import Run
from patchcleanser.reports.claims import DefenseClaim
from patchcleanser.reports.leaderboard import CLAIMS, main

from .conftest import Command


def test_a_run_that_was_audited_becomes_a_claim_that_passes_the_check(run: Command, tmp_path: Path) -> None:
    certify = ("certify", "--patch", "5", "--masks", "2", "--limit", "3", "--device", "cpu", "--out", "rows")
    assert run(*certify).code == 0
    assert "this is not the root of the repository: add --by" in run("claim", "rows").err
    assert "there is no leaderboard/claims here" in run("claim", "rows", "--by", "A. Author").err
    assert not CLAIMS.parent.exists()
    CLAIMS.mkdir(parents=True)
    done = run("claim", "rows", "--out", "first.json")
    assert DefenseClaim.read(tmp_path / "first.json").measured_by == "this repository"
    assert "no audit; make one: patchcleanser audit rows" in done.out
    assert run("audit", "rows", "--sample", "1", "--attack", "0").code == 0
    done = run("claim", "rows", "--by", "A. Author", "--paper", "Title", "--code", "https://example.org")
    (path,) = CLAIMS.glob("*.json")
    claim, stored = DefenseClaim.read(path), Run.open("rows")
    assert done.code == 0
    assert f"wrote {path}: certified {claim.certified}%" in done.out
    assert run("claim", "rows", "--by", "A. Author").code == 0  # the same run may be claimed anew
    assert (claim.method, claim.data, claim.measured_by) == ("Double-masking, zoo:tiny", "sample", "A. Author")
    assert (claim.run, claim.run_key, claim.run_digest) == ("rows", stored.key, stored.digest)
    assert (claim.rederived, claim.attacked) == (1, None)
    assert claim.certified == round(stored.summary().shares["certified"].percent, 2)
    assert "None" not in json.dumps(claim.to_dict())
    assert main([]) == 0
    assert run(*certify[:-1], "rows2", "--seed", "1").code == 0
    before = path.read_bytes()
    other = run("claim", "rows2", "--by", "A. Author")
    assert other.code == 2
    assert f"{path} holds the claim of rows, not of rows2; name another file with --out" in other.err.replace("\n", " ")
    assert path.read_bytes() == before


def test_rows_outside_of_the_repository_are_refused(run: Command, tmp_path: Path) -> None:
    certify = ("certify", "--patch", "5", "--masks", "2", "--limit", "1", "--device", "cpu", "--out", "rows")
    assert run(*certify).code == 0
    done = run("claim", str(tmp_path / "rows"))
    assert done.code == 2
    assert "a claim names its rows from the root of the repository" in done.err
    assert "--by says who measured it, got nothing" in run("claim", "rows", "--by", "").err
