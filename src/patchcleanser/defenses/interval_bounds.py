"""Interval bound propagation: the network answers as it is, and bounds prove that no patch changes the answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from patchcleanser.classifiers.preprocessing import AnyImages, checked_images
from patchcleanser.classifiers.registry import AnyClassifier
from patchcleanser.classifiers.torch import TorchClassifier, refuse_train_mode
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.results import LocalCertificate, LocalVerdict
from patchcleanser.core.threats import AnyThreat, Threat
from patchcleanser.defenses.defense import Defense, Examination, check_range, checked_labels, examine_each, number_of
from patchcleanser.defenses.local_defense import other_classes
from patchcleanser.engine.exact import default_chunk
from patchcleanser.engine.float32 import strict_float32
from patchcleanser.engine.masking import box_masks
from patchcleanser.errors import InputError, OutputError, ThreatError
from patchcleanser.networks.interval import IntervalNet, boxes
from patchcleanser.progress import tracked


class IntervalBounds(Defense[LocalVerdict, LocalCertificate]):
    """IBP, by Chiang et al. (2020), of a network with bounds (`net:interval`).

    Certificate: for every position of the patch, and for all its pixels in [0, 1], no class's logit can exceed the
    true one's.

    Proof. The images with some content of a patch at one position form a box: the pixels of the patch anywhere in
    [0, 1], all others as they are. IntervalNet.behind bounds from above how far each class gets ahead of the true one
    anywhere in the box, rounding included. All bounds are below 0 for every box, and every attacked image lies in one
    of them, so the true class has the largest logit. A smaller patch lies inside a larger one. One patch is meant.
    """

    def __init__(self, classifier: AnyClassifier, threat: AnyThreat) -> None:
        super().__init__(classifier, threat)
        module = getattr(self.classifier, "module", None)
        if not isinstance(self.classifier, TorchClassifier) or not isinstance(module, IntervalNet):
            raise InputError(f"interval bounds need a network that has them, such as net:interval, got {classifier!r}")
        if self.threat.count > 1:
            raise ThreatError(f"the certificate of IntervalBounds is for one patch, got {self.threat}")
        self.module = module

    def check_size(self, size: Size) -> None:
        """Raise if patches do not fit, or if images are resized: resizing spreads a patch."""
        if self.threat.grid == "source" and not self.classifier.preprocessing.keeps(size):
            raise InputError(
                f"bounds are of the classifier's input, and images of {size[0]}×{size[1]} px are resized or cropped; "
                "use a threat on the input grid (--grid input, in Python grid='input')"
            )
        self.threat.shapes(size)

    def predict(self, images: AnyImages, *, progress: bool | None = False) -> list[LocalVerdict]:
        """The network's own labels."""
        inputs = tracked(self._inputs(images), "predict", progress, total=number_of(images))
        return [LocalVerdict(int(self._logits(pixels).argmax()), 1) for pixels in inputs]

    def examine(
        self, images: AnyImages, labels: Iterable[int], *, maps: bool = False, progress: bool | None = False
    ) -> list[Examination[LocalVerdict, LocalCertificate]]:
        """Label and certificate of clean images; the undefended label is the answer itself."""

        def examine(inputs: Tensor, label: int) -> Examination[LocalVerdict, LocalCertificate]:
            logits = self._logits(inputs)
            check_range([label], len(logits))
            verdict, size = LocalVerdict(int(logits.argmax()), 1), (inputs.shape[1], inputs.shape[2])
            certificate = self._certificate(inputs, label, right=verdict.label == label)
            return Examination(verdict, certificate, size, verdict.label)

        truths = checked_labels(images, labels)
        return examine_each(self, self._inputs(images), truths, examine, maps=maps, progress=progress)

    def _inputs(self, images: AnyImages) -> Iterable[Tensor]:
        """Each image as the network's input."""
        for image in checked_images(images, self.classifier.preprocessing.channels):
            pixels = self.to_threat_grid(image)
            self.check_size((pixels.shape[1], pixels.shape[2]))
            if self.threat.grid == "source":
                with torch.inference_mode(), strict_float32(self.classifier.device):
                    pixels = self.classifier.prepare(pixels[None])[0]
            yield pixels

    def _logits(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode(), strict_float32(self.classifier.device):
            logits = self.classifier.checked_logits(inputs[None])[0]
        if not torch.isfinite(logits).all():
            raise OutputError("the classifier returned NaN or infinite logits; check its weights and preprocessing")
        return logits

    def _certificate(self, inputs: Tensor, label: int, *, right: bool) -> LocalCertificate:
        refuse_train_mode(self.module)
        ends = torch.stack([torch.zeros_like(inputs[:, :1, :1]), torch.ones_like(inputs[:, :1, :1])])
        low, high = self.classifier.preprocessing.normalise(ends)[:, :, 0, 0]
        worst, where, passes = torch.inf, None, 1
        windows = _windows(self.threat, (inputs.shape[1], inputs.shape[2]))
        if not right:  # no bound can hold, since the clean image lies in every box
            windows = windows[:1]
        step = default_chunk(inputs.device, 2 * inputs.numel())
        for start in range(0, len(windows), step):
            part = windows[start : start + step]
            passes += 2 * len(part)  # for the middle and for half the width of each box
            # Bounds that overflowed are NaN or infinite, and prove nothing.
            margins = -self._behind(inputs, part, label, low, high).nan_to_num(nan=torch.inf, posinf=torch.inf)
            number = int(margins.argmin())
            if float(margins[number]) < worst:
                worst, where = float(margins[number]), part[number]
            if worst <= 0:
                break  # refuted; the rest cannot help
        failing = None if worst > 0 or where is None else (where,)
        return LocalCertificate(label, worst > 0, failing, worst, passes)

    def _behind(self, inputs: Tensor, windows: list[Window], label: int, low: Tensor, high: Tensor) -> Tensor:
        """For each position the most by which any other class can exceed the label."""
        edges = torch.tensor([(w.top, w.bottom, w.left, w.right) for w in windows], device=inputs.device)
        hidden = box_masks(edges[:, None], inputs.shape[1:])
        with torch.inference_mode(), strict_float32(self.classifier.device):
            labels = torch.full((len(windows),), label, device=inputs.device)
            behind = self.module.behind(*boxes(inputs.expand(len(windows), -1, -1, -1), hidden, low, high), labels)
        return other_classes(behind.T, label).amax(0)


def _windows(threat: Threat, size: Size) -> list[Window]:
    """Every position of every shape."""
    room = threat.room(size)
    return [
        Window(top, left, height, width)
        for height, width in threat.shapes(size)
        for top in range(room.top, room.bottom - height + 1)
        for left in range(room.left, room.right - width + 1)
    ]
