"""Weight files into modules: safetensors or torch, checked, never executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from patchcleanser.errors import ClassifierError

_NESTED = ("state_dict", "model_state_dict", "model", "ema", "net")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file, without a DataParallel prefix."""
    path = Path(path)
    if not path.is_file():
        raise ClassifierError(f"no weight file at {path}")
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        raise ClassifierError(f"cannot read weights from {path}: {error}") from error
    for key in _NESTED:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ClassifierError(f"{path} holds no dictionary of tensors")
    return {str(k).removeprefix("module."): v for k, v in state.items()}


def load_weights(module: nn.Module, path: str | Path, *, new_classes: int | None = None) -> None:
    """Put a file's weights into a module of exactly that architecture; half floats are widened.

    With `new_classes`, a last layer of another number of classes is left as the module has it.
    """
    state = read_weights(path)
    own = module.state_dict()
    if new_classes is not None:
        last = [name for name in own if name in state and _is_last(own[name], state[name], new_classes)]
        if not last:
            raise ClassifierError(f"{path} has no last layer of another number of classes than {new_classes}")
        state |= {name: own[name] for name in last}
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)}, wanted {tuple(own[name].shape)}"
        for name in own
        if name in state and own[name].shape != state[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ClassifierError(
            f"{path} does not fit {type(module).__name__}: {'; '.join(problems[:3])}{more}; "
            "check the architecture and the number of classes"
        )
    module.load_state_dict(state)


def _is_last(new: Tensor, old: Tensor, classes: int) -> bool:
    """Whether a tensor has one row for each class, and had another number of them."""
    shapes = new.shape, old.shape
    return all(shapes) and shapes[0][1:] == shapes[1][1:] and shapes[1][0] != shapes[0][0] == classes
