"""Classifiers whose networks ask those of others: inpainted, flip ensembles, ensembles, and ViTs that drop tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.classifiers.base import Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import InputError
from patchcleanser.networks.ensemble import Mean
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.inpainting import Inpainting
from patchcleanser.networks.token_dropping import without_hidden
from patchcleanser.networks.wrapper import Around

MEAN = "a mean can be taken over the answers of"
INPAINT = "hidden pixels can be filled in for"


def inpainting(plain: TorchClassifier) -> TorchClassifier:
    """A classifier that fills in what masks hide and then asks the network of another."""
    if plain.mask_aware:
        raise InputError(
            f"{INPAINT} plain torch networks only, not one that is told what is hidden already, got {plain}"
        )
    return around(plain, Inpainting, INPAINT)


def mirrored(plain: TorchClassifier) -> TorchClassifier:
    """A classifier that answers by the mean of another's answers to an image and to its mirror image."""
    return around(plain, Mirrored, "answers to mirror images can be asked of")


def mean_of(members: Sequence[Classifier]) -> TorchClassifier:
    """A classifier that answers by the mean of others' logits; they must see images alike and know the same classes."""
    if len(members) < 2:
        raise InputError(f"{MEAN} two classifiers or more, got {len(members)}; write mean:SPEC,SPEC")
    plain = [require_plain(member, MEAN) for member in members]
    first = plain[0]
    for other in plain[1:]:
        for what, mine, its in (
            ("preprocessing", first.preprocessing, other.preprocessing),
            ("number of classes", first.classes, other.classes),
            ("knowledge of what is hidden", first.mask_aware, other.mask_aware),
            ("precision", first.dtype, other.dtype),
        ):
            if mine != its:
                raise InputError(f"{MEAN} classifiers with the same {what}, got {mine} and {its}")
    names = sorted({member.names for member in plain if member.names})
    if len(names) > 1:
        raise InputError(f"{MEAN} classifiers of the same classes, got {names[0][0]}, … and {names[1][0]}, …")
    module = Mean([member.ready_module for member in plain]).eval()
    classifier = TorchClassifier(module, first.preprocessing, classes=first.classes)
    classifier.names = names[0] if names else None
    if any(member.code for member in plain):
        classifier.code = hashlib.sha256("\n".join(member.code for member in plain).encode()).hexdigest()
    return classifier


def around(plain: Classifier, wrapper: Callable[[nn.Module], Around], what: str) -> TorchClassifier:
    """A classifier whose network goes around another's; one that adds anything to its network's answers is refused."""
    found = require_plain(plain, what)
    classifier = TorchClassifier(wrapper(found.ready_module).eval(), found.preprocessing, classes=found.classes)
    classifier.names, classifier.code = found.names, found.code
    return classifier


def require_plain(classifier: Classifier, what: str) -> TorchClassifier:
    """The classifier, if its answers are its network's and nothing is added to them."""
    if not isinstance(classifier, TorchClassifier) or not classifier.plain:
        raise InputError(f"{what} plain torch networks only, got {classifier}")
    if classifier.mask_aware != bool(getattr(classifier.module, "mask_aware", False)):
        raise InputError(f"{what} networks that say themselves whether they are told what is hidden, got {classifier}")
    return classifier


class TokenDroppingClassifier(TorchClassifier):
    """The ViT of another classifier, which sees only tokens with a visible pixel.

    It is mask-aware: what it answers depends on the visible pixels and on the union of masks, so
    certificates hold, but they are its own, not those of the plain ViT. Use the same one to predict.
    Fewer tokens are faster, and no token has to be learnt to mean nothing.
    """

    mask_aware = True

    def __init__(self, plain: TorchClassifier) -> None:
        if not isinstance(plain, TorchClassifier) or not isinstance(plain.module, VisionTransformer):
            what = type(getattr(plain, "module", plain)).__name__
            raise InputError(f"tokens can be dropped from timm's VisionTransformer only, got {what}")
        super().__init__(plain.module, plain.preprocessing, classes=plain.classes)
        self.names = plain.names

    def _output(self, inputs: Tensor) -> Any:
        return without_hidden(self.module, inputs)
