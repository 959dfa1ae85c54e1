"""Runs and accuracies from Python: what they need, and what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchcleanser import Job, evaluate, load_classifier, load_dataset
from patchcleanser.cli.app import app
from patchcleanser.data import chosen


@pytest.mark.parametrize("name", ["zoo:tiny", "mirror:zoo:tiny"])
def test_a_run_from_python_can_be_audited_by_its_name_alone(name: str, tmp_path: Path) -> None:
    model = load_classifier(name, device="cpu")
    run = evaluate(Job(model, chosen(load_dataset("sample"), 3), "5", masks=2), tmp_path / "run")
    assert run.metadata["model"] == name
    assert run.metadata["data"] == "sample"
    assert "split" not in run.metadata
    assert run.metadata["classes"] == list(load_dataset("sample").classes)
    assert {"patchcleanser", "torch", "python"} <= run.metadata["versions"].keys()
    words = ["audit", str(run.folder), "--sample", "2", "--attack", "1", "--iterations", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "no contradiction" in result.stdout


def test_metadata_of_the_caller_win_and_unnamed_models_and_data_have_no_name(tmp_path: Path) -> None:
    model = load_classifier("zoo:tiny", device="cpu")
    model.spec = None
    pairs = [load_dataset("sample")[n] for n in range(2)]
    run = evaluate(Job(model, pairs, "5", masks=2), tmp_path, metadata={"data": "mine", "seed": 3})
    assert "model" not in run.metadata
    assert (run.metadata["data"], run.metadata["seed"]) == ("mine", 3)
