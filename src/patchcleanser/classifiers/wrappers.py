"""Classifiers around the networks of others: inpainting, flip ensembles, ensembles, ViTs that drop tokens, and networks
of small receptive fields that answer by what is visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import InputError
from patchcleanser.networks.ensemble import Mean
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.inpainting import Inpainting
from patchcleanser.networks.token_dropping import without_hidden
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling


def inpainting(plain: Classifier) -> TorchClassifier:
    """A classifier that inpaints hidden pixels before the network of another one sees the image."""
    if plain.mask_aware:
        raise InputError(f"inpaint: takes plain torch networks only, not mask-aware ones, got {plain}")
    return _around(plain, Inpainting, "inpaint")


def mirrored(plain: Classifier) -> TorchClassifier:
    """A flip ensemble: the mean of another classifier's logits for an image and for its mirror image."""
    return _around(plain, Mirrored, "mirror")


HEADED = ("features", "head", "field", "jump")
"""What a network in two parts has: a trunk of small receptive fields, and a head (networks/split.py)."""


def visible_only(plain: Classifier) -> TorchClassifier:
    """A mask-aware classifier: the mean of the local logits, or a head on the features, that see no hidden pixel."""
    module = getattr(plain, "module", None)
    if not plain.mask_aware and all(hasattr(module, name) for name in HEADED):
        return _around(plain, VisibleFeatures, "visible")
    if plain.mask_aware or not hasattr(module, "local") or getattr(module, "votes", False):
        raise InputError(
            "visible: takes a network of small receptive fields that pools local logits by their mean, such as "
            f"net:bagnet, or one with a head, such as net:split; got {plain}"
        )
    return _around(plain, VisiblePooling, "visible")


def _around(plain: Classifier, wrapper: Callable[[nn.Module], nn.Module], kind: str) -> TorchClassifier:
    inner = _require_plain(plain, kind)
    classifier = TorchClassifier(wrapper(inner.ready_module).eval(), inner.preprocessing, classes=inner.classes)
    classifier.names, classifier.code, classifier.threshold = inner.names, inner.code, inner.threshold
    classifier.multi_label, classifier.probabilities = inner.multi_label, inner.probabilities
    return classifier


def mean_of(members: Sequence[Classifier]) -> TorchClassifier:
    """An ensemble: the mean of several classifiers' logits. Preprocessing and classes must be the same."""
    if len(members) < 2:
        raise InputError(f"mean: takes two classifiers or more, got {len(members)}; write mean:SPEC,SPEC")
    plain = [_require_plain(member, "mean") for member in members]
    first = plain[0]
    for other in plain[1:]:
        for what, ours, theirs in (
            ("preprocessing", first.preprocessing, other.preprocessing),
            ("number of classes", first.classes, other.classes),
            ("mask_aware", first.mask_aware, other.mask_aware),
            ("threshold", first.threshold, other.threshold),
            ("kind of scores", first.multi_label, other.multi_label),
            ("precision", first.dtype, other.dtype),
        ):
            if ours != theirs:
                raise InputError(f"mean: takes classifiers with the same {what}, got {ours} and {theirs}")
    names = sorted({member.names for member in plain if member.names})
    if len(names) > 1:
        raise InputError(f"mean: takes classifiers of the same classes, got {names[0][0]}, … and {names[1][0]}, …")
    module = Mean([member.ready_module for member in plain]).eval()
    classifier = TorchClassifier(module, first.preprocessing, classes=first.classes)
    classifier.names, classifier.threshold = names[0] if names else None, first.threshold
    classifier.multi_label, classifier.probabilities = first.multi_label, first.probabilities
    if any(member.code for member in plain):
        classifier.code = hashlib.sha256("\n".join(member.code for member in plain).encode()).hexdigest()
    return classifier


def _require_plain(classifier: Classifier, kind: str) -> TorchClassifier:
    """The classifier, if its logits are its network's and nothing is added to them."""
    if not isinstance(classifier, TorchClassifier) or not classifier.plain:
        raise InputError(f"{kind}: takes plain torch networks only, got {classifier}")
    if classifier.mask_aware != bool(getattr(classifier.module, "mask_aware", False)):
        raise InputError(f"{kind}: takes networks whose own attribute says that they are mask_aware, got {classifier}")
    return classifier


class TokenDroppingClassifier(TorchClassifier):
    """The ViT of another classifier, which sees only tokens with a visible pixel.

    It is mask-aware: its logits depend on the visible pixels and on the union of masks, so
    certificates hold, but they are its own, not those of the plain ViT. Use the same one to predict.
    Fewer tokens are faster, and the ViT need not learn to ignore hidden ones.
    """

    mask_aware = True

    def __init__(self, plain: Classifier) -> None:
        if not isinstance(plain, TorchClassifier) or not isinstance(plain.module, VisionTransformer):
            got = type(getattr(plain, "module", plain)).__name__
            raise InputError(f"tokens can be dropped from timm's VisionTransformer only, got {got}")
        super().__init__(plain.module, plain.preprocessing, classes=plain.classes)
        self.names, self.threshold = plain.names, plain.threshold

    def _output(self, inputs: Tensor) -> Any:
        return without_hidden(self.module, inputs)
