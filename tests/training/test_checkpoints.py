"""Checkpoints are written often enough to lose little, and not so often that writing them is most of the work."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchcleanser.errors import TrainingError
from patchcleanser.training import artifacts
from patchcleanser.training.artifacts import CHECKPOINT, Checkpoint


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
    monkeypatch.setattr(artifacts, "time", clock)

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


class Bomb:
    """Whoever unpickles it writes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.canary, "code of a stranger ran")


@pytest.mark.parametrize("place", ["key", "state"])
def test_a_checkpoint_runs_no_code(place: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content: dict[str, Any] = {"key": {"seed": 0}, "state": {"step": 1}}
    content[place]["more"] = Bomb(canary)
    torch.save(content, tmp_path / CHECKPOINT)
    with pytest.raises(TrainingError, match=r"holds more than tensors and numbers.*delete it to start again") as error:
        Checkpoint(tmp_path, {"seed": 0}).read(torch.device("cpu"))
    assert "\n" not in str(error.value)
    assert not canary.exists()


def test_all_that_train_and_harden_leave_is_read_again(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {
        "module": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "order": np.random.default_rng(0).bit_generator.state,
        "checks": [{"epoch": 1, "loss": None, "survived": (True, False)}],
        "weights": {(1, 0.5): layer.state_dict()},
        "best": (1, layer.state_dict()),
    }
    checkpoint = Checkpoint(tmp_path, {"seed": 0, "settings": {"frozen": ("layer4",)}})
    checkpoint.write(lambda: state)
    restored = checkpoint.read(torch.device("cpu"))
    assert restored["checks"] == state["checks"]
    assert restored["order"] == state["order"]
    assert restored["weights"].keys() == state["weights"].keys()  # type: ignore[attr-defined]
    assert torch.equal(restored["torch"], torch.get_rng_state())
    optimizer.load_state_dict(restored["optimizer"])
