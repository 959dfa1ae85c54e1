"""A torch module as a classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.base import Classifier, is_out_of_memory, rounded
from patchcleanser.classifiers.fingerprints import layers, module_digest, note_caches
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import InputError, OutputError, TrainModeError
from patchcleanser.networks.wrapper import logits_in


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
        self._channels_last: dict[torch.Size, bool] = {}
        """Whether the module bears that memory layout, for each input shape: another size's answer must not decide."""
        self.dtype = tensor.dtype if tensor is not None and tensor.is_floating_point() else torch.float32
        if getattr(module, "mask_aware", False):
            self.mask_aware = True
        refuse_train_mode(module)
        self._varying = any(getattr(layer, "varying_shapes", False) for layer in layers(module))
        note_caches(layers(module))

    @property
    def steady(self) -> bool:
        """Then it can be exported, recorded and compiled; a layer with `varying_shapes = True` says that it is not."""
        return not self._varying and (not self.mask_aware or getattr(self.module, "steady", False))

    @property
    def plain(self) -> bool:
        """Whether its answers are its network's, and nothing is added to them by a class of somebody's own."""
        own = [TorchClassifier.logits, TorchClassifier._output, TorchClassifier.prepare]
        return [type(self).logits, type(self)._output, type(self).prepare] == own

    @property
    def ready_module(self) -> nn.Module:
        """The module; in train mode it is refused."""
        refuse_train_mode(self.module)
        return self.module

    def logits(self, inputs: Tensor) -> Tensor:
        """The module's output; mappings with `logits` (transformers) are unpacked."""
        self.ready_module  # noqa: B018
        number = len(inputs)
        short = rounded(number) - number
        if short:
            inputs = torch.cat([inputs, inputs[-1:].expand(short, *inputs.shape[1:])])
        try:
            output = self._output(inputs.to(self.dtype))
        except Exception as error:  # whatever a network makes of a size or a number of channels it was not built for
            if is_out_of_memory(error):
                raise
            raise OutputError(
                f"the model failed on inputs of shape {tuple(inputs.shape)}: {type(error).__name__}: {error}; "
                "if their size is wrong, set preprocessing="
            ) from error
        logits = logits_in(output)
        return logits[:number] if short and len(logits) == number + short else logits

    def _output(self, inputs: Tensor) -> Any:
        """Convolutions are up to twice as fast with channels last, on CPUs as on GPUs, but a module may not bear it."""
        shape = inputs.shape[1:]
        if self._channels_last.get(shape, True) and inputs.ndim == 4:
            given = inputs.contiguous(memory_format=torch.channels_last)
            try:
                # Until it was seen to bear it: a network may write into what it is given before it fails.
                output = self.module(given.clone() if shape not in self._channels_last and given is inputs else given)
            except RuntimeError as error:
                if "view size is not compatible" not in str(error):
                    raise
                self._channels_last[shape] = False  # it reshapes with view()
            else:
                self._channels_last[shape] = True
                return output
        return self.module(inputs.contiguous())

    @property
    def weights(self) -> str:
        """Parameters, buffers, structure and settings; read anew each time, since they can change."""
        return module_digest(self.module)


def refuse_train_mode(module: nn.Module) -> None:
    """Raise TrainModeError if the output would depend on chance or on the rest of the batch."""
    for layer in layers(module):
        by_batch = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
        if layer.training or by_batch:
            name = next((f" {name!r}" for name, one in module.named_modules() if one is layer), "")
            where = "the model" if layer is module else f"layer{name} ({type(layer).__name__})"
            if layer.training:
                raise TrainModeError(f"{where} is in train mode; call model.eval() first")
            raise TrainModeError(
                f"{where} normalises with batch statistics even in eval mode; use track_running_stats=True"
            )


def input_size(classifier: Classifier) -> tuple[int, int]:
    """The size of a classifier's input, which training and hardening need to be fixed."""
    size = classifier.preprocessing.crop or classifier.preprocessing.resize
    if not isinstance(size, tuple):
        raise InputError("training needs a fixed input size: give the classifier a preprocessing with crop= or resize=")
    return size
