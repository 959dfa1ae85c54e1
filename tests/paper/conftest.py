"""Images at hand for experiments: the sample of CIFAR-10 that comes with the package, as Parquet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patchcleanser.data.catalog import SAMPLE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    shutil.copyfile(SAMPLE, tmp_path / "data" / "cifar10-test-00000-of-00001.parquet")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _nothing_else_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHCLEANSER_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
