"""The mean of several networks' answers: as dear as all of them, and more often right than any."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcleanser.classifiers.base import Classifier, logits_in
from patchcleanser.classifiers.torch import TorchClassifier, require_plain
from patchcleanser.errors import InputError

WHAT = "a mean can be taken over the answers of"


class Mean(nn.Module):
    """Networks that are all asked about every image, of which the same pixels are hidden for each."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.mask_aware = all(getattr(network, "mask_aware", False) for network in networks)
        self.steady = all(getattr(network, "steady", False) for network in networks)

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C, H, W] → the mean of the logits of all."""
        return torch.stack([logits_in(network(inputs)) for network in self.networks]).mean(0)


def mean_of(members: Sequence[Classifier]) -> TorchClassifier:
    """A classifier that answers by the mean of others' logits; they must see images alike and know the same classes."""
    if len(members) < 2:
        raise InputError(f"{WHAT} two classifiers or more, got {len(members)}; write mean:SPEC,SPEC")
    plain = [require_plain(member, WHAT) for member in members]
    first = plain[0]
    for other in plain[1:]:
        for what, mine, its in (
            ("preprocessing", first.preprocessing, other.preprocessing),
            ("number of classes", first.classes, other.classes),
            ("knowledge of what is hidden", first.mask_aware, other.mask_aware),
            ("precision", first.dtype, other.dtype),
        ):
            if mine != its:
                raise InputError(f"{WHAT} classifiers with the same {what}, got {mine} and {its}")
    names = sorted({member.names for member in plain if member.names})
    if len(names) > 1:
        raise InputError(f"{WHAT} classifiers of the same classes, got {names[0][0]}, … and {names[1][0]}, …")
    module = Mean([member.ready_module for member in plain]).eval()
    classifier = TorchClassifier(module, first.preprocessing, classes=first.classes)
    classifier.names = names[0] if names else None
    if any(member.code for member in plain):
        classifier.code = hashlib.sha256("\n".join(member.code for member in plain).encode()).hexdigest()
    return classifier
