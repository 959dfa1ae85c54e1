"""The small model of tests/classifiers, for labels under masks."""

from classifiers.conftest import _one_thread, coloured, make_resnet, preprocessing, resnet

__all__ = ["_one_thread", "coloured", "make_resnet", "preprocessing", "resnet"]
