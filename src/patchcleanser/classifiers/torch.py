"""A torch module as a classifier."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import TrainModeError


class TorchClassifier(Classifier):
    """Wraps a module [N, C, h, w] → logits [N, classes], on the device where its weights are.

    The module is used as it is and never changed: not moved, not put into eval mode, not
    hooked. A module in train mode is refused.
    """

    def __init__(
        self, module: nn.Module, preprocessing: Preprocessing | None = None, *, classes: int | None = None
    ) -> None:
        tensor = next((t for ts in (module.parameters(), module.buffers()) for t in ts), None)
        super().__init__(preprocessing, classes=classes, device="cpu" if tensor is None else tensor.device)
        self.module = module
        self.dtype = tensor.dtype if tensor is not None and tensor.is_floating_point() else torch.float32
        refuse_train_mode(module)

    def logits(self, inputs: Tensor) -> Tensor:
        """The module's output; mappings with `logits` (transformers) are unpacked."""
        refuse_train_mode(self.module)
        output = self.module(inputs.to(self.dtype))
        logits: Tensor = getattr(output, "logits", output)
        return logits

    @property
    def weights(self) -> str:
        """Parameters, buffers and structure; read anew each time, since weights can change."""
        digest = hashlib.sha256(repr(self.module).encode())
        for name, child in self.module.named_modules():
            digest.update(f"{name}:{type(child).__module__}.{type(child).__qualname__}\n".encode())
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def refuse_train_mode(module: nn.Module) -> None:
    """Raise TrainModeError if the output would depend on chance or on the rest of the batch."""
    for name, child in module.named_modules():
        where = f"layer {name!r} ({type(child).__name__})" if name else "the model"
        if child.training:
            raise TrainModeError(f"{where} is in train mode; call model.eval() first")
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_mean is None:
            raise TrainModeError(
                f"{where} normalises with batch statistics even in eval mode; use track_running_stats=True"
            )
