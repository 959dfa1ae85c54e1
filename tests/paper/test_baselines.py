"""The defenses that ours is compared with, in Table 2: rows measured elsewhere, beside the paper's."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from patchcleanser.cli.app import main
from patchcleanser.data import load_dataset
from patchcleanser.errors import RecordError
from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.baselines import BASELINES, PATCHES, RECOVERING, Baseline, read_baselines
from patchcleanser.paper.measurements import read_measurements
from patchcleanser.paper.models import PAPER_MODELS
from patchcleanser.records.metrics import Proportion

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "baselines.py"


def row(baseline: Baseline, patch: str, certified: float) -> dict[str, Any]:
    """As benchmarks/baselines.py writes it."""
    return {
        "defense": baseline.defense,
        "network": baseline.network,
        "recipe": {"name": baseline.recipe},
        "patch": patch,
        "options": dict(baseline.options),
        "images": 10000,
        "undefended": 86.01,
        "clean": 84.5,
        "certified": certified,
        "ms": 2.5,
        "classifications": 33.0,
        "seed": 0,
        "command": "python benchmarks/baselines.py ds",
        "versions": {"hardware": "NVIDIA H200"},
    }


def every_row() -> list[dict[str, Any]]:
    pairs = [(b, PATCHES[p]) for b in BASELINES for p in PATCHES]
    return [row(b, patch, 50 + n) for n, (b, patch) in enumerate(pairs)]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["patchcleanser", *words])
    try:
        main()
    except SystemExit as end:
        assert not end.code  # noqa: PT017  # it may end either way


def test_table_2_shows_every_measured_row_beside_what_the_paper_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(every_row()))
    words = ["--stored", "--baselines", str(tmp_path / "rows.json"), "--out", str(tmp_path / "out")]
    run(monkeypatch, "reproduce", "table2", *words)
    text = capsys.readouterr().out
    measurements = read_measurements(tmp_path / "out", "table2")
    assert len(measurements) == len(RECOVERING) * len(PATCHES)
    first = measurements[RECOVERING[0].row("2").key]
    assert first.values["certified"] == Proportion(5000, 10000)
    assert "de-randomized smoothing" in text
    assert "| 68.9 | 50.0 (49.0–51.0) |" in text  # printed, and ours with its interval
    assert "The paper does not compare it" in text  # Smoothed ViT
    assert "in 60 epochs" in text


def test_rows_with_other_options_are_other_rows(tmp_path: Path) -> None:
    chosen = next(b for b in BASELINES if b.options)
    with_them, without = (row(chosen, "5x5", 9.9), {**row(chosen, "5x5", 5.7), "options": {}})
    (tmp_path / "rows.json").write_text(json.dumps([with_them, without]))
    (measurement,) = read_baselines(tmp_path / "rows.json").values()
    assert measurement.values["certified"] == Proportion(990, 10000)


def test_rows_that_are_none_are_refused_and_no_file_is_no_row(tmp_path: Path) -> None:
    assert read_baselines(tmp_path / "none.json") == {}
    (tmp_path / "rows.json").write_text('[{"defense": "ds"}]')
    with pytest.raises(RecordError, match=r"rows\.json holds no rows of benchmarks/baselines\.py .* name another file"):
        read_baselines(tmp_path / "rows.json")


def test_every_method_that_the_paper_compares_has_its_printed_numbers() -> None:
    printed = [baseline.printed(patch) for baseline in RECOVERING for patch in PATCHES if baseline.method]
    assert len(printed) == 14
    assert all(set(numbers) == {"clean", "certified"} for numbers in printed)
    assert RECOVERING[0].printed("5") == {"clean": 83.9, "certified": 56.2}


def test_rows_of_many_jobs_are_merged_and_a_newer_one_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(every_row()[:2]))
    (tmp_path / "b.json").write_text(json.dumps([row(BASELINES[0], "5x5", 12.0)]))
    words = ["--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path / "all.json")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert [(r["patch"], r["certified"]) for r in merged] == [("2x2", 50), ("5x5", 12.0)]


def test_every_baseline_stands_in_table_2_with_a_command_that_makes_its_network() -> None:
    keys = {row.key for row in EXPERIMENTS["table2"].rows}
    for baseline in RECOVERING:
        for patch in PATCHES:
            assert baseline.row(patch).key in keys
            assert baseline.command(patch) in str(PAPER_MODELS[baseline.name(patch)].command())


def test_rows_of_one_patch_s_weights_are_measured_by_the_folder_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patch in PATCHES:
        words = ["--model", "net:interval?width=4&hidden=8", "--data", "sample", "--limit", "20", "--set", "epochs=1"]
        run(monkeypatch, "train", *words, "--set", "batch=10", "--out", str(tmp_path / f"interval-{patch}"))
    words = ["ibp", "--weights", "interval-5", "--models", str(tmp_path), "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words, "--limit", "1"])
    monkeypatch.setattr("patchcleanser.data.load_dataset", lambda name, split: load_dataset("sample"))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [row["patch"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["5x5"]
