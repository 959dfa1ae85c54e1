"""Learning from a teacher: its logits, its feature maps, and the inputs of a last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import InputError, TrainingError
from patchcleanser.networks.wrapper import logits_in
from patchcleanser.training.cutout import masked_inputs
from patchcleanser.training.training_state import compile_for


class FeatureTap(nn.Module):
    """A timm network that returns two feature maps besides its logits: one at a relative `depth`, and the last.

    `inputs` are a few to try it with.
    """

    def __init__(self, network: Any, inputs: Tensor, depth: float) -> None:
        super().__init__()
        self.network = network
        training = network.training
        try:
            with torch.no_grad():
                last_map, maps = self.network.eval().forward_intermediates(inputs)
                self.network.forward_head(last_map)
        except Exception as error:  # a network that is not timm's, or is built of its layers
            raise TrainingError(
                f"{type(network).__name__} has no feature maps (timm's forward_intermediates: {error}), "
                "so feature distillation cannot use it; use guidance=0"
            ) from error
        finally:
            network.train(training)
        last = len(maps) - 1
        if last < 1:
            raise TrainingError(
                f"{type(network).__name__} has one feature map, feature distillation needs two; use guidance=0"
            )
        self.indices = [max(0, min(round(depth * len(maps)), last) - 1), last]
        self.channels = [maps[index].shape[1] for index in self.indices]

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and feature maps [N, channels, h, w]."""
        last, maps = self.network.forward_intermediates(inputs, indices=self.indices)
        return self.network.forward_head(last), maps


class FeatureProjector(nn.Module):
    """Linear maps from a network's features to a teacher's, trained with the network and then discarded.

    A transformer trained from scratch must learn locality from the data. The features that a convolutional teacher has
    at the place of a token teach it that directly (Li et al., "Locality Guidance", 2022).
    """

    def __init__(self, channels: list[int], teacher_channels: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in zip(channels, teacher_channels, strict=True))

    def forward(self, maps: list[Tensor], teacher_maps: list[Tensor]) -> Tensor:
        """Mean squared error of the projected maps; the teacher's channels are normalised to count the same."""
        errors = []
        for layer, features, target in zip(self.layers, maps, teacher_maps, strict=True):
            target = functional.batch_norm(target.float(), None, None, training=True)
            target = functional.interpolate(target, features.shape[2:], mode="bilinear", align_corners=False)
            errors.append(functional.mse_loss(layer(features).float(), target))
        return torch.stack(errors).mean()


class Teacher:
    """A network to learn from, which sees images [N, 3, H, W] in [0, 1] through its own preprocessing.

    With `examples` to try it with it returns feature maps, too. It is compiled if `steps` steps are enough for that.
    """

    def __init__(
        self, classifier: TorchClassifier, device: torch.device, *, steps: int, examples: Tensor | None
    ) -> None:
        self.preprocessing = classifier.preprocessing.uncropped
        self.module = classifier.module.to(device).eval()
        if device.type == "cuda":
            self.module.to(memory_format=torch.channels_last)
        self.tap = None if examples is None else FeatureTap(self.module, self._inputs(examples), depth=1.0)
        self.forward = compile_for(steps, self.tap or self.module, device)

    def __call__(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of images, and feature maps, if any."""
        output = self.forward(self._inputs(images))
        return output if self.tap is not None else (output, [])

    def _inputs(self, images: Tensor) -> Tensor:
        inputs = masked_inputs(self.module, self.preprocessing(images))
        return inputs.contiguous(memory_format=torch.channels_last) if inputs.is_cuda else inputs


def append_features(module: nn.Module, inputs: Tensor) -> nn.Linear:
    """Make a network return [logits, features] [N, classes + features], and return its last linear layer.

    Features are the inputs of that layer. `inputs` are a few to try the network with: one that does more with the
    layer's output than return it is refused.
    """
    with torch.no_grad():
        logits = logits_in(module(inputs))
        classes = logits.shape[1]
        heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
        if heads:
            heads[-1].register_forward_hook(_append_inputs)
            both = logits_in(module(inputs))
            if both.shape == (len(inputs), classes + heads[-1].in_features) and torch.equal(both[:, :classes], logits):
                return heads[-1]
    raise InputError(
        f"{type(module).__name__} does not end in a linear layer of {classes} classes, so it has no features to keep; "
        "do without --features"
    )


def _append_inputs(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.cat([output, inputs[0]], dim=-1)
