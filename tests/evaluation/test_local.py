"""Runs that are killed, continued, changed or given bad images."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from patchcleanser import CallableClassifier, Threat, load_classifier
from patchcleanser.data import ArrayDataset, chosen, load_dataset
from patchcleanser.errors import DataError, InputError, RecordError
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.evaluation.workloads import Progress
from patchcleanser.records.run import TIMES, Run

CLASSES = ("a", "b", "c")


def linear(seed: int = 0) -> CallableClassifier:
    weights = torch.randn(3, 3 * 8 * 8, generator=torch.Generator().manual_seed(seed))
    return CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint=f"linear {seed}")


def noise(number: int = 10, seed: int = 0) -> ArrayDataset:
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)
    return ArrayDataset("noise", pixels, draw.integers(0, 3, number), CLASSES)


def job(**changed: object) -> Job:
    given: dict[str, object] = {"classifier": linear(), "dataset": noise(), "threat": Threat.square(2), "masks": 2}
    return Job(**{**given, **changed})  # type: ignore[arg-type]


def rows(run: Run) -> pa.Table:
    return run.read().drop_columns(list(TIMES))


def test_rows_say_what_the_defense_says(tmp_path: Path) -> None:
    work = job(table=True)
    table = evaluate(work, tmp_path, batch=4).read().to_pylist()
    images = [work.dataset.image(i) for i in range(10)]
    verdicts = work.built.predict(images)
    assert work.dataset.labels is not None
    certificates = work.built.certify(images, work.dataset.labels)
    for row, verdict, certificate in zip(table, verdicts, certificates, strict=True):
        assert row["answer"] == verdict.label
        assert row["case"] == verdict.case.value
        assert row["one_mask_labels"] == list(verdict.one_mask_labels)
        assert (row["certified"], row["row_certified"]) == (certificate.certified, certificate.row_certified)
        assert len(row["table"]) == 10
        assert row["classifications"] == 11  # ten unions of four masks, and the image itself
    assert [row["id"] for row in table] == [str(i) for i in range(10)]


def test_a_second_run_computes_nothing(tmp_path: Path) -> None:
    first = evaluate(job(), tmp_path, batch=4)
    states: list[Progress] = []
    again = evaluate(job(), tmp_path, batch=4, on_progress=states.append)
    assert states == []
    assert again.read().equals(first.read())


def test_a_stop_loses_at_most_the_batch_in_flight_and_the_rest_is_the_same(tmp_path: Path) -> None:
    def stop(state: Progress) -> None:
        if state.done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(job(), tmp_path / "broken", batch=4, on_progress=stop)
    assert Run.open(tmp_path / "broken").missing() == [2]
    states: list[Progress] = []
    broken = evaluate(job(), tmp_path / "broken", batch=4, on_progress=states.append)
    assert [(p.done, p.here) for p in states] == [(10, 2)]
    assert states[-1].summary.images == 10
    assert rows(broken).equals(rows(evaluate(job(), tmp_path / "whole", batch=4)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"classifier": linear(1)}, "classifier"),
        ({"dataset": noise(seed=1)}, "data"),
        ({"dataset": noise(9)}, "data"),
        ({"threat": Threat.square(3)}, "--patch"),
        ({"threat": Threat.square(2, grid="input")}, "--grid"),
        ({"masks": 3}, "masks"),
        ({"masks": None, "stride": 2}, "masks"),
        ({"defense": "challenger-masking"}, "defense"),
        ({"defense": "challenger-masking", "options": {"seed": 3}}, "--option seed"),
        ({"table": True}, "table"),
    ],
)
def test_a_changed_job_never_reuses_rows(tmp_path: Path, change: dict[str, object], named: str) -> None:
    evaluate(job(), tmp_path)
    with pytest.raises(RecordError, match=f"another job; it differs in .*{named}"):
        evaluate(job(**change), tmp_path)


def test_the_same_masks_are_the_same_job_however_they_are_written(tmp_path: Path) -> None:
    states: list[Progress] = []
    evaluate(job(masks=2), tmp_path)
    evaluate(job(masks=(2, 2)), tmp_path, on_progress=states.append)
    evaluate(job(masks="2"), tmp_path, on_progress=states.append)
    assert states == []  # there was nothing left to do


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"defense": "magic"}, InputError, "no defense 'magic'; there are double-masking"),
        ({"defense": "minority-reports", "table": True}, InputError, "has no table"),
        ({"options": {"threshold": 0.5}}, InputError, "double-masking does not take threshold"),
    ],
)
def test_an_impossible_job_is_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _ = job(**change).built


def pictures(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in ("cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name)
    return folder


def test_images_without_labels_cannot_be_certified(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    with pytest.raises(DataError, match="nothing can be certified without true labels; use predict"):
        job(dataset=load_dataset(f"folder:{tmp_path}"))


@pytest.mark.parametrize("harm", ["truncated", "gone", "small"])
def test_an_unreadable_image_is_named_and_fatal_or_skipped_and_counted(tmp_path: Path, harm: str) -> None:
    bad = pictures(tmp_path / "photos") / "dog" / "3.png"
    dataset = load_dataset(f"folder:{tmp_path / 'photos'}")
    if harm == "truncated":
        bad.write_bytes(bad.read_bytes()[:60])
    elif harm == "gone":
        bad.unlink()
    else:
        Image.new("RGB", (8, 1)).save(bad)
    with pytest.raises((DataError, ValueError), match=r"dog/3.png.*--unreadable skip"):
        evaluate(job(dataset=dataset), tmp_path / "stop", batch=2)
    assert len(Run.open(tmp_path / "stop").read()) == 2  # the first batch is kept
    run = evaluate(job(dataset=dataset), tmp_path / "stop", batch=2, skip=True)
    assert [row["id"] for row in run.read().to_pylist() if row["skipped"]] == ["dog/3.png"]
    assert len(run.read()) == 4


def test_the_gallery_keeps_pictures_of_what_happened(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path)
    saved = sorted(int(p.stem) for p in (tmp_path / "gallery").glob("*.png"))
    assert saved
    wrong = [row["index"] for row in run.read().to_pylist() if row["answer"] != row["label"]]
    assert set(wrong[:1]) <= set(saved)
    with Image.open(tmp_path / "gallery" / f"{saved[0]}.png") as picture:
        assert picture.size == (8, 8)


@pytest.mark.parametrize(("side", "pictures"), [(8, 20), (72, 8)])
def test_more_pictures_of_small_images_are_saved(tmp_path: Path, side: int, pictures: int) -> None:
    pixels = np.zeros((20, side, side, 3), dtype=np.uint8)
    dataset = ArrayDataset("black", pixels, np.zeros(20, dtype=np.int64), ["black", "white"])
    classifier = CallableClassifier(
        lambda x: x.flatten(1)[:, :2] + torch.tensor([1.0, 0.0]), array="torch", fingerprint="b"
    )
    evaluate(Job(classifier, dataset, Threat.square(2), masks=2), tmp_path)
    assert len(list((tmp_path / "gallery").iterdir())) == pictures


def kill_and_continue(folder: Path, kills: int) -> None:
    """Start the command again and again, kill -9 each after a random time, until it ends by itself."""
    words = ["certify", "--limit", "48", "--masks", "3", "--batch", "2", "--device", "cpu", "--out", str(folder)]
    command = [sys.executable, "-m", "patchcleanser", *words, "--table"]
    draw = random.Random(0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = 0
    while True:
        before = len(list(folder.glob("rows-*")))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as child:
            while done < kills and child.poll() is None and len(list(folder.glob("rows-*"))) <= before:
                time.sleep(0.01)
            if done >= kills:
                assert child.wait() == 0
                return
            time.sleep(draw.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
            done += 1


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_ends_with_the_rows_of_an_unbroken_one(tmp_path: Path, kills: int) -> None:
    kill_and_continue(tmp_path / "killed", kills)
    torch.set_num_threads(1)  # as in the other process: the number of threads decides how sums are rounded
    work = Job(
        load_classifier("zoo:tiny", device="cpu"),
        chosen(load_dataset("sample"), 48),
        Threat.square(5),
        masks=3,
        table=True,
    )
    unbroken = evaluate(work, tmp_path / "whole", batch=2)
    assert rows(Run.open(tmp_path / "killed")).equals(rows(unbroken))
