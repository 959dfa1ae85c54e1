"""A torch module as a classifier; weight files into modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import (
    Classifier,
    is_out_of_memory,
    multi_label_reason,
    padded_batch_size,
)
from patchcleanser.classifiers.fingerprints import layers, module_digest, note_caches, weights_sketch
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.errors import ClassifierError, InputError, OutputError, TrainModeError, first_line
from patchcleanser.networks.wrapper import logits_in


class TorchClassifier(Classifier):
    """Wraps a module [N, C, h, w] → logits [N, classes], on the device where its weights are.

    The module is used as it is and never changed: not moved, not put into eval mode, not
    hooked. A module in train mode is refused, and a multi-label one by defenses of one label. A timm or torchvision
    network without `preprocessing` is warned about; pass `Preprocessing()` if it normalises its inputs by itself.
    """

    def __init__(
        self, module: nn.Module, preprocessing: Preprocessing | None = None, *, classes: int | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(
                f"a TorchClassifier takes a torch module, got {type(module).__name__}; "
                'for a function use CallableClassifier(function, array="torch")'
            )
        tensor = next((t for ts in (module.parameters(), module.buffers()) for t in ts), None)
        super().__init__(preprocessing, classes=classes, device="cpu" if tensor is None else tensor.device)
        self.module = module
        self._channels_last: dict[torch.Size, bool] = {}
        """Whether the module works with that memory layout, for each input shape: sizes may differ in it."""
        self.dtype = tensor.dtype if tensor is not None and tensor.is_floating_point() else torch.float32
        if getattr(module, "mask_aware", False):
            self.mask_aware = True
        refuse_train_mode(module)
        self.multi_label, self.probabilities = _multi_label(module), ends_in(module, nn.Sigmoid)
        if preprocessing is None:
            _warn_of_bare(module)
        self._varying = any(getattr(layer, "varying_shapes", False) for layer in layers(module))
        note_caches(layers(module))

    @property
    def steady(self) -> bool:
        """Then it can be exported, recorded and compiled; a layer with `varying_shapes = True` says that it cannot."""
        return not self._varying and (not self.mask_aware or getattr(self.module, "steady", False))

    @property
    def plain(self) -> bool:
        """Whether its logits are its module's output, and no subclass changes inputs or outputs."""
        own = [TorchClassifier.logits, TorchClassifier._output, TorchClassifier.prepare]
        return [type(self).logits, type(self)._output, type(self).prepare] == own

    @property
    def ready_module(self) -> nn.Module:
        """The module; in train mode it is refused."""
        refuse_train_mode(self.module)
        return self.module

    def logits(self, inputs: Tensor) -> Tensor:
        """The module's output; mappings with `logits` (transformers) are unpacked."""
        refuse_train_mode(self.module)
        number = len(inputs)
        padding = padded_batch_size(number) - number
        if padding:
            inputs = torch.cat([inputs, inputs[-1:].expand(padding, *inputs.shape[1:])])
        try:
            output = self._output(inputs.to(self.dtype))
        except Exception as error:  # a network can fail in any way on a size or number of channels it was not built for
            if is_out_of_memory(error):
                raise
            raise OutputError(
                f"the model failed on inputs of shape {tuple(inputs.shape)}: {first_line(error)}; "
                "if their size is wrong, add ?resize=… to the spec, or in Python give "
                "TorchClassifier(module, Preprocessing(resize=…))"
            ) from error
        logits = logits_in(output)
        return logits[:number] if padding and len(logits) == number + padding else logits

    def _output(self, inputs: Tensor) -> Any:
        """Try channels last, which makes convolutions up to twice as fast on CPUs and GPUs; some modules reject it."""
        shape = inputs.shape[1:]
        if self._channels_last.get(shape, True) and inputs.ndim == 4:
            converted = inputs.contiguous(memory_format=torch.channels_last)
            if shape not in self._channels_last and converted is inputs:
                converted = inputs.clone()  # a network may write into its input before it fails
            try:
                output = self.module(converted)
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
        """A hash of parameters, buffers, structure and settings; computed anew each time, since they can change."""
        return module_digest(self.module)

    @property
    def sketch(self) -> str:
        """Of weights and buffers alone: a network may store other things of its own while it runs."""
        return "\n".join(weights_sketch(self.module))


def refuse_train_mode(module: nn.Module) -> None:
    """Raise TrainModeError if the output would depend on chance or on the rest of the batch."""
    for layer in layers(module):
        by_batch = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
        if layer.training or by_batch:
            name = next((f" {name!r}" for name, child in module.named_modules() if child is layer), "")
            where = "the model" if layer is module else f"layer{name} ({type(layer).__name__})"
            if layer.training:
                raise TrainModeError(f"{where} is in train mode; call model.eval() first")
            raise TrainModeError(
                f"{where} normalises with batch statistics even in eval mode; use track_running_stats=True"
            )


def _multi_label(module: nn.Module) -> str:
    """Why the argmax of a module's scores is no answer, if its labels may hold together; else empty."""
    if getattr(getattr(module, "config", None), "problem_type", None) == "multi_label_classification":
        fix = "set its problem_type to single_label_classification"
        return multi_label_reason("the model's config names the problem_type multi_label_classification", fix)
    return multi_label_reason(f"{type(module).__name__} ends in nn.Sigmoid") if ends_in(module, nn.Sigmoid) else ""


def ends_in(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether the last child is of a kind, or a Sequential that ends in one."""
    last = None if module is None else next(reversed(module._modules.values()), None)
    return isinstance(last, kind) or (isinstance(last, nn.Sequential) and ends_in(last, kind))


def _warn_of_bare(module: nn.Module) -> None:
    """Warn of a library's network without the preprocessing that it was trained with: its labels are silently worse."""
    config: Any = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if isinstance(config, Mapping) and "mean" in config and "std" in config:  # timm's
        mean, std = config["mean"], config["std"]
        fix = "load it as timm:NAME, or pass patchcleanser.timm_preprocessing(module)"
    elif type(module).__module__.startswith("torchvision.models."):
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        fix = "load it as torchvision:NAME, or pass what weights.transforms() says as Preprocessing(…)"
    else:
        return
    if any(mean) or any(value != 1 for value in std):
        logging.getLogger("patchcleanser").warning(
            "%s was given without preprocessing, so it sees pixels as they are; networks of its kind are trained with "
            "mean=%s and std=%s: %s; if it normalises by itself, pass Preprocessing()",
            *(type(module).__name__, mean, std, fix),
        )


def input_size(classifier: Classifier) -> tuple[int, int]:
    """The fixed input size of a classifier, which training and hardening need."""
    size = classifier.preprocessing.crop or classifier.preprocessing.resize
    if not isinstance(size, tuple):
        raise InputError(
            "training needs a fixed input size, and the preprocessing of this classifier gives none: end its name with "
            "?resize=32x32 or the like (in Python Preprocessing(resize=(32, 32), …))"
        )
    return size


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file, without a DataParallel prefix; no code in it is run."""
    path = Path(path)
    if not path.is_file():
        raise ClassifierError(f"no weight file at {path}")
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        raise ClassifierError(
            f"cannot read weights from {path}: it is no PyTorch or safetensors file of tensors alone, or is damaged"
        ) from error
    for key in ("state_dict", "model_state_dict", "model", "ema", "net"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ClassifierError(f"{path} holds no dictionary of tensors")
    return {str(k).removeprefix("module."): v for k, v in state.items()}


def load_weights(module: nn.Module, path: str | Path, *, new_classes: int | None = None) -> None:
    """Load a file's weights into a module of exactly that architecture; half floats are widened.

    With `new_classes`, a last layer with another number of classes keeps the module's own weights.
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
