"""What a network's last layer is given, beside what it answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patchcleanser.errors import InputError
from patchcleanser.networks.wrapper import logits_in


def tell_features(module: nn.Module, inputs: Tensor) -> nn.Linear:
    """From now on a network's answers [N, classes] are followed by its features; returns its last linear layer.

    Features are what that layer is given. `inputs` are some to try it with: a network that does more with the
    layer's output than return it is refused.
    """
    with torch.no_grad():
        plain = logits_in(module(inputs))
        classes = plain.shape[1]
        heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
        if heads:
            heads[-1].register_forward_hook(_told)
            both = logits_in(module(inputs))
            if both.shape == (len(inputs), classes + heads[-1].in_features) and torch.equal(both[:, :classes], plain):
                return heads[-1]
    raise InputError(
        f"{type(module).__name__} does not end in a linear layer of {classes} classes, so it has no features to keep; "
        "do without --features"
    )


def _told(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.cat([output, given[0]], dim=-1)
