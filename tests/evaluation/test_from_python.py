"""Runs and accuracies from Python: what they need, and what they leave behind."""

from __future__ import annotations

import ast
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from patchcleanser import CallableClassifier, DoubleMasking, Job, evaluate, load_classifier, load_dataset
from patchcleanser.cli.app import app
from patchcleanser.data import ArrayDataset, chosen
from patchcleanser.data.codec import as_picture
from patchcleanser.errors import InputError
from patchcleanser.evaluation import AttackJob, jobs
from patchcleanser.evaluation.workloads import Progress
from patchcleanser.records.atomic import KeptInterrupt


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


def two_colours(image: Tensor) -> Tensor:
    """Class 0 where the image is more red, class 1 where it is more green."""
    return image.mean((2, 3))[:, :2]


MODEL = CallableClassifier(two_colours, array="torch", fingerprint="two colours")


def pairs(number: int, wrong: int) -> list[tuple[Tensor, int]]:
    """Red and green images, of which this many have the other one's label."""
    images = torch.zeros(number, 3, 8, 8)
    truths = [n % 2 for n in range(number)]
    for n, truth in enumerate(truths):
        images[n, truth] = 0.5 + n / (3 * number)
    return [(image, 1 - y if n < wrong else y) for n, (image, y) in enumerate(zip(images, truths, strict=True))]


def notes(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "patchcleanser" and r.levelno == level]


@pytest.mark.parametrize(("wrong", "warned"), [(0, False), (9, False), (11, True), (20, True)])
def test_accuracy_near_chance_is_warned_of_once(
    wrong: int, warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    evaluate(Job(MODEL, pairs(20, wrong), "2", masks=2), tmp_path, batch=5)
    warnings = notes(caplog, logging.WARNING)
    assert len(warnings) == warned
    assert not warned or all(words in warnings[0] for words in ("of 20 images", "preprocessing", "match_labels"))


@pytest.mark.parametrize(
    ("classes", "warned"),
    [(("red", "green"), False), (("Red", "GREEN"), False), (("0", "1"), False), (("green", "red"), True)],
)
def test_classes_in_another_order_than_the_classifiers_are_warned_of(
    classes: tuple[str, str], warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = CallableClassifier(two_colours, array="torch", fingerprint="two colours")
    model.names = ("red", "green")
    pixels = np.full((2, 8, 8, 3), 9, dtype=np.uint8)
    images = ArrayDataset("colours", pixels, np.array([0, 1]), list(classes))
    evaluate(Job(model, images, "2", masks=2), tmp_path)
    expected = "label 0 is 'green' in colours and 'red' in the classifier, and labels are taken by number"
    assert [expected in text for text in notes(caplog, logging.WARNING)] == [True] * warned


def test_a_run_that_goes_on_with_another_number_of_threads_is_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    job, threads = Job(MODEL, pairs(8, 0), "2", masks=2), torch.get_num_threads()

    def stop(state: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(job, tmp_path, batch=4, on_progress=stop)
    torch.set_num_threads(threads + 1)
    try:
        evaluate(job, tmp_path)
        (warning,) = notes(caplog, logging.WARNING)
        assert f"the run was begun with threads {threads}, now {threads + 1}: rounding may differ" in warning
        evaluate(job, tmp_path)  # it is complete
    finally:
        torch.set_num_threads(threads)
    assert len(notes(caplog, logging.WARNING)) == 1


@pytest.mark.parametrize(("done", "warned"), [(0, True), (1, False)])
def test_a_stop_before_the_first_batch_says_that_nothing_is_kept(
    done: int, warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    calls = 0

    def colours_until_stopped(image: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if len([*tmp_path.glob("**/*.parquet")]) >= done and calls > 3:
            raise KeyboardInterrupt
        return two_colours(image)

    model = CallableClassifier(colours_until_stopped, array="torch", fingerprint="two colours")
    with pytest.raises(KeyboardInterrupt) as stop:
        evaluate(Job(model, pairs(8, 0), "2", masks=2), tmp_path, batch=4)
    assert isinstance(stop.value, KeptInterrupt) != warned
    expected = "stopped before the first batch of 4 images was finished; a smaller batch (--batch) loses less"
    assert [expected in text for text in notes(caplog, logging.WARNING)] == [True] * warned


def test_a_long_run_is_warned_of_before_it_ends(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    done: list[int] = []
    warned_at: list[int] = []

    def watch(state: Progress) -> None:
        done.append(state.done)
        warned_at.extend([state.done] * len(notes(caplog, logging.WARNING)))

    evaluate(Job(MODEL, pairs(140, 140), "2", masks=2), tmp_path, batch=20, on_progress=watch)
    assert done == [20, 40, 60, 80, 100, 120, 140]
    assert warned_at == [100, 120, 140]


def test_few_images_say_too_little_for_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    evaluate(Job(MODEL, pairs(9, 9), "2", masks=2), tmp_path)
    assert notes(caplog, logging.WARNING) == []


def test_the_command_line_prints_the_warning_as_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["certify", "--model", "net:tiny", "--limit", "100", "--masks", "1", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "note: only " in result.stderr
    assert "preprocessing" in result.stderr


def test_a_run_logs_how_it_begins_continues_and_ends(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    job = Job(MODEL, pairs(8, 0), "2", masks=2)

    def stop(state: Progress) -> None:
        raise KeyboardInterrupt

    with caplog.at_level(logging.DEBUG, "patchcleanser"):
        with pytest.raises(KeyboardInterrupt):
            evaluate(job, tmp_path, batch=4, on_progress=stop)
        evaluate(job, tmp_path, batch=4)
    assert notes(caplog, logging.INFO) == [f"{tmp_path}: 4 of 8 images are already done"]
    assert notes(caplog, logging.DEBUG) == [
        f"{tmp_path}: 0 of 8 images are already done",
        f"{tmp_path}: all of 8 images are done",
    ]


def test_an_image_that_is_left_out_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for name, content in (("a", None), ("b", b"no picture")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        as_picture(load_dataset("sample").image(0)).save(tmp_path / "photos" / name / "1.png")
        if content:
            (tmp_path / "photos" / name / "1.png").write_bytes(content)
    job = Job(MODEL, f"folder:{tmp_path / 'photos'}", "2", masks=2)
    with caplog.at_level(logging.INFO, "patchcleanser"):
        evaluate(job, tmp_path / "run", skip=True)
    (text,) = notes(caplog, logging.INFO)
    assert text.startswith("image b/1.png is left out: cannot decode")


def test_labels_that_are_computed_again_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def short_of_memory(image: Tensor) -> Tensor:
        calls.append(len(image))
        if len(calls) == 3:
            raise MemoryError
        return two_colours(image)

    images, labels = zip(*pairs(6, 0), strict=True)
    defense = DoubleMasking(CallableClassifier(short_of_memory, array="torch"), "2", masks=2)
    with caplog.at_level(logging.INFO, "patchcleanser"):
        defense.certify(images, labels)
    assert any("are computed again: memory ran out" in text for text in notes(caplog, logging.INFO))


@pytest.mark.parametrize("arguments", [(None, "run"), ("run", None), (MODEL, "run"), ("job", 5)], ids=str)
def test_evaluate_refuses_what_is_no_job_or_no_folder(arguments: Any) -> None:
    with pytest.raises(InputError, match="evaluate takes a Job"):
        evaluate(*arguments)


@pytest.mark.parametrize("options", [{"job": MODEL}, {"attack": None}, {"settings": None}], ids=str)
def test_attack_jobs_refuse_other_things_than_jobs_attacks_and_settings(options: dict[str, Any]) -> None:
    job = Job(load_classifier("zoo:tiny", device="cpu"), "sample", "5", masks=2)
    with pytest.raises(InputError):
        AttackJob(**{"job": job, "attack": "apgd", **options})


def test_type_checkers_see_every_field_of_a_job() -> None:
    tree = ast.parse(Path(jobs.__file__).read_text(encoding="utf-8"))
    (init,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [argument.arg for argument in init.args.args[1:]] == [field.name for field in fields(Job)]


@pytest.mark.parametrize("name", ["masks", "stride", "precision", "confirm"])
def test_what_a_job_says_itself_is_no_option_of_its_defense(name: str) -> None:
    with pytest.raises(InputError, match=f"options are the defense's own, got {name}"):
        Job(MODEL, pairs(2, 0), "2", options={name: 2})
