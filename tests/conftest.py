"""Settings shared by all tests."""

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

# Tests run in one process per core; more threads in each, or in what they start, would only fight over the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is started in the background (nohup, some CI) ignores Ctrl-C, and so would the programs that tests stop with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _known_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which fast labels are audited is no chance in tests, though nobody can know it elsewhere."""
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: draw(0 if seed is None else seed))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here; install it, or name it in CHROMIUM")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
