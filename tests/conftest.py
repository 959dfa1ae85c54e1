"""Settings shared by all tests."""

import os
import signal

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
