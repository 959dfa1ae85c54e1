"""A long run's state in one file, so that the same command goes on after a kill."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from patchcleanser.errors import TrainingError
from patchcleanser.records.atomic import whole_file
from patchcleanser.training.choice import Check

NAME = "checkpoint.pt"
"""Of the file, in the folder that the weights will be written to."""

SAVE_SECONDS = 10
SAVE_SHARE = 0.05
"""After the first time, and then this long after the last one, a checkpoint is written: later, if writing one takes so
long that more than this share of the time would go into it (a ViT-B's has over a GB)."""


class Checkpoint:
    """Where a run leaves its state. `key` says which run it is; the state of another one is refused."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.path, self.key = folder / NAME, dict(key)
        self._due = -float("inf")

    def read(self, device: torch.device) -> Any:
        """The state that was left, or None."""
        for part in self.path.parent.glob(f".{self.path.name}.*"):
            part.unlink(missing_ok=True)  # a kill while one was written leaves it half-written
        if not self.path.is_file():
            return None
        try:
            with torch.serialization.safe_globals([Check]):  # what harden's older checkpoints hold besides
                saved = torch.load(self.path, map_location=device, weights_only=True)
            key, state = dict(saved["key"]), saved["state"]
        except pickle.UnpicklingError as error:
            raise TrainingError(
                f"the checkpoint {self.path} is damaged, or holds more than tensors and numbers, which could run code; "
                "delete it to start again"
            ) from error
        except Exception as error:  # a torch.save file can break in as many ways as pickle can
            raise TrainingError(f"the checkpoint {self.path} is damaged ({error}); delete it to start again") from error
        different = [name for name, value in self.key.items() if key.get(name) != value]
        if different:
            raise TrainingError(f"{self.path} belongs to another run (other {', '.join(different)}); use another --out")
        return state

    def write(self, state: Callable[[], Any], *, last: bool = False) -> None:
        """Leave the state, if this is the first or the last one or some time has passed."""
        started = time.monotonic()
        if not last and started < self._due:
            return
        with whole_file(self.path) as part:
            torch.save({"key": self.key, "state": state()}, part)
        ended = time.monotonic()
        self._due = ended + max(SAVE_SECONDS, (ended - started) / SAVE_SHARE)
