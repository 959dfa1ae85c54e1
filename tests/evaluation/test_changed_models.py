"""A job speaks of one model: its rows are never another model's, whenever the weights change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Job, Preprocessing, TorchClassifier, evaluate
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.errors import ClassifierError, RecordError
from patchcleanser.evaluation import AttackJob
from patchcleanser.evaluation.workloads import Progress


class Colours(nn.Module):
    """Class 0 where the image is more red, class 1 where it is more green."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))[:, :2] * self.scale


class Storing(Colours):
    """Keeps its last output, as networks do that show their attention."""

    def forward(self, images: Tensor) -> Tensor:
        self.last = super().forward(images)
        return self.last


PAIRS = [(torch.eye(3)[n % 2][:, None, None].expand(3, 8, 8).clone(), n % 2) for n in range(6)]


def job_of(module: nn.Module) -> Job:
    return Job(TorchClassifier(module, Preprocessing()), PAIRS, "2", masks=2)


def swap(module: Colours) -> None:
    with torch.no_grad():
        module.scale.mul_(-1)


def certify(job: Job, folder: Path) -> None:
    evaluate(job, folder)


def attack(job: Job, folder: Path) -> None:
    evaluate(AttackJob(job, "square", AttackSettings(iterations=1)), folder)


@pytest.mark.parametrize("work", [certify, attack])
@pytest.mark.parametrize("folder", ["first", "second"])
def test_a_job_is_refused_once_its_model_changed(
    work: Callable[[Job, Path], None], folder: str, tmp_path: Path
) -> None:
    module = Colours().eval()
    job = job_of(module)
    work(job, tmp_path / "first")
    swap(module)
    with pytest.raises(ClassifierError, match="changed since this job was made"):
        work(job, tmp_path / folder)
    work(job_of(module), tmp_path / "third")


def test_a_run_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    module = Colours().eval()
    job = job_of(module)

    def stop(state: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(job, tmp_path, batch=2, on_progress=stop)
    swap(module)
    with pytest.raises(ClassifierError, match="make a new job"):
        evaluate(job, tmp_path)
    with pytest.raises(RecordError):
        evaluate(job_of(module), tmp_path)
    swap(module)
    assert evaluate(job_of(module), tmp_path).summary().shares["certified"].percent == 100


def test_no_row_of_other_weights_is_written_when_they_change_during_a_run(tmp_path: Path) -> None:
    module = Colours().eval()
    job = job_of(module)
    with pytest.raises(ClassifierError, match="changed while it was in use"):
        evaluate(job, tmp_path, batch=2, on_progress=lambda state: swap(module))
    swap(module)
    run = evaluate(job_of(module), tmp_path)
    assert run.read(["certified"])["certified"].to_pylist() == [True] * 6


def test_a_model_that_stores_what_it_saw_is_the_same_model_all_through_a_run(tmp_path: Path) -> None:
    assert evaluate(job_of(Storing().eval()), tmp_path, batch=2).finished
