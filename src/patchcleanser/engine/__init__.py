"""Labels of images under masks: an exact engine, and a fast one that checks itself against it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.classifiers.classifier import Classifier
    from patchcleanser.core.threats import Grid
    from patchcleanser.engine.exact import ExactEngine
    from patchcleanser.engine.masking import ImageState, LabelRequest

Precision = Literal["exact", "fast"]
"""Float32 throughout, or a faster backend (half precision, ONNX Runtime) whose uncertain labels go to float32."""

Confirm = Literal["sampled", "all"]
"""Which fast labels of a certificate are computed again in float32: the uncertain ones and a sample, or all."""


class RecomputeError(Exception):
    """Labels computed before cannot be mixed with new ones: start the tables of unfinished images again.

    Memory ran out and exact batches have another shape now, or fast labels proved less precise than assumed. The
    engine has adapted, so computing the same labels again makes progress.
    """


class LabelEngine(ABC):
    """Fills tables with labels of images under unions of masks."""

    exact: ExactEngine
    """Computes labels that do not depend on what else is computed."""

    fast = False
    """Whether labels may come from a backend that is faster than float32."""

    @abstractmethod
    def compute(self, requests: Sequence[LabelRequest], *, strict: bool = True, clean: bool = False) -> None:
        """Compute the labels that the tables lack, all requests batched together.

        NaN and infinite logits are an OutputError. Not `strict`, they are one only if an image gets no finite logits
        at all and noise gets none either: pixels of an attacker must not silence the classifier. `clean` says that no
        attacker touched the images; some backends and checks are for those only.
        """

    @abstractmethod
    def with_classifier(self, classifier: Classifier) -> LabelEngine:
        """The same engine with other preprocessing around the same network."""

    def calibrate(self, images: Sequence[ImageState]) -> None:  # noqa: B027
        """Learn from clean images which fast labels are uncertain; the labels computed for it are kept."""

    def reset(self, seed: tuple[int, ...] | None = None) -> None:  # noqa: B027
        """Forget what was learnt; `seed` decides which labels are sampled, None means fresh entropy."""

    def hint_total_labels(self, labels: int) -> None:  # noqa: B027
        """About how many labels will be computed: compiling pays off only for many."""


def build_engine(classifier: Classifier, *, grid: Grid, chunk: int | None = None, precision: Precision) -> LabelEngine:
    """The engine for a precision; `chunk` limits the images of one forward pass."""
    from patchcleanser.engine.exact import ExactEngine

    if precision not in ("exact", "fast"):
        raise InputError(f"precision is 'exact' or 'fast', got {precision!r}")
    exact = ExactEngine(classifier, grid=grid, chunk=chunk)
    if precision == "exact":
        return exact
    from patchcleanser.engine.fast.cascade import FastEngine

    return FastEngine(exact)
