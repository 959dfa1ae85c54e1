"""What Ray is asked for is looked at before any cluster is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("ray")

from patchcleanser import Threat, load_classifier, load_dataset
from patchcleanser.cli.app import app
from patchcleanser.cluster.runner import RayRunner
from patchcleanser.errors import ClusterError, InputError
from patchcleanser.evaluation import Job, evaluate

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"address": "127.0.0.1:1"}, ClusterError, "no Ray cluster answers at 127.0.0.1:1 .*ray start --head"),
        ({"address": "ray://somewhere:10001"}, InputError, "ray job submit"),
        ({"address": "somewhere"}, InputError, "HOST:PORT"),
        ({"workers": 0}, InputError, "at least 1 worker is needed, got 0"),
        ({"cpus_per_worker": 0}, InputError, "1 or more CPUs, got 0 and 0"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    job = Job(load_classifier("zoo:tiny"), load_dataset("sample"), Threat.square(2))
    with pytest.raises(error, match=message):
        evaluate(job, tmp_path / "run", runner=RayRunner(**options))
    assert not (tmp_path / "run").exists()


def test_without_ray_the_command_that_installs_it_is_said() -> None:
    code = "import sys; sys.modules['ray'] = None; import patchcleanser.cluster.runner"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ray is not installed; run, in a clone of the repository: pip install '.[ray]'" in ended.stderr


def test_workers_without_a_cluster_are_refused() -> None:
    done = CliRunner().invoke(app, ["reproduce", "table3", "--workers", "2"])
    assert isinstance(done.exception, InputError)
    assert "--workers belongs to --on ray" in str(done.exception)
