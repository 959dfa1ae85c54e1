"""A trained classifier on disk: float16 weights and a card that says how they came about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from patchcleanser.data.cache import checksum
from patchcleanser.records.atomic import whole_file
from patchcleanser.training import checkpoints


def write_model(module: nn.Module, folder: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Write model.safetensors (float16) and card.json; return the card with the hash.

    The card comes last, and then a checkpoint that the run left is of no more use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    with whole_file(weights) as part:
        save_file({name: _half(tensor) for name, tensor in module.state_dict().items()}, part)
    card = {**card, "weights_sha256": checksum(weights)}
    with whole_file(folder / "card.json") as part:
        part.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (folder / checkpoints.NAME).unlink(missing_ok=True)
    return card


def _half(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.half() if tensor.is_floating_point() else tensor
