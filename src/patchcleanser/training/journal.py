"""What a training run writes down: one line an epoch, in a CSV file and for TensorBoard."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchcleanser.records.atomic import whole_file


@dataclass(frozen=True)
class Epoch:
    """One line of the training log."""

    epoch: int
    rate: float
    loss: float
    accuracy: float
    """On masked, augmented training images."""
    seconds: float
    clean: float | None = None
    survival: float | None = None
    """On the held-out part, without augmentation: right unmasked, and right under all views."""


def open_board(out: Path) -> Any:
    """A TensorBoard writer, where tensorboard is installed; metrics.csv is written in any case."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(out / "tensorboard"))


def draw(board: Any, epoch: Epoch) -> None:
    """Add one epoch to the board."""
    for name, value in asdict(epoch).items():
        if name != "epoch" and value is not None:
            board.add_scalar(name, value, epoch.epoch)


def write_log(history: list[Epoch], path: Path) -> None:
    """Write the whole history as CSV."""
    with whole_file(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(history[0])))
        writer.writeheader()
        writer.writerows(asdict(epoch) for epoch in history)
