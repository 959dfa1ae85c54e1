"""The small model of tests/classifiers, and processors without half precision."""

import pytest

from classifiers.conftest import _one_thread, coloured, make_resnet, preprocessing, resnet

__all__ = ["_one_thread", "coloured", "make_resnet", "preprocessing", "resnet"]


@pytest.fixture
def no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for half precision."""
    monkeypatch.setattr("patchcleanser.engine.fast.backends.half_type", lambda device: None)
