"""The fixtures of the classifiers' tests."""

from classifiers.conftest import _one_thread

__all__ = ["_one_thread"]
