"""Runs on a Ray cluster of several nodes: the rows are those of a local run, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from cluster.clusters import STORE, kill_one, rows, whole
from patchcleanser import CallableClassifier, Threat, load_classifier
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.onnx import OnnxClassifier
from patchcleanser.cli.app import app
from patchcleanser.cluster import pool as ray_pool
from patchcleanser.cluster.runner import RayRunner
from patchcleanser.data import ArrayDataset, chosen, load_dataset
from patchcleanser.data.catalog import SAMPLE
from patchcleanser.data.dataset import EncodedDataset
from patchcleanser.data.folders import FileContents
from patchcleanser.errors import ClusterError, DataError, InputError, RecordError
from patchcleanser.evaluation import AttackJob, Job, evaluate
from patchcleanser.evaluation.audit import audit
from patchcleanser.evaluation.jobs import CertifyWorkload
from patchcleanser.evaluation.workloads import Batch, Progress
from patchcleanser.paper.measurements import read_measurements
from patchcleanser.records.run import Run

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Noise(ArrayDataset):
    """Images of noise; one of them may be deadly."""

    def __init__(self, number: int, *, deadly: int | None = None) -> None:
        draw = np.random.default_rng(0)
        pixels = draw.integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)
        super().__init__("noise", pixels, draw.integers(0, 3, number), ("a", "b", "c"))
        self.deadly = deadly

    def image(self, index: int) -> torch.Tensor:
        if index == self.deadly:
            ctypes.string_at(0)  # what a bug in a decoder does: the process is gone
        return super().image(index)


class DriversFiles(FileContents):
    """Files on the driver's own disk."""

    def __init__(self, paths: Sequence[Path], home: int | None = None) -> None:
        super().__init__(paths)
        self.home = home or os.getpid()

    def __reduce__(self) -> Any:
        return DriversFiles, (self.paths, self.home)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if os.getpid() == self.home else FileContents([Path("/nowhere")])[0]


def linear(pause: float = 0.0) -> CallableClassifier:
    weights = torch.randn(3, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))

    def logits(images: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        return images.flatten(1) @ weights.T

    return CallableClassifier(logits, array="torch", fingerprint=f"linear {pause}")


def noisy(number: int, *, pause: float = 0.0, **dataset: Any) -> Job:
    return Job(linear(pause), Noise(number, **dataset), Threat.square(2), masks=2, table=True)


def real(number: int = 24) -> Job:
    images = chosen(load_dataset("sample"), number)
    return Job(load_classifier("zoo:tiny", device="cpu"), images, Threat.square(5), masks=3)


BASELINES = {
    "ds": "zoo:tiny",
    "pg-bn": "net:bagnet?width=16&depth=3",
    "bagcert": "net:bagnet?width=16&depth=3&votes=true",
    "ibp": "net:interval?width=4&hidden=16",
    "patchguard++": "net:bagnet?width=16&depth=3",
    "one-pass": "visible:net:bagnet?width=16&depth=3",
}


@pytest.mark.parametrize("defense", BASELINES)
def test_a_defense_of_local_scores_has_the_same_rows_on_a_cluster(
    defense: str, runner: RayRunner, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    classifier = load_classifier(BASELINES[defense], device="cpu")
    job = Job(classifier, chosen(load_dataset("sample"), 6), Threat.square(2), defense)
    here = evaluate(job, tmp_path / "here", batch=2)
    assert rows(evaluate(job, tmp_path / "cluster", batch=2, runner=runner)).equals(rows(here))


def test_a_run_begun_here_and_finished_on_a_cluster_has_the_rows_of_a_local_one(
    runner: RayRunner, tmp_path: Path
) -> None:
    def stop(state: Progress) -> None:
        if state.done >= 8:
            raise KeyboardInterrupt

    for number, place in enumerate((None, runner, None)):  # turn and turn about, each stopped in the middle
        with contextlib.suppress(KeyboardInterrupt):
            evaluate(real(), tmp_path / "mixed", batch=4, runner=place, on_progress=stop if number < 2 else None)
    assert whole(Run.open(tmp_path / "mixed"), 24)
    local = evaluate(real(), tmp_path / "local", batch=4)
    assert rows(Run.open(tmp_path / "mixed")).equals(rows(local))
    cluster = evaluate(real(), tmp_path / "cluster", batch=4, runner=runner)
    assert rows(cluster).equals(rows(local))
    assert Run.open(tmp_path / "cluster").key == Run.open(tmp_path / "local").key
    assert print.__module__ == "builtins"  # Ray would put its own there
    pictures = [sorted(p.name for p in (tmp_path / name / "gallery").iterdir()) for name in ("local", "cluster")]
    assert pictures[0] == pictures[1] != []


def test_attacks_and_audits_find_the_same_there(runner: RayRunner, tmp_path: Path) -> None:
    job, settings = real(6), AttackSettings(iterations=2, locations=1)
    runs = [
        evaluate(AttackJob(job, "pgd", settings), tmp_path / name, batch=2, runner=place)
        for name, place in (("here", None), ("there", runner))
    ]
    assert rows(runs[0]).equals(rows(runs[1]))
    for picture in (tmp_path / "here" / "gallery").iterdir():
        assert picture.read_bytes() == (tmp_path / "there" / "gallery" / picture.name).read_bytes()
    certified = evaluate(job, tmp_path / "certified")
    audits = [
        audit(certified, job, sample=3, attack=2, settings=settings, runner=place).to_dict() for place in (None, runner)
    ]
    assert audits[0] == audits[1]
    assert len(audits[0]["derived"]) == 3


@pytest.mark.slow
def test_many_images_are_hashed_by_all_nodes_to_the_same_fingerprint(
    runner: RayRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.cluster.runner.HASHED", 10)
    job = real(25)
    read: list[int] = []
    monkeypatch.setattr(type(job.dataset), "content", lambda self, index: read.append(index))
    identity = runner.begin(job_work(job))
    assert read == []  # the driver has read none
    monkeypatch.undo()
    assert identity["data"] == real(25).dataset.fingerprint


def job_work(job: Job) -> Any:
    from patchcleanser.evaluation.jobs import CertifyWorkload

    return CertifyWorkload(job)


@pytest.mark.slow
def test_an_image_that_crashes_the_decoder_is_named_or_skipped(runner: RayRunner, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reading 5 kills the process; leave such images out with --unreadable skip"):
        evaluate(noisy(12, deadly=5), tmp_path, batch=4, runner=runner)
    run = evaluate(noisy(12, deadly=5), tmp_path, batch=4, runner=runner, skip=True)
    assert whole(run, 12)
    reasons = run.read(["skipped"])["skipped"].to_pylist()
    assert {at: why for at, why in enumerate(reasons) if why} == {5: "reading it kills the process"}
    readable = pa.array([at != 5 for at in range(12)])
    local = evaluate(noisy(12), tmp_path / "local", batch=4)  # without the deadly image the batch is another one
    columns = ["label", "answer", "certified", "table"]
    assert run.read(columns).filter(readable).equals(local.read(columns).filter(readable))


@pytest.mark.parametrize(("number", "kills"), [(40, 2), pytest.param(120, 8, marks=pytest.mark.slow)])
def test_workers_killed_again_and_again_lose_and_double_nothing(
    runner: RayRunner, tmp_path: Path, number: int, kills: int
) -> None:
    killed: list[int] = []

    def kill_some(state: Progress) -> None:  # as the work goes on: a busy machine may need long for a new worker
        if len(killed) < kills and state.done >= 6 + 12 * len(killed) and kill_one():
            killed.append(state.done)

    run = evaluate(noisy(number, pause=0.1), tmp_path / "killed", batch=2, runner=runner, on_progress=kill_some)
    assert len(killed) == kills
    assert whole(run, number)
    assert rows(run).equals(rows(evaluate(noisy(number), tmp_path / "local", batch=2)))


@pytest.mark.slow
def test_a_node_removed_in_the_middle_loses_and_doubles_nothing(
    cluster: Cluster, runner: RayRunner, tmp_path: Path
) -> None:
    runner.close()  # its workers hold the cores
    extra = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    removed: list[int] = []

    def remove(state: Progress) -> None:
        if state.done >= 20 and not removed:
            cluster.remove_node(extra, allow_graceful=False)
            removed.append(state.done)

    with RayRunner(cluster.address, workers=3) as three:
        run = evaluate(noisy(120, pause=0.05), tmp_path / "node", batch=2, runner=three, on_progress=remove)
    assert removed
    assert whole(run, 120)
    assert rows(run).equals(rows(evaluate(noisy(120), tmp_path / "local", batch=2)))


@pytest.mark.slow
def test_a_driver_killed_again_and_again_goes_on_with_the_rows_of_an_unbroken_run(
    cluster: Cluster, runner: RayRunner, tmp_path: Path
) -> None:
    runner.close()  # its workers hold the cores
    words = ["--limit", "60", "--masks", "3", "--batch", "2", "--out", str(tmp_path / "killed")]
    command = [sys.executable, "-m", "patchcleanser", "certify", *words, "--on", "ray", "--address", cluster.address]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for last in (False, False, True):
        before = len(list((tmp_path / "killed").glob("rows-*")))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as child:
            while not last and child.poll() is None and len(list((tmp_path / "killed").glob("rows-*"))) <= before + 4:
                time.sleep(0.01)
            if not last:
                child.send_signal(signal.SIGKILL)
            else:
                assert child.wait() == 0
    run = Run.open(tmp_path / "killed")
    assert whole(run, 60)
    assert rows(run).equals(rows(evaluate(real(60), tmp_path / "local", batch=2)))


@pytest.mark.slow
def test_a_full_object_store_loses_and_doubles_nothing(runner: RayRunner, tmp_path: Path) -> None:
    job = Job(linear(), Noise(96), Threat.square(2, count=2), masks=3, table=True)
    runner.begin(job_work(job))
    hog = [ray.put(np.ones(STORE // 20)) for _ in range(8)]  # 256 MB into 80 MB: full, the rest is on disk

    @ray.remote(num_cpus=0)
    def fill() -> np.ndarray:
        return np.ones(STORE // 10)

    hog += [fill.options(scheduling_strategy="SPREAD").remote() for _ in range(6)]
    ray.wait(hog, num_returns=len(hog), timeout=60)
    run = evaluate(job, tmp_path / "full", batch=32, runner=runner)  # each batch's rows are far over 100 kB
    assert len(hog) == 14
    assert whole(run, 96)
    assert rows(run).equals(rows(evaluate(job, tmp_path / "local", batch=32)))


def test_an_image_once_left_out_stays_out_when_an_older_copy_of_its_batch_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late batch is at two workers; both may die of it, the second one after it was looked at."""
    monkeypatch.setattr(ray_pool, "find_deadly", lambda refs, indices: [1])
    pool, state = ray_pool.Pool({"num_cpus": 1}, 1, ("cpu", 1)), ray_pool._Tasks(deque())
    work, batch = CertifyWorkload(cast(Job, None), skip=True), Batch(0, range(3))
    for _ in range(3):
        pool._requeue(work, state, 0, batch, RayActorError())
    assert [list(task.left_out) for _, task in state.queue] == [[], [1], [1]]


def test_more_than_the_cluster_has_is_refused(cluster: Cluster, runner: RayRunner, tmp_path: Path) -> None:
    runner.close()
    for options in ({"gpus_per_worker": 1}, {"workers": 3}):
        with (
            RayRunner(cluster.address, **options) as greedy,
            pytest.raises(ClusterError, match=r"2 CPUs, 0 GPUs.*fewer"),
        ):
            evaluate(noisy(4), tmp_path / "run", runner=greedy)
    assert not (tmp_path / "run").exists()


def test_data_that_only_the_driver_can_read_are_an_error_even_with_skip(runner: RayRunner, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    photos = EncodedDataset("photos", [path.name for path in paths], DriversFiles(paths), np.zeros(4, np.int64), ["a"])
    job = Job(linear(), photos, Threat.square(2), masks=2)
    with pytest.raises(DataError, match=r"node .* cannot read photos as the driver can: .*under the same address"):
        evaluate(job, tmp_path / "run", runner=runner, skip=True)
    assert len(Run.open(tmp_path / "run").read()) == 0


def test_a_folder_named_from_here_is_found_there(
    runner: RayRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red" if name == "cat" else "blue").save(tmp_path / "photos" / name / "1.png")
    monkeypatch.chdir(tmp_path)  # the workers are elsewhere
    job = Job(linear(), load_dataset("folder:photos"), Threat.square(2), masks=2)
    assert rows(evaluate(job, "there", runner=runner)).equals(rows(evaluate(job, "here")))


def test_a_folder_in_use_is_refused_there_too(runner: RayRunner, tmp_path: Path) -> None:
    run = evaluate(noisy(4), tmp_path)
    with run.locked(), pytest.raises(RecordError, match="another process is working on"):
        evaluate(noisy(4), tmp_path, runner=runner)


def test_what_cannot_be_sent_is_made_there(runner: RayRunner, tmp_path: Path) -> None:
    path = str(tmp_path / "linear.onnx")
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3)).eval()
    torch.onnx.export(
        module, (torch.zeros(2, 3, 8, 8),), path, dynamo=False, dynamic_axes={"input": {0: "n"}}, input_names=["input"]
    )
    job = Job(OnnxClassifier(path), Noise(6), Threat.square(2), masks=2)
    with pytest.raises(InputError, match=r"cannot be sent to workers .*make="):
        evaluate(job, tmp_path / "run", runner=runner)
    runner.make = lambda: OnnxClassifier(path)
    assert rows(evaluate(job, tmp_path / "run", runner=runner)).equals(rows(evaluate(job, tmp_path / "local")))


@pytest.mark.slow
def test_reproduce_on_ray_finds_what_it_finds_here(cluster: Cluster, runner: RayRunner, tmp_path: Path) -> None:
    runner.close()  # its workers would hold all cores
    (tmp_path / "data").mkdir()
    shutil.copyfile(SAMPLE, tmp_path / "data" / "cifar10-test-00000-of-00001.parquet")
    words = ["reproduce", "table3", "--models", "tiny", "--limit", "3", "--root", str(tmp_path / "data")]
    for place, more in (("here", []), ("ray", ["--address", cluster.address, "--workers", "1"])):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / place), "--on", place, *more])
        assert done.exit_code == 0, done.output
    here, there = (read_measurements(tmp_path / place, "table3") for place in ("here", "ray"))
    assert here.keys() == there.keys() != set()
    shares = ("undefended", "clean", "certified", "classifications")
    assert all(here[key].values[name] == there[key].values[name] for key in here for name in shares)
