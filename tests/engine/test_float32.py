"""Threads share the precision settings of torch, and none gets another's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from engine.small_networks import photos
from patchcleanser import TorchClassifier, load_classifier
from patchcleanser.engine.fast.backends import UnusableError
from patchcleanser.engine.fast.split import TripleTf32Backend, in_tf32
from patchcleanser.engine.float32 import exclusive_float32, pause_other_threads, strict_float32, strict_settings


def test_no_thread_is_in_float32_while_a_network_is_exported() -> None:
    order: list[str] = []
    waiting, inside = threading.Event(), threading.Event()

    def predict() -> None:
        with strict_float32(torch.device("cpu")):
            inside.set()
            waiting.wait(10)
            with strict_float32(torch.device("cpu")):  # whoever is in it goes on
                order.append("in float32")

    def write() -> None:
        waiting.set()
        with pause_other_threads():
            order.append("writing")

    threads = [threading.Thread(target=predict), threading.Thread(target=write)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert order == ["in float32", "writing"]
    with strict_float32(torch.device("cpu")), pause_other_threads():  # and does not wait for itself
        pass


def test_no_other_thread_computes_in_float32_during_tf32() -> None:
    device, order = torch.device("cpu"), []

    def other() -> None:
        with strict_float32(device):
            order.append("other")

    with exclusive_float32(device) as granted, in_tf32():
        assert granted
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("alone")
    thread.join(10)
    assert order == ["alone", "other"]


def test_tf32_is_refused_while_another_thread_computes_in_float32() -> None:
    device = torch.device("cpu")
    with strict_float32(device), exclusive_float32(device) as granted:
        assert not granted
        with pytest.raises(RuntimeError, match="other threads"), in_tf32():
            pass
    classifier = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    with strict_float32(device), pytest.raises(UnusableError, match="another thread"):
        TripleTf32Backend(classifier).logits(photos(1))


def test_the_programs_settings_are_restored() -> None:
    def settings() -> list[Any]:
        return [getattr(setting.owner, setting.name) for setting in strict_settings()]

    before = settings()
    with exclusive_float32(torch.device("cpu")):
        plain = settings()
        with in_tf32():
            assert settings() != plain
        assert settings() == plain == [setting.value for setting in strict_settings()]
    assert settings() == before
