"""Rows of a cluster are those of one model and of the data that were named, whoever changes what meanwhile."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster

from cluster.clusters import kill_one, rows, whole
from patchcleanser import CallableClassifier, Preprocessing, Threat, TorchClassifier, load_dataset
from patchcleanser.cluster.runner import RayRunner
from patchcleanser.cluster.worker import find_deadly, put
from patchcleanser.data import ArrayDataset
from patchcleanser.errors import ClusterError, DataError, ImageError, RecordError
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.evaluation.workloads import Progress
from patchcleanser.records.run import Run
from soundness.constructed import MASKS, SIDE, THREAT, constructed, is_unsteady

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
ray.cloudpickle.register_pickle_by_value(sys.modules["soundness.constructed"])


def noise(number: int, side: int = 8) -> ArrayDataset:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (number, side, side, 3), dtype=np.uint8)
    return ArrayDataset("noise", pixels, draw.integers(0, 3, number), ("a", "b", "c"))


def job_of(classifier: Any, dataset: Any) -> Job:
    return Job(classifier, dataset, Threat.square(2), masks=2, table=True)


class FromFile(CallableClassifier):
    """A linear classifier drawn by the seed in a file; it cannot be sent, so workers load it themselves.

    While the file holds another seed it waits, so that a worker that comes back meets unfinished work however slowly.
    """

    def __init__(self, path: Path, pause: float = 0.0) -> None:
        seed = int(path.read_text())
        weights = torch.randn(3, 192, generator=torch.Generator().manual_seed(seed))

        def logits(images: torch.Tensor) -> torch.Tensor:
            time.sleep(pause)
            until = time.monotonic() + 120
            while int(path.read_text()) != seed and time.monotonic() < until:
                time.sleep(0.1)
            return images.flatten(1) @ weights.T

        super().__init__(logits, array="torch", fingerprint=f"seed {seed}")

    def __reduce__(self) -> Any:
        raise TypeError("it holds a file")


def making(path: Path) -> Callable[[], FromFile]:
    return lambda: FromFile(path, pause=0.1)


def test_workers_that_load_another_model_than_the_driver_write_no_rows(
    cluster: Cluster, runner: RayRunner, tmp_path: Path
) -> None:
    runner.close()  # its workers hold the cores
    path = tmp_path / "model"
    path.write_text("1")
    job = job_of(FromFile(path), noise(6))
    path.write_text("2")
    with (
        RayRunner(cluster.address, make=making(path)) as other,
        pytest.raises(ClusterError, match="not the driver's; give all of them the same files"),
    ):
        evaluate(job, tmp_path / "run", batch=2, runner=other)
    assert not (tmp_path / "run").exists()


def test_a_worker_that_comes_back_with_another_model_adds_no_rows(
    cluster: Cluster, runner: RayRunner, tmp_path: Path
) -> None:
    runner.close()
    path = tmp_path / "model"
    path.write_text("1")
    job = job_of(FromFile(path), noise(60))
    local = evaluate(job, tmp_path / "local", batch=2)

    def replace(state: Progress) -> None:
        if path.read_text() == "1" and state.done >= 6:
            path.write_text("2")
            assert kill_one()

    with RayRunner(cluster.address, make=making(path)) as other:
        with pytest.raises(ClusterError, match="would give other rows: its classifier is"):
            evaluate(job, tmp_path / "run", batch=2, runner=other, on_progress=replace)
        stopped = Run.open(tmp_path / "run").read()
        assert 6 <= len(stopped) < 60
        path.write_text("1")
    with RayRunner(cluster.address, make=making(path)) as other:
        run = evaluate(job, tmp_path / "run", batch=2, runner=other)
    assert whole(run, 60)
    assert rows(run).equals(rows(local))


def test_a_worker_of_another_version_adds_no_rows(cluster: Cluster, runner: RayRunner, tmp_path: Path) -> None:
    runner.close()
    path, first = tmp_path / "model", tmp_path / "first"
    path.write_text("1")

    def make() -> FromFile:
        from patchcleanser.evaluation import jobs

        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            jobs.LABELS = 99  # the number of a version that gives other labels
        return FromFile(path, pause=0.1)

    job = job_of(FromFile(path), noise(60))
    with (
        RayRunner(cluster.address, make=make) as mixed,
        pytest.raises(ClusterError, match=r"would give other rows: its labels is \d+.*the same software"),
    ):
        evaluate(job, tmp_path / "run", batch=2, runner=mixed)
    run = Run.open(tmp_path / "run")
    local = evaluate(job, tmp_path / "local", batch=2)
    done = len(run.read())
    assert run.job["labels"] == 99 or rows(run).equals(rows(local).slice(0, done))


def negated(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return -output


def test_a_hook_set_between_two_runs_makes_another_model(runner: RayRunner, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    before = evaluate(job_of(TorchClassifier(module), noise(6)), tmp_path / "plain", batch=2, runner=runner)
    module.register_forward_hook(negated)
    hooked = job_of(TorchClassifier(module), noise(6))
    with pytest.raises(RecordError, match=r"differs in classifier .*use another folder"):
        evaluate(hooked, tmp_path / "plain", batch=2, runner=runner)
    there = evaluate(hooked, tmp_path / "there", batch=2, runner=runner)
    assert rows(there).equals(rows(evaluate(hooked, tmp_path / "here", batch=2)))
    assert rows(there)["answer"] != rows(before)["answer"]


class Touched(ArrayDataset):
    """Images of which one is full of NaN as long as a file says so."""

    def __init__(self, flag: Path) -> None:
        plain = noise(20)
        super().__init__("noise", plain.images, plain.labels, plain.classes)
        self.flag = flag

    def image(self, index: int) -> torch.Tensor:
        image = super().image(index)
        return image * torch.nan if index == 9 and self.flag.exists() else image


def test_an_image_that_is_no_image_stops_a_run_and_loses_no_rows(runner: RayRunner, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    job = job_of(TorchClassifier(module), Touched(flag))
    with pytest.raises((DataError, ImageError), match="NaN") as caught:
        evaluate(job, tmp_path / "run", batch=2, runner=runner)
    assert "\n" not in str(caught.value)
    assert 9 not in (stopped := Run.open(tmp_path / "run").read(["index"])["index"].to_pylist())
    flag.unlink()
    run = evaluate(job, tmp_path / "run", batch=2, runner=runner)
    assert whole(run, 20)
    assert set(stopped) < set(range(20))
    assert rows(run).equals(rows(evaluate(job, tmp_path / "local", batch=2)))


def test_a_file_that_is_replaced_during_a_run_stops_it_and_loses_no_rows(runner: RayRunner, tmp_path: Path) -> None:
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for number, pixels in enumerate(noise(20).images):
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    job = job_of(TorchClassifier(module), load_dataset(f"folder:{tmp_path / 'photos'}"))
    plain, patched = (folder / "19.png").read_bytes(), (folder / "00.png").read_bytes()
    local = evaluate(job, tmp_path / "local", batch=2)

    def patch(state: Progress) -> None:
        (folder / "19.png").write_bytes(patched)

    with pytest.raises(DataError, match=r"a/19.png of photos changed while it was in use"):
        evaluate(job, tmp_path / "run", batch=2, runner=runner, on_progress=patch)
    stopped = Run.open(tmp_path / "run").read(["index"])["index"].to_pylist()
    assert stopped
    assert 19 not in stopped
    (folder / "19.png").write_bytes(plain)
    run = evaluate(job, tmp_path / "run", batch=2, runner=runner)
    assert whole(run, 20)
    assert rows(run).equals(rows(local))


class Mean(nn.Module):
    """Colours to gray, for networks of one channel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(1, keepdim=True)


@pytest.mark.parametrize("number", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_networks_whose_rounding_depends_on_the_batch_get_the_labels_of_a_local_run(
    runner: RayRunner, tmp_path: Path, number: int
) -> None:
    networks = [n for n in map(constructed, range(4 * number)) if is_unsteady(n)][:number]
    pixels = np.random.default_rng(0).integers(235, 256, (12, SIDE, SIDE, 1), dtype=np.uint8).repeat(3, 3)
    pixels[7] = 255
    images = ArrayDataset("bright", pixels, np.zeros(12, np.int64), [str(label) for label in range(16)])
    for at, network in enumerate(networks):
        classifier = TorchClassifier(nn.Sequential(Mean(), network.module).eval(), Preprocessing())
        job = Job(classifier, images, THREAT, masks=MASKS, table=True)
        there, here = (
            evaluate(job, tmp_path / f"{at}{name}", batch=4, runner=place)
            for name, place in (("there", runner), ("here", None))
        )
        assert rows(there).equals(rows(here))


class DeadlyToOpen:
    """Data that kill whoever opens them."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (1,)


def test_data_that_cannot_be_opened_blame_no_image(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="die before they read one"):
        find_deadly([put(ray.cloudpickle.dumps(DeadlyToOpen()))], [3, 4])
