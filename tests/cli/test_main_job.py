"""certify, predict, masks, models and data: words, numbers, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from patchcleanser.data import load_dataset
from patchcleanser.data.codec import as_picture
from patchcleanser.records.run import Run, find_runs

from .conftest import Command

SMALL = ["--limit", "6", "--masks", "2", "--device", "cpu"]


def test_certify_says_accuracies_with_intervals_and_where_the_rows_are(run: Command) -> None:
    done = run("certify", *SMALL)
    assert done.code == 0
    ((stored,), _) = find_runs(["runs"])
    assert len(stored.read()) == 6
    assert str(stored.folder) in done.out
    for word in ("undefended", "clean", "certified", "95%", "patchcleanser report"):
        assert word in done.out
    assert "images/s" in done.err


def test_quiet_prints_nothing_but_the_result(run: Command) -> None:
    for command in (["certify"], ["attack", "--iterations", "1"]):
        done = run(*command, *SMALL[:1], "2", *SMALL[2:], "--quiet")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("2% patch, ")
        assert "for a report" not in done.out


def test_labels_of_which_none_was_audited_are_not_called_wrong(run: Command) -> None:
    done = run("certify", *SMALL, "--precision", "fast")
    assert done.code == 0
    assert "none was audited (runs of fewer than 8 images use float32 only)" in done.out
    assert "100.00% of the others" not in done.out


def test_the_same_command_continues_the_same_run(run: Command) -> None:
    first = run("certify", *SMALL, "--json")
    again = run("certify", *SMALL, "--json")
    assert json.loads(first.out)["run"] == json.loads(again.out)["run"]
    assert len(find_runs(["runs"])[0]) == 1


def test_comma_lists_sweep(run: Command) -> None:
    done = run(
        "certify", *SMALL[:2], "--device", "cpu", "--patch", "2,5", "--masks", "2,3x2", "--out", "sweep", "--json"
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert [(r["job"]["threat"]["shape"], r["job"]["masks"]) for r in rows] == [
        ("2x2", [2, 2]),
        ("2x2", [3, 2]),
        ("5x5", [2, 2]),
        ("5x5", [3, 2]),
    ]
    assert {r["images"] for r in rows} == {6}
    assert len(find_runs(["sweep"])[0]) == 4


def test_json_is_all_that_standard_output_holds(run: Command) -> None:
    result = json.loads(run("certify", *SMALL, "--json", "--table").out)
    assert (
        result["certified"]["interval95"][0] <= result["certified"]["percent"] <= result["certified"]["interval95"][1]
    )
    assert result["job"]["table"] is True


def test_detection_reports_its_own_shares(run: Command) -> None:
    result = json.loads(run("certify", *SMALL, "--defense", "minority-reports", "--threshold", "0.3", "--json").out)
    assert "certified" not in result
    assert result["detection_certified"]["count"] <= 6
    assert result["job"]["options"] == {"threshold": 0.3}


def test_a_coarse_round_is_an_option_of_the_run_and_a_case_of_its_answers(run: Command) -> None:
    words = ("--coarse", "3", "--defense", "double-masking,minority-reports", "--out", "both", "--json")
    images = ("--limit", "6", "--masks", "4", "--device", "cpu")
    coarse, detection = json.loads(run("certify", *images, *words).out)
    assert coarse["job"]["options"] == {"coarse": 3}
    assert detection["job"]["options"] == {}
    assert coarse["cases"]["coarse"] > 0
    plain = json.loads(run("certify", *images, "--json").out)
    assert coarse["certified"]["count"] <= plain["certified"]["count"]
    assert (
        "4×4 masks (16), double-masking after a coarse round of 3×3: 6 images"
        in run("certify", *images, *words[:-1]).out
    )
    report = run("report", coarse["run"], "--out", "page")
    assert report.code == 0
    assert "coarse round: all agree" in (Path("page") / "report.html").read_text(encoding="utf-8")
    as_picture(load_dataset("sample").image(0)).save("sample.png")
    answer = json.loads(run("predict", "--patch", "5", "--coarse", "3", "--json", "sample.png").out)[0]
    assert (answer["case"], answer["masks"], answer["classifications"]) == ("coarse", 9, 9)


def test_the_authors_choice_of_images_can_be_had(run: Command) -> None:
    run("certify", *SMALL, "--subset", "authors", "--out", "theirs")
    run("certify", *SMALL, "--out", "ours")
    theirs, ours = (Run.open(name).read(["id"])["id"].to_pylist() for name in ("theirs", "ours"))
    assert theirs != ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--masks", "abc"], "--masks takes a whole number from 1, or one for each axis as 6x4, got 'abc'"),
        (["--masks", "0"], "--masks takes a whole number from 1"),
        (["--patch", "huge"], "cannot read patch 'huge'"),
        (["--patch", "33"], "patch of 33 px does not fit an image side of 32 px"),
        (["--defense", "magic"], "--defense is double-masking, challenger-masking"),
        (["--limit", "0"], "at least 1 image is needed"),
        (["--subset", "best"], "--subset is random, first or authors, got 'best'"),
        (["--data", "nothing"], "no dataset 'nothing'; there are sample"),
        (["--model", "nothing"], "cannot read classifier 'nothing'"),
        (["--grid", "middle"], "--grid is source or input, got 'middle'"),
        (["--precision", "fst"], "--precision is exact or fast, got 'fst'; did you mean fast?"),
        (["--defense", "double-masking,double-maskin"], "got 'double-maskin'; did you mean double-masking?"),
        (["--unreadable", "ignore"], "--unreadable is stop or skip, got 'ignore'"),
        (["--batch", "0"], "--batch is at least 1"),
        (["--limit", "1.5"], "--limit takes a whole number, got '1.5'"),
        (["--seed", "x"], "--seed takes a whole number, got 'x'"),
        (["--seed", "-1"], "--seed is a number from 0 to 4294967295, got -1"),
        (["--patch", "200%"], "a patch is more than 0% and at most 100% of the image, got 200%"),
        (["--threshold", "high"], "--threshold takes a number, got 'high'"),
        (["--patches", "0"], "at least 1 patch"),
        (["--device", "toaster"], "device 'toaster' cannot be used here"),
        (["--masks", "2", "--stride", "3"], "give masks (--masks) or stride (--stride), not both"),
        (["--threshold", "0.5"], "--threshold belongs to --defense minority-reports"),
        (["--coarse", "1"], "--coarse is 0 for none, or at least 2 masks per axis, got 1"),
        (["--coarse", "3", "--defense", "ds"], "--coarse belongs to --defense double-masking or challenger-masking"),
        (["--split", "test"], "sample has no splits and is taken whole"),
        (["--labels", "colour"], "--labels is auto, name or number, got 'colour'"),
        (["--model", "python:nowhere:make"], "cannot import python:nowhere:make"),
        (["--on", "moon"], "--on is here or ray, got 'moon'"),
        (["--workers", "2"], "--workers belongs to --on ray"),
        (["--on", "ray", "--device", "cuda"], "the workers' device is cpu, got --device cuda"),
        (["--on", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_a_wrong_argument_gets_one_sentence_and_leaves_nothing_behind(
    run: Command, words: list[str], message: str
) -> None:
    done = run("certify", "--limit", "3", "--device", "cpu", *words)
    assert done.code == 2
    assert message in done.err.replace("\n", " ")
    assert "Traceback" not in done.err
    assert not list(Path().rglob("rows-*"))
    assert not list(Path().rglob("manifest.json"))


def pictures(root: Path, names: list[str]) -> None:
    """Three sample images of each of these CIFAR-10 classes, in folders of those names."""
    sample = load_dataset("sample")
    assert sample.labels is not None
    for name in names:
        (root / name).mkdir(parents=True)
        for index in [i for i in range(300) if sample.classes[sample.labels[i]] == name][:3]:
            (root / name / f"{index}.png").write_bytes(sample.content(index))


def test_classes_are_matched_by_name_where_both_sides_have_names(run: Command, tmp_path: Path) -> None:
    pictures(tmp_path / "photos", ["cat", "ship"])  # 0 and 1 here, 3 and 8 for the classifier
    done = run("certify", "--data", "folder:photos", "--masks", "2", "--device", "cpu", "--out", "kept")
    assert done.code == 0, done.err
    assert "classes are matched by name: cat is 3, ship is 8" in done.err
    assert set(Run.open("kept").read(["label"])["label"].to_pylist()) == {3, 8}
    by_number = run("certify", "--data", "folder:photos", "--masks", "2", "--labels", "number", "--out", "numbers")
    assert "the classifier has 10 classes and photos 2; label 0 is taken for class 0" in by_number.err
    (tmp_path / "photos" / "cat").rename(tmp_path / "photos" / "tiger")
    refused = run("certify", "--data", "folder:photos", "--masks", "2", "--out", "tigers")
    assert refused.code == 2
    assert "the class 'tiger' of photos is none of the classifier's" in refused.err
    assert "--labels number" in refused.err


def test_a_factory_that_fails_is_said_in_one_sentence(run: Command, tmp_path: Path) -> None:
    (tmp_path / "broken_factory.py").write_text("def make():\n    raise RuntimeError('no disk')\n")
    done = run("certify", "--model", "python:broken_factory:make", "--limit", "3")
    assert done.code == 2
    assert "python:broken_factory:make failed: RuntimeError: no disk" in done.err


def test_a_factory_that_returns_nothing_is_named(run: Command, tmp_path: Path) -> None:
    (tmp_path / "empty_factory.py").write_text("def make():\n    pass\n")
    done = run("certify", "--model", "python:empty_factory:make", "--limit", "3")
    assert done.code == 2
    assert "python:empty_factory:make returned None; it must return the classifier" in done.err


def test_a_job_asked_for_twice_is_run_once_and_paths_are_quoted(run: Command) -> None:
    words = ["certify", "--limit", "4", "--masks", "2,2x2", "--device", "cpu", "--out", "with space"]
    done = run(*words)
    assert done.out.count("rows in") == 1
    assert "patchcleanser report 'with space'" in done.out
    assert "4 of 4 images are already done" in run(*words).err


def test_a_run_folder_of_another_job_is_refused(run: Command) -> None:
    run("certify", *SMALL, "--out", "here")
    done = run("certify", *SMALL[:2], "--masks", "3", "--out", "here")
    assert done.code == 2
    assert (
        "another job; it differs in --masks (2x2, now 3x3); use another folder (--out, in Python folder=)" in done.err
    )
    assert len(Run.open("here").read()) == 6


def test_a_folder_of_another_job_or_a_file_is_refused_before_anything_is_timed(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("certify", *SMALL, "--patch", "5", "--out", "here")
    Path("other").mkdir()
    Path("other/letter.txt").touch()
    Path("afile").touch()

    def timed(*words: object, **options: object) -> list[None]:
        raise AssertionError("it was timed first")

    monkeypatch.setattr("patchcleanser.cli.cost.announce", timed)
    for command in ("certify", "attack"):
        done = run(command, *SMALL, "--patch", "6", "--out", "here")
        assert done.code == 2
        assert "here holds a run of another job; it differs in" in done.err
        assert "--patch (5x5, now 6x6)" in done.err
        assert "other is not empty" in run(command, *SMALL, "--out", "other").err
        assert "afile is a file, not a folder; choose another --out" in run(command, "--out", "afile").err
    assert "afile is a file, not a folder" in run("certify", "--data", "folder:afile").err
    assert "afile is a file, not a folder" in run("certify", "--data", "cifar10", "--root", "afile").err


def test_unreadable_images_stop_or_are_counted(run: Command, tmp_path: Path) -> None:
    sample = load_dataset("sample")
    for index in range(4):
        path = tmp_path / "photos" / sample.classes[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.content(index))
    path.write_bytes(path.read_bytes()[:100])
    words = ["certify", "--data", "folder:photos", "--masks", "2", "--device", "cpu", "--out", "kept"]
    done = run(*words)
    assert done.code == 2
    assert "3.png" in done.err
    done = run(*words, "--unreadable", "skip")
    assert done.code == 0
    assert "skipped                   1" in done.out


def test_ctrl_c_keeps_what_is_done_and_prints_the_command_that_continues(tmp_path: Path) -> None:
    words = ["certify", "--masks", "3", "--batch", "1", "--device", "cpu", "--out", "stopped"]
    with subprocess.Popen(
        [sys.executable, "-m", "patchcleanser", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as child:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("stopped/rows-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, message = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "stopped. The same command goes on from what was kept:" in message
    assert "patchcleanser certify --masks 3 --batch 1 --device cpu --out stopped" in message
    assert 0 < len(Run.open(tmp_path / "stopped").read()) < 300


def test_sigterm_ends_a_command_with_the_words_of_ctrl_c(tmp_path: Path) -> None:
    words = ["certify", "--batch", "300", "--device", "cpu", "--out", "stopped"]
    with subprocess.Popen(
        [sys.executable, "-m", "patchcleanser", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as child:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("stopped/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # it computes by now
        child.send_signal(signal.SIGTERM)
        _, message = child.communicate(timeout=60)
    assert child.returncode == 130, message
    assert "stopped. Nothing new was kept; the same command begins where this one began:\n  patchcl" in message


def test_ctrl_c_before_a_command_begins_is_one_line(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("patchcleanser.cli.app.require_choices", stop)
    done = run("certify")
    assert (done.code, done.err) == (130, "\nstopped\n")


def test_predict_answers_in_words_and_never_says_certified(run: Command, tmp_path: Path) -> None:
    (tmp_path / "deer.png").write_bytes(load_dataset("sample").content(0))
    done = run("predict", "deer.png", "--masks", "2", "--device", "cpu")
    assert done.code == 0
    assert done.out == "deer.png: deer (4); all 4 masks agree; 4 classifications\n"
    result = json.loads(run("predict", "deer.png", "--masks", "2", "--device", "cpu", "--json").out)
    assert result[0]["case"] == "agreed"
    alarm = run("predict", "deer.png", "--masks", "2", "--defense", "minority-reports", "--device", "cpu")
    assert "no alert" in alarm.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["https://example.org/cat.png"],
            "no picture at https://example.org/cat.png; predict reads files, so download",
        ),
        (["good.png", "absent.png"], "no picture at absent.png; name pictures, or folders of them"),
        (["sample"], "no picture at sample; name pictures, or folders of them"),
        (["empty"], "no pictures in empty"),
        (["bad.png"], "bad.png: cannot decode image: the file is damaged"),
        (["small.png", "--patch", "9"], "small.png: patch of 9 px does not fit an image side of 8 px"),
        (["good.png", "--defense", "double-mask"], "--defense is double-masking, challenger-masking, "),
    ],
)
def test_predict_says_in_one_sentence_what_it_cannot_read(
    run: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    for name, side in (("good.png", 32), ("small.png", 8)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    done = run("predict", *words, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1


def test_predict_counts_one_mask_and_one_classification(run: Command, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    done = run("predict", "a.png", "--masks", "1", "--device", "cpu")
    assert done.out.endswith("; its only mask decided; 1 classification\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict", "\nstopped\n"),
        ("certify", "\nstopped. Nothing new was kept; the same command begins where this one began:"),
    ],
)
def test_ctrl_c_promises_to_go_on_only_where_something_is_kept(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, message: str
) -> None:
    def stop(*words: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("patchcleanser.classifiers.load_classifier", stop)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    done = run(command, *(["a.png"] if command == "predict" else []))
    assert done.code == 130
    assert done.err.startswith(message)
    assert done.err.count("patchcleanser") == (command == "certify")


def test_one_bad_picture_does_not_cost_the_others(run: Command, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    Image.new("RGB", (40, 30)).save(tmp_path / "b.png")
    done = run("predict", ".", "--masks", "2", "--device", "cpu")
    assert done.code == 2
    assert done.err.startswith("a.png: cannot decode image: ")
    assert done.out.startswith("b.png: ")
    assert "1 of 2 pictures could not be answered" in done.err


def test_a_picture_that_is_too_small_for_the_patch_does_not_cost_the_others(run: Command, tmp_path: Path) -> None:
    for name, side in (("a.png", 40), ("b.png", 32), ("c.png", 40)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    done = run("predict", ".", "--patch", "36", "--masks", "2", "--device", "cpu", "--json")
    assert done.code == 2
    assert [(answer["image"], "error" in answer) for answer in json.loads(done.out)] == [
        ("a.png", False),
        ("b.png", True),
        ("c.png", False),
    ]
    assert json.loads(done.out)[1]["error"] == "b.png: patch of 36 px does not fit an image side of 32 px"


def folder_of_classes(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / name / f"{name}.png")


@pytest.mark.parametrize("out", ["photos", "photos/run"])
def test_nothing_is_written_into_the_folder_of_the_images(out: str, run: Command, tmp_path: Path) -> None:
    folder_of_classes(tmp_path / "photos")
    where = ["--out", out, "--device", "cpu"]
    for words in (
        ["certify", "--data", "photos", "--masks", "2"],
        ["attack", "--data", "folder:photos", "--masks", "2"],
        ["train", "--model", "net:tiny", "--data", "folder:photos"],
        ["harden", "--model", "zoo:tiny", "--images", "photos"],
    ):
        done = run(*words, *where)
        assert done.code == 2
        assert "lies in the images' own folder photos" in done.err
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == ["cat", "dog"]


def test_neither_a_sweep_nor_the_demo_nor_training_writes_among_other_files(run: Command, tmp_path: Path) -> None:
    folder_of_classes(tmp_path / "photos")
    sweep = ("certify", "--patch", "3,4", "--masks", "2", "--limit", "1", "--device", "cpu")
    train = ("train", "--model", "net:tiny", "--data", "sample", "--device", "cpu")
    for words in (sweep, ("demo", "--device", "cpu"), train):
        done = run(*words, "--out", "photos")
        assert done.code == 2
        assert "photos is not empty and holds no run to continue, but cat, dog; use another folder (--out" in done.err
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == ["cat", "dog"]
    assert [run(*sweep, "--out", "sweep").code for _ in range(2)] == [0, 0]


def test_where_folders_are_no_classes_a_run_may_lie_among_the_images(run: Command, tmp_path: Path) -> None:
    folder_of_classes(tmp_path)
    words = ["certify", "--data", "folder:.", "--masks", "2", "--device", "cpu", "--out"]
    assert run(*words, ".runs").code == 0
    assert run(*words, "runs").code == 2
    (tmp_path / "labels.csv").write_text("cat/cat.png,3\ndog/dog.png,5\n")
    assert run(*words, "runs").code == 0


def test_the_first_image_is_named_too_if_the_patch_does_not_fit_it(run: Command, tmp_path: Path) -> None:
    folder_of_classes(tmp_path / "photos")
    done = run("certify", "--data", "folder:photos", "--patch", "36", "--masks", "2", "--device", "cpu", "--out", "r")
    assert done.code == 2
    assert "image cat/cat.png: patch of 36 px does not fit" in done.err
    assert "--unreadable skip" in done.err


def test_nothing_is_said_to_be_done_of_another_job(run: Command) -> None:
    words = ["certify", "--limit", "4", "--device", "cpu", "--out", "run", "--masks"]
    assert run(*words, "2").code == 0
    done = run(*words, "3")
    assert done.code == 2
    assert "holds a run of another job" in done.err
    assert "already done" not in done.err
