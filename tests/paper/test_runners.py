"""Runs that are executed, continued, shared or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from patchcleanser.cli.app import app
from patchcleanser.errors import InputError
from patchcleanser.evaluation import AttackJob, Job, evaluate
from patchcleanser.evaluation.timing import Latencies
from patchcleanser.paper import EXPERIMENTS, RunSpec
from patchcleanser.paper.measurements import collect, read_measurements
from patchcleanser.paper.models import usual_patch
from patchcleanser.paper.runners import LiveRunner, Missing, StoredRunner
from patchcleanser.records.run import Run


def live_runner(root: Path | None, runs: Path, **options: Any) -> LiveRunner:
    def execute(job: Job | AttackJob, folder: Path, metadata: dict[str, Any]) -> Run:
        return evaluate(job, folder, metadata=metadata)

    return LiveRunner(runs, execute, root=root, device="cpu", **options)


def test_a_run_is_executed_once_and_then_found(root: Path, tmp_path: Path) -> None:
    spec = usual_patch("tiny", masks=2)
    runner = live_runner(root, tmp_path / "runs", limit=3)
    run = runner.run(spec)
    assert isinstance(run, Run)
    assert run.finished
    assert run.folder == tmp_path / "runs" / "tiny-cifar10-5-source-2x2-3-cpu-exact"
    shard = run.shard(0).stat().st_mtime_ns
    again = live_runner(root, tmp_path / "runs", limit=3).run(spec)
    assert isinstance(again, Run)
    assert again.shard(0).stat().st_mtime_ns == shard
    assert run.metadata["seed"] == 0


def test_a_model_that_is_not_here_is_left_out_with_the_command_that_makes_it(root: Path, tmp_path: Path) -> None:
    outcome = live_runner(root, tmp_path / "runs").run(usual_patch("cifar10-resnet-vanilla"))
    assert isinstance(outcome, Missing)
    assert f"no trained classifier in {tmp_path / 'models'}/cifar10-resnet-vanilla" in outcome.reason
    assert "make it with: patchcleanser train --model 'net:resnet'" in outcome.reason


def test_an_authors_checkpoint_that_is_not_here_is_left_out_with_where_to_put_it(root: Path, tmp_path: Path) -> None:
    outcome = live_runner(root, tmp_path / "runs").run(usual_patch("authors-resnet-cifar10"))
    assert isinstance(outcome, Missing)
    assert "put resnetv2_50x1_bit_distilled_cutout2_128_cifar.pth from https://drive.google.com/" in outcome.reason
    assert outcome.reason.endswith(f"into {tmp_path / 'models'}")


def test_images_that_are_not_here_are_left_out_with_where_to_put_them(root: Path, tmp_path: Path) -> None:
    outcome = live_runner(root, tmp_path / "runs").run(RunSpec("tiny", "tiny-imagenet", "5"))
    assert isinstance(outcome, Missing)
    assert "Tiny-ImageNet (val) is not in" in outcome.reason
    assert "To have it, unpack http" in outcome.reason
    assert not (tmp_path / "runs").exists()


def test_times_are_kept_and_say_by_which_clock_they_were_taken(root: Path, tmp_path: Path) -> None:
    spec = usual_patch("tiny", masks=2).timing
    times = live_runner(root, tmp_path / "runs", limit=2).run(spec)
    assert isinstance(times, Latencies)
    assert times.images == 2
    assert min(times.milliseconds.values()) > 0
    assert times.classifications["double-masking"] >= 4
    assert times.metadata["clock"] == "processor time of one thread"  # as tests run
    assert live_runner(root, tmp_path / "runs", limit=2).run(spec) == times


def test_attacked_rows_are_read_beside_certified_ones(root: Path, tmp_path: Path) -> None:
    experiment = EXPERIMENTS["table8"]
    row = next(row for row in experiment.rows if row.spec.model == "tiny")
    spec = RunSpec("tiny", "cifar10", "5", masks=2, kind="attack", iterations=2, locations=1)
    outcome = live_runner(root, tmp_path / "runs", limit=2).run(spec)
    measurements, missing = collect(experiment, {row.spec: outcome}, root)
    assert missing == {}
    assert {"undefended_under_attack", "robust", "certified"} <= set(measurements[row.key].values)
    assert measurements[row.key].images == 2


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


def test_reproduce_writes_findings_tables_and_a_page_and_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    words = ["figure10", "--models", "tiny", "--limit", "2", "--root", str(root), "--out", str(tmp_path / "out")]
    done = run(*words, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "Challenger masking needs fewer classifications: " in done.output
    for name in ("figure10.json", "results.html", "tables/figure10.csv", "tables/figure10.md"):
        assert (tmp_path / "out" / name).is_file()
    measurements = read_measurements(tmp_path / "out", "figure10")
    double, challenger = (
        next(m for key, m in measurements.items() if key.endswith(kind))
        for kind in ("double-masking", "challenger-masking")
    )
    assert double.values["certified"] == challenger.values["certified"]
    assert {"milliseconds", "classifications", "clean"} <= set(double.values)
    output = json.loads(run(*words, "--device", "cpu", "--json").stdout)
    assert set(output["figure10"]["findings"]) == set(measurements)


def test_tables_follow_from_stored_runs_without_models_and_images(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for limit in (1, 2):
        live_runner(root, runs, limit=limit).run(usual_patch("tiny", masks=2))
    begun = live_runner(root, runs, limit=3).run(usual_patch("tiny", masks=2))
    assert isinstance(begun, Run)
    begun.shard(0).unlink()  # one that is not finished does not count
    live_runner(root, runs, limit=2).run(usual_patch("tiny", masks=2).timing)
    stored = StoredRunner(runs)
    outcome = stored.run(usual_patch("tiny", masks=2))
    assert isinstance(outcome, Run)
    assert outcome.images == 2
    assert isinstance(stored.run(usual_patch("tiny", masks=2).timing), Latencies)
    missing = stored.run(usual_patch("tiny", masks=3))
    assert isinstance(missing, Missing)
    assert "holds no finished run of tiny-cifar10-5-source-3x3; run it without --stored" in missing.reason
    done = run("figure4", "--stored", "--runs", str(runs), "--out", str(tmp_path / "out"), "--models", "tiny")
    assert done.exit_code == 0, done.output
    assert "| tiny | CIFAR-10 |" in done.output


def test_a_classifier_of_one_s_own_takes_the_place_of_the_paper_s(root: Path, tmp_path: Path) -> None:
    words = ["table3", "--models", "zoo:tiny", "--data", "cifar10", "--limit", "1", "--root", str(root)]
    done = run(*words, "--device", "cpu", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    keys = list(read_measurements(tmp_path / "out", "table3"))
    assert "zoo-tiny-cifar10-5-source-6x6" in keys
    assert "| zoo:tiny | CIFAR-10 |" in done.output
    assert "patch of 35 px does not fit an image side of 32 px" in done.output  # which only enlarged images have


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "no experiment 'table9'"),
        ([], "say which: table2"),
        (["table2", "--models", "x"], "no model 'x'; there are tiny"),
        (["table2", "--data", "mnist"], "no dataset 'mnist'; there are imagenette"),
        (["table2", "--models", "zoo:tiny"], "zoo:tiny is no model of the experiments; say with --data"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(words: list[str], message: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)


def test_where_nothing_can_be_measured_it_says_what_is_missing(root: Path, tmp_path: Path) -> None:
    done = run("table6", "--root", str(root), "--models", "svhn-resnet", "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, InputError)
    assert "left out: svhn-resnet is not here" in done.output
    assert not (tmp_path / "out").exists()


def test_list_and_commands_say_what_there_is() -> None:
    done = run("--list")
    assert all(name in done.stdout for name in EXPERIMENTS)
    rows = json.loads(run("--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(EXPERIMENTS)


def test_a_page_without_findings_is_not_written_over_one_with_them(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("what was measured")
    done = run("--page", str(page), "--out", str(tmp_path / "nothing"))
    assert isinstance(done.exception, InputError)
    assert "holds no findings" in str(done.exception)
    assert page.read_text() == "what was measured"


def test_no_images_are_not_all_images(tmp_path: Path) -> None:
    done = run("table2", "--limit", "0", "--out", str(tmp_path))
    assert isinstance(done.exception, InputError)
    assert "at least 1 image is needed, got a limit of 0" in str(done.exception)


def test_the_commands_that_make_models_read_the_images_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "cifar100-train-00000-of-00001.parquet").touch()
    (tmp_path / "svhn" / "images" / "train").mkdir(parents=True)
    (tmp_path / "tiny-imagenet" / "tiny-imagenet-200" / "train").mkdir(parents=True)
    commands = run("--commands", "--root", str(tmp_path)).stdout.splitlines()
    assert any(line.endswith(f"cifar100-vit --root {tmp_path}") for line in commands)
    assert any(line.endswith(f"svhn-mlp --root {tmp_path / 'svhn'}") for line in commands)
    assert all("--root" not in line for line in commands if "--data cifar10 " in line)  # which is in the cache
    photos = f"--images folder:{tmp_path}/tiny-imagenet/tiny-imagenet-200/train "
    hardened = [line for line in commands if line.startswith("patchcleanser harden")]
    assert len(hardened) == 4
    assert all(photos in line for line in hardened)
