"""One pass: all labels under masks from a single pass of a network of small receptive fields, or of its trunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.algorithms import LabelFlow, certification_flow, double_masking_flow
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.results import Certificate, Verdict
from patchcleanser.core.threats import Grid
from patchcleanser.defenses.local_scores import LocalFeatures, LocalLogits
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Precision
from patchcleanser.engine.exact import ExactEngine, default_chunk
from patchcleanser.engine.masking import ImageState, LabelRequest, PairBatch, to_device
from patchcleanser.errors import InputError
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling, visible_only

STEPS = 2**16
"""Local logits are rounded to whole multiples of 1 / STEPS."""

GROUP = 64
"""Images that pass the network, or its trunk, together."""


class Pooled(NamedTuple):
    """What one pass gives for some images of one size and mask set."""

    logits: Tensor
    """[images, unions + 1, classes] in float64; the last entry is that of the unmasked image."""
    rounding: list[float]
    """For each image, how far the rounding of the pass may move a margin."""


class OnePassEngine(ExactEngine):
    """Fills the whole table of an image from one pass of the network.

    A hidden score may be anything, so it must not leave a trace in the sum of the others: a total minus the hidden
    part would, since floating-point sums round. Local logits are made whole multiples of 1 / STEPS instead, NaN being 0
    and none above 10,000 in size, and a matrix of zeros and ones sums those that are visible under each union of masks.
    Every partial sum is a whole number below 2^53 (for fewer than 2^23 scores), which float64 holds exactly. So the sum
    is exact in any order, and it is a function of the visible scores alone.
    """

    def __init__(self, classifier: Classifier, *, grid: Grid, chunk: int | None = None) -> None:
        super().__init__(classifier, grid=grid, chunk=chunk)
        self.source = LocalLogits(classifier, grid)

    def with_classifier(self, classifier: Classifier) -> ExactEngine:
        return engine_for(classifier, grid=self.grid, chunk=self.chunk)

    def labels_at_once(self, image: ImageState) -> int:
        """As many images as the network takes at once, with the labels of the first round of each."""
        return len(image.table.mask_set) * default_chunk(self.classifier.device, self.input_numel(image.pixels))

    def compute(self, requests: Sequence[LabelRequest], *, strict: bool = True, clean: bool = False) -> None:
        wanting = [request.image for request in requests if len(request.image.table.missing(request.unions))]
        for images in _groups(wanting):
            pooled = self.pooled(images)
            unions = np.append(np.arange(len(images[0].table.mask_set.unions)), UNMASKED)
            self.write(PairBatch.of(images, [unions] * len(images)), pooled.logits.flatten(0, 1), strict=strict)
            for image, rounding in zip(images, pooled.rounding, strict=True):
                image.table.rounding, image.table.passes = rounding, 1

    def logits(self, pairs: PairBatch) -> Tensor:
        used = [pairs.images[i] for i in np.unique(pairs.which)]
        tables = [table for images in _groups(used) for table in self.pooled(images).logits]
        _, which = np.unique(pairs.which, return_inverse=True)
        return torch.stack([tables[i][union] for i, union in zip(which.tolist(), pairs.unions.tolist(), strict=True)])

    def pooled(self, images: Sequence[ImageState]) -> Pooled:
        """The means of the visible local logits of images, under every union of masks and under none."""
        local = self.source(torch.stack([image.pixels for image in images]))
        # Apple's GPUs do not have float64.
        device = torch.device("cpu") if local.scores.device.type == "mps" else local.scores.device
        visible = self._visible_scores(images[0].table.mask_set, device)
        integers = (local.scores.to(device).double() * STEPS).round().flatten(2).transpose(1, 2)
        means = visible @ integers / (STEPS * visible.sum(1, keepdim=True).clamp_min(1.0))
        slack = (local.high - local.scores).amax((1, 2, 3)).tolist()
        # Two classes move by the slack and by a step each; one part in a hundred is for the rounding of these bounds.
        return Pooled(means, [2.02 * (value + 1 / STEPS) for value in slack])

    def _visible_scores(self, mask_set: MaskSet, device: torch.device) -> Tensor:
        """[unions + 1, scores]: 1 where a score sees no pixel that the union hides; the last row is all 1."""
        return self.source.visible(mask_set).flatten(1).to(device, torch.float64)


class HeadEngine(ExactEngine):
    """Runs the trunk of a network once for each image, and its head once for each label, on the features left visible.

    A label is computed as in ExactEngine, which sees the head as its classifier: in a batch of a fixed shape at a fixed
    row. Its input is a function of the visible features and of the union, since hidden features are replaced by 0.
    """

    def __init__(self, classifier: TorchClassifier, *, grid: Grid, chunk: int | None = None) -> None:
        head = TorchClassifier(classifier.module.network.head, Preprocessing(), classes=classifier.classes)  # type: ignore[union-attr, arg-type]
        super().__init__(head, grid=grid, chunk=chunk)
        self.complete = classifier
        self.source = LocalFeatures(classifier, grid)
        self._features: WeakKeyDictionary[ImageState, Tensor] = WeakKeyDictionary()
        self._input_shapes: dict[torch.Size, torch.Size] = {}

    def with_classifier(self, classifier: Classifier) -> ExactEngine:
        return engine_for(classifier, grid=self.grid, chunk=self.chunk)

    def compute(self, requests: Sequence[LabelRequest], *, strict: bool = True, clean: bool = False) -> None:
        self._run_trunk([request.image for request in requests if len(request.image.table.missing(request.unions))])
        super().compute(requests, strict=strict, clean=clean)

    def logits(self, pairs: PairBatch) -> Tensor:
        logits = super().logits(pairs)
        self.complete.classes = self.classifier.classes
        return logits

    def input_shape(self, pixels: Tensor) -> torch.Size:
        """The shape of the head's input for an image."""
        if pixels.shape not in self._input_shapes:
            width, *grid = self.source.map(pixels[None]).shape[1:]
            self._input_shapes[pixels.shape] = torch.Size((width + 1, *grid))
        return self._input_shapes[pixels.shape]

    def masked_inputs(self, pairs: PairBatch, dtype: torch.dtype | None = None) -> Tensor:
        """The head's inputs: features that a union hides are 0, and one more channel says which."""
        used, which = np.unique(pairs.which, return_inverse=True)
        images = [pairs.images[i] for i in used]
        self._run_trunk(images)
        features = torch.stack([self._features[image] for image in images])
        visible = self.source.visible(images[0].table.mask_set)
        return visible_only(
            features[to_device(which, features.device)], visible[to_device(pairs.unions, features.device)]
        )

    def _run_trunk(self, images: Sequence[ImageState]) -> None:
        """Compute and keep the features of images that have none yet."""
        for group in _groups([image for image in dict.fromkeys(images) if image not in self._features]):
            features = self.source.map(torch.stack([image.pixels for image in group]))
            self._features.update(zip(group, features.unbind(), strict=True))


def engine_for(classifier: Classifier, *, grid: Grid, chunk: int | None = None) -> OnePassEngine | HeadEngine:
    """The engine for a network that pools what is visible, or that has a head for it."""
    module = getattr(classifier, "module", None)
    if isinstance(classifier, TorchClassifier) and isinstance(module, VisibleFeatures):
        return HeadEngine(classifier, grid=grid, chunk=chunk)
    if isinstance(module, VisiblePooling):
        return OnePassEngine(classifier, grid=grid, chunk=chunk)
    raise InputError(
        "one pass takes a network of small receptive fields that pools what is visible, such as visible:net:bagnet, or "
        f"has a head for it, such as visible:net:split; got {classifier!r}"
    )


def answers_in_one_pass(classifier: Classifier) -> bool:
    """Whether the classifier is a network for one pass."""
    return isinstance(getattr(classifier, "module", None), (VisiblePooling, VisibleFeatures))


def _groups(images: Sequence[ImageState]) -> Iterator[list[ImageState]]:
    """Neighbours of one size with the same masks, at most GROUP at a time."""
    for _, same in groupby(images, key=lambda image: (image.pixels.shape, id(image.table.mask_set))):
        group = list(same)
        yield from (group[start : start + GROUP] for start in range(0, len(group), GROUP))


class OnePass(MaskDefense[Verdict, Certificate]):
    """Double-masking whose labels under all masks, and under all pairs of masks, come from one pass of the network.

    The classifier is a network of small receptive fields that takes the mean of its visible local logits
    (`visible:net:bagnet`, networks/visible_pooling.py). Hiding pixels hides every score that sees one of them. The
    network looks at the image as it is, once, and the means of the scores that are left are its labels under masks.
    Masks are built to hide few scores (MaskSet.build with `fields`), and are checked to cover the threat as ever.

    Or it has a trunk of small receptive fields and a head of large ones (`visible:net:split`, as in PatchCURE). The
    trunk looks at the image once. The head is run for each label, on the features that see no hidden pixel.

    Certificate: that of core.algorithms.certification_flow, where a label counts as wrong if its margin is so small
    that the rounding of the pass may change it. With a head, no margin is too small.

    Proof. All that certification_flow needs of labels is this: if mask i hides the patch, the label under i and any j
    is the same on the attacked image as on the clean one. A score that is visible under i and j sees no pixel that i
    hides, so none of the patch, and is unchanged (proofs/LocalScores.v: a_score_out_of_reach_is_unchanged). The label
    is a function of the visible scores alone, because they are summed as whole numbers (OnePassEngine). What is left is
    the network's own rounding: kernels may round a score differently beside other pixels. If no score moves by more
    than d (LocalLogits), its multiple of 1 / STEPS moves by at most d + 1 / STEPS, and so does a mean of such. The
    difference of two means moves by at most twice that. A label that the certificate counts as y has a larger margin,
    so it is y on the attacked image, too (proofs/OnePass.v: a_certain_label_stays_ahead, proofs/OnePass.v:
    certain_labels_certify).

    With a head, take features for scores. A visible one is unchanged to the last bit, because the trunk computes
    without rounding (networks/split.py: SplitNet). Hidden ones are replaced by 0, whatever they are. So the head's
    input under i and j has the same bits on both images, and so have its logits (ExactEngine). Nothing here depends on
    what the head computes, so any head will do (proofs/OnePass.v: labels_in_one_pass_see_visible_pixels_only).

    >>> from patchcleanser import Threat, load_classifier
    >>> import torch
    >>> defense = OnePass(load_classifier("visible:net:bagnet?width=8&depth=3", device="cpu"), Threat.square(5))
    >>> (certificate,) = defense.certify(torch.zeros(1, 3, 32, 32), [0])
    >>> len(defense.mask_set((32, 32)).unions), certificate.classifications
    (666, 1)
    """

    def _label_engine(self, chunk: int | None, precision: Precision) -> ExactEngine:
        if precision == "fast":
            raise InputError("one pass computes exact labels only; use precision='exact'")
        return engine_for(self.classifier, grid=self.threat.grid, chunk=chunk)

    @property
    def passes(self) -> int | None:  # type: ignore[override]
        """One; None with a head, which is run for each label."""
        return None if isinstance(self.engine, HeadEngine) else 1

    @property
    def receptive_field(self) -> tuple[int, int]:  # type: ignore[override]
        """Side and distance in px of the fields of the local logits or features."""
        module: Any = getattr(self.classifier, "module", None)
        return module.field, module.jump

    def verdict_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        return double_masking_flow(table)

    def certificate_flow(self, table: LabelTable, label: int, *, maps: bool = False) -> LabelFlow[Certificate]:
        return certification_flow(table, label, self.threat, maps=maps)
