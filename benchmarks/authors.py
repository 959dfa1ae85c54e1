"""The authors' loop, restated from the paper's Algorithms 1 and 2: what speed is measured against.

One forward pass per mask or pair of masks, float32, no TF32; where it certifies, a batch of 16 images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchcleanser import DoubleMasking, TorchClassifier
from patchcleanser.engine.float32 import strict_float32


class Authors:
    """One forward pass per mask or pair, as the paper's algorithms are written."""

    def __init__(self, classifier: TorchClassifier, defense: DoubleMasking, side: int) -> None:
        self.classifier = classifier
        keeps = torch.from_numpy(defense.mask_set((side, side)).visible())
        self.keeps = keeps.to(classifier.device)
        self.masks = len(keeps)

    def labels(self, inputs: Tensor, keep: Tensor) -> Tensor:
        """One forward pass."""
        return self.classifier.module(torch.where(keep, inputs, 0.0)).argmax(1)

    def undefended(self, inputs: Tensor) -> Tensor:
        """No mask at all: what the network costs by itself."""
        with torch.inference_mode(), strict_float32(self.classifier.device):
            labels: Tensor = self.classifier.module(inputs).argmax(1)
        return labels

    def table(self, inputs: Tensor) -> list[Tensor]:
        """Labels of one batch under every pair of masks, in the order (0,0), (0,1), …"""
        with torch.inference_mode(), strict_float32(self.classifier.device):
            return [
                self.labels(inputs, self.keeps[i] & self.keeps[j])
                for i in range(self.masks)
                for j in range(i, self.masks)
            ]

    def clean(self, inputs: Tensor) -> list[Tensor]:
        """A clean image, all masks agree: one pass per mask."""
        with torch.inference_mode(), strict_float32(self.classifier.device):
            return [self.labels(inputs, keep) for keep in self.keeps]

    def worst(self, inputs: Tensor) -> list[Tensor]:
        """Every mask disagrees: the first round, then every second mask for each of them."""
        with torch.inference_mode(), strict_float32(self.classifier.device):
            second = [self.labels(inputs, a & b) for a in self.keeps for b in self.keeps]
        return self.clean(inputs) + second
