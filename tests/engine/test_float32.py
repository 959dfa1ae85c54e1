"""Threads share the precision settings of torch, and none gets another's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from patchcleanser.engine.float32 import Setting, override, pause_other_threads, strict_float32, strict_settings


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


def test_the_programs_settings_are_restored() -> None:
    def settings() -> list[Any]:
        return [getattr(setting.owner, setting.name) for setting in strict_settings()]

    before, strict = settings(), [setting.value for setting in strict_settings()]
    with override(Setting(torch.backends.cudnn, "benchmark", True)):
        assert torch.backends.cudnn.benchmark
        with strict_float32(torch.device("cpu")):
            assert settings() == strict
        assert torch.backends.cudnn.benchmark
    assert settings() == before
