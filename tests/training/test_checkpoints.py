"""Checkpoints are written often enough to lose little, and not so often that writing them is most of the work."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from patchcleanser.training import checkpoints
from patchcleanser.training.checkpoints import Checkpoint


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("takes", "between"), [(0.1, 12.0), (3.0, 60.0)])
def test_large_states_are_left_less_often(
    takes: float, between: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = Clock(), []
    monkeypatch.setattr(checkpoints, "time", clock)

    def state() -> dict[str, int]:
        clock.now += takes
        written.append(clock.now)
        return {"step": len(written)}

    checkpoint = Checkpoint(tmp_path, {"seed": 0})
    for _ in range(100):  # epochs of four seconds
        clock.now += 4.0
        checkpoint.write(state)
    gaps = [after - before for before, after in pairwise(written)]
    assert between <= min(gaps) <= max(gaps) < between + takes + 5.0
    cpu = torch.device("cpu")
    assert checkpoint.read(cpu)["step"] == len(written)
    checkpoint.write(state, last=True)  # whatever the time
    assert checkpoint.read(cpu)["step"] == len(written)
