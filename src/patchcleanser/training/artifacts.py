"""The files of a run: the checkpoint to resume from, the log of epochs, and at last the weights with their card."""

from __future__ import annotations

import csv
import json
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from patchcleanser.errors import TrainingError
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.cache import checksum

CHECKPOINT = "checkpoint.pt"

SAVE_SECONDS = 10
"""Seconds from one checkpoint to the next, at least."""
SAVE_SHARE = 0.05
"""Largest share of the time that goes into writing checkpoints (that of a ViT-B has over a GB)."""

OnProgress = Callable[[float, int, str], None]
"""Called with the epochs that are over, the epochs in all, and a line about the current state."""


class Checkpoint:
    """The state of a run in one file. `key` identifies the run; the state of another run is refused."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.path, self.key = folder / CHECKPOINT, dict(key)
        self._due = -float("inf")

    def read(self, device: torch.device) -> Any:
        """The stored state with its tensors on the device, or None without a checkpoint."""
        for part in self.path.parent.glob(f".{self.path.name}.*"):
            part.unlink(missing_ok=True)  # left by a kill while a checkpoint was written
        if not self.path.is_file():
            return None
        try:
            stored = torch.load(self.path, map_location=device, weights_only=True)
            key, state = dict(stored["key"]), stored["state"]
        except pickle.UnpicklingError as error:
            raise TrainingError(
                f"the checkpoint {self.path} is damaged, or holds more than tensors and numbers, which could run code; "
                "delete it to start again"
            ) from error
        except Exception as error:  # a damaged file makes torch.load raise almost anything
            raise TrainingError(f"the checkpoint {self.path} is damaged ({error}); delete it to start again") from error
        different = [name for name, value in self.key.items() if key.get(name) != value]
        if different:
            raise TrainingError(f"{self.path} belongs to another run (other {', '.join(different)}); use another --out")
        return state

    def write(self, state: Callable[[], Any], *, last: bool = False) -> None:
        """Store the state if a checkpoint is due, or if this is the last one."""
        started = time.monotonic()
        if not last and started < self._due:
            return
        with whole_file(self.path) as part:
            torch.save({"key": self.key, "state": state()}, part)
        ended = time.monotonic()
        self._due = ended + max(SAVE_SECONDS, (ended - started) / SAVE_SHARE)


@dataclass(frozen=True)
class Epoch:
    """One row of the training log."""

    epoch: int
    rate: float
    loss: float
    accuracy: float
    """Share of masked, augmented training images with the right label, or whose top class is one of several."""
    seconds: float
    clean: float | None = None
    """Share of held-out images with the right label, unmasked and not augmented; of several labels, the mean average
    precision."""
    survival: float | None = None
    """Share of held-out images whose label is also right under all two-mask views; of several labels, the mean average
    precision of the worst scores."""

    def __str__(self) -> str:
        held_out = "" if self.survival is None else f"  held out: {self.clean:.3f}, under masks {self.survival:.3f}"
        return f"loss {self.loss:.3f}  accuracy {self.accuracy:.3f}{held_out}"


class EpochLog:
    """The log of a run: metrics.csv at its end, and TensorBoard while it runs, where that is installed."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.tensorboard: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(out / "tensorboard"))

    def add(self, epoch: Epoch) -> None:
        for name, value in asdict(epoch).items():
            if self.tensorboard is not None and name != "epoch" and value is not None:
                self.tensorboard.add_scalar(name, value, epoch.epoch)

    def close(self, history: list[Epoch]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        with whole_file(self.out / "metrics.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(history[0])))
            writer.writeheader()
            writer.writerows(asdict(epoch) for epoch in history)


def write_model(module: nn.Module, folder: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Write model.safetensors (float16) and card.json, delete the checkpoint, and return the card with the hash."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    with whole_file(weights) as part:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()}
        save_file({name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}, part)
    card = {**card, "weights_sha256": checksum(weights)}
    with whole_file(folder / "card.json") as part:
        part.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (folder / CHECKPOINT).unlink(missing_ok=True)  # last: a kill before loses nothing
    return card
