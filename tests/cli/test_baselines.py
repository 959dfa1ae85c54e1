"""The baselines from the command line: certify with records and resume, predict, report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchcleanser.data import load_dataset
from patchcleanser.data.codec import as_picture
from patchcleanser.records.run import Run
from patchcleanser.reports.drawing import style
from patchcleanser.reports.run_results import read_result
from patchcleanser.reports.sweeps import costs

from .conftest import Command

MODELS = {
    "ds": "zoo:tiny",
    "pg-ds": "net:smoothed-vit?width=48&depth=2",
    "cbn": "net:bagnet?width=16&depth=3",
    "pg-bn": "net:bagnet?width=16&depth=3",
    "bagcert": "net:bagnet?width=16&depth=3&votes=true",
    "ibp": "net:interval?width=4&hidden=16",
    "patchguard++": "net:bagnet?width=16&depth=3",
}


@pytest.mark.parametrize("defense", MODELS)
def test_a_baseline_is_certified_with_rows_and_reported(defense: str, run: Command, tmp_path: Path) -> None:
    words = ["certify", "--defense", defense, "--model", MODELS[defense], "--limit", "4", "--patch", "2"]
    done = run(*words, "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.code == 0
    assert "masks" not in done.out
    rows = Run.open(tmp_path / "run").read().to_pylist()
    assert len(rows) == 4
    promise = "detection_certified" if defense == "patchguard++" else "certified"
    for row in rows:
        assert row[promise] is not None
        assert row["undefended"] is not None
        assert row["row_certified"] is None  # there are no masks
        assert row["one_mask_labels"] is None
        assert row["classifications"] >= 1
    assert run("report", str(tmp_path / "run"), "--out", str(tmp_path / "report")).code == 0
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "with 6×6 masks" not in page
    assert "36 masks" not in page


def test_a_stopped_run_of_a_baseline_goes_on_with_the_same_rows(run: Command, tmp_path: Path) -> None:
    words = ["certify", "--defense", "ds", "--limit", "6", "--batch", "2", "--device", "cpu", "--option", "keep=3"]
    assert run(*words, "--out", str(tmp_path / "run")).code == 0
    unbroken = Run.open(tmp_path / "run").read().drop_columns(["seconds"])
    (tmp_path / "run" / "rows-00001.parquet").unlink()
    assert run(*words, "--out", str(tmp_path / "run")).code == 0
    assert Run.open(tmp_path / "run").read().drop_columns(["seconds"]) == unbroken
    assert Run.open(tmp_path / "run").job["options"] == {"keep": 3}


def test_the_figure_of_cost_has_a_point_for_each_defense(run: Command, tmp_path: Path) -> None:
    kinds = ["ds", "cbn", "pg-bn", "bagcert", "ibp"]
    for defense in kinds:
        words = ["certify", "--defense", defense, "--model", MODELS[defense], "--limit", "3", "--patch", "2"]
        assert run(*words, "--device", "cpu", "--out", str(tmp_path / defense)).code == 0
    results = [result for kind in kinds if (result := read_result(Run.open(tmp_path / kind), None)) is not None]
    with style():
        drawing = costs(results)
    assert drawing is not None
    (axes,) = drawing.figure.axes
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [1] * len(kinds)
    assert "de-randomized smoothing" in drawing.alt
    assert costs(results[:1]) is None  # one defense alone is compared with nothing


def test_options_of_a_defense_s_parents_can_be_set(run: Command, tmp_path: Path) -> None:
    words = ["certify", "--defense", "pg-ds", "--limit", "2", "--patch", "2", "--device", "cpu"]
    options = ["--option", "ratio=0.3", "--option", "keep=3"]
    assert run(*words, *options, "--out", str(tmp_path / "run")).code == 0
    assert Run.open(tmp_path / "run").job["options"] == {"ratio": 0.3, "keep": 3}


def test_a_baseline_answers_pictures(run: Command, tmp_path: Path) -> None:
    as_picture(load_dataset("sample").image(0)).save(tmp_path / "a.png")
    done = run("predict", str(tmp_path / "a.png"), "--defense", "ds", "--json")
    assert done.code == 0
    (result,) = json.loads(done.out)
    assert result["classifications"] == 33
    assert "masks" not in result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--defense", "cbn"], "come from a network of small receptive fields such as net:bagnet"),
        (["--defense", "ibp"], "need a network that has them, such as net:interval"),
        (["--defense", "ds", "--masks", "3"], "ds has no masks"),
        (["--defense", "ds", "--option", "keep=wide"], "--option keep takes a number, got 'wide'"),
        (["--defense", "ds", "--option", "size=4"], "(ablation, keep, threshold), got 'size=4'"),
        (["--defense", "ds", "--option", "ablation=stars"], "an ablation keeps columns, rows, blocks, got 'stars'"),
        (["--defense", "pg-ds", "--patches", "2"], "is for one patch, got 2 patches of 2x2"),
        (["--defense", "ds", "--option", "keep=40"], "keeps between 1 and 32 px of a side of 32 px, got 40"),
    ],
)
def test_what_a_baseline_cannot_do_is_refused_with_the_reason(
    words: list[str], message: str, run: Command, tmp_path: Path
) -> None:
    common = ["--patch", "2", "--limit", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    done = run("certify", *words, *common)
    assert done.code != 0
    assert message in done.err
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_attack_and_audit_say_that_they_need_masks(run: Command, tmp_path: Path) -> None:
    words = ["--defense", "ds", "--limit", "2", "--device", "cpu"]
    attacked = run("attack", *words, "--out", str(tmp_path / "attack"))
    assert attacked.code != 0
    assert "only defenses with masks can be attacked, and ds has none" in attacked.err
    assert run("certify", *words, "--out", str(tmp_path / "run")).code == 0
    audited = run("audit", str(tmp_path / "run"))
    assert audited.code != 0
    assert "was made by ds, which cannot be audited; double-masking," in audited.err
