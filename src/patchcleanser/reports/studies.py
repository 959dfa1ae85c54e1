"""Study: one run, and everything a report says of it, read from its rows once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.records.derive import Derived
from patchcleanser.records.metrics import COLUMNS_OF, Proportion, Summary, certified_fooled, per_class, summary
from patchcleanser.records.run import Run

CASES = {"agreed": "I: all agree", "disagreer": "II: a disagreer decides", "majority": "III: the majority decides"}


@dataclass(frozen=True, eq=False)
class Study:
    """A run with its summaries, equal only to itself; `derived` is None where no two-mask tables were kept."""

    run: Run
    derived: Derived | None
    summary: Summary
    classes: dict[int, dict[str, Proportion]]
    cases: dict[str, tuple[Proportion, Proportion]]
    """Per case (of an attack: under attack): its share of the images, and how many of those were answered right."""
    margins: NDArray[np.float64]
    """The smallest logit margins of the certified (or detection-certified) images; an attack has none."""
    skipped: list[tuple[str, str]]
    """Id and reason of each image without an answer."""
    sizes: dict[Size, int]
    """Images of each size on the threat's grid, the commonest first."""
    missing: int
    """Batches that are not done."""
    fooled: int = 0
    """Certified images that an attack fooled: there must be none."""

    @property
    def attacked(self) -> bool:
        """Whether the run attacks its images, and does not only certify them."""
        return self.run.kind == "attack"

    @property
    def held(self) -> str:
        """The name of the share that stood the attack: answered right, or of a detection, not wrong unnoticed."""
        return "never_wrong_silently" if self.detects else "robust"

    @property
    def detects(self) -> bool:
        """Whether the run only detects, a weaker promise that is never counted with certified images."""
        return "detection_certified" in self.summary.shares

    @property
    def promise(self) -> str:
        """The name of the share that this run's defense proves."""
        return "detection_certified" if self.detects else "certified"

    @property
    def size(self) -> Size:
        """The commonest size."""
        return next(iter(self.sizes))

    @property
    def has_masks(self) -> bool:
        """Whether the defense hides places by masks; others have none to show."""
        return bool(self.run.job.get("masks") or self.run.job.get("stride"))

    @cached_property
    def masks(self) -> MaskSet:
        """The masks of images of the commonest size."""
        return self.run.mask_set(self.size)

    def class_name(self, label: int) -> str:
        """What the dataset calls a true class, or its number."""
        return _named(self.metadata("classes"), label)

    def answer_name(self, label: int) -> str:
        """What the model calls its answer; models that name nothing speak of the dataset's classes."""
        return _named(self.metadata("model_classes") or self.metadata("classes"), label)

    def metadata(self, name: str) -> Any:
        """A circumstance of the run, if it was noted."""
        return self.run.metadata.get(name)

    @property
    def per_image(self) -> tuple[float, float]:
        """Classifications and seconds an image took."""
        images = max(1, self.summary.images)
        return self.summary.classifications / images, self.summary.seconds / images


def read_study(run: Run, derived: Derived | None) -> Study | None:
    """Everything a report says of a run; None if not one image has an answer yet."""
    attacked = run.kind == "attack"
    rows = run.read([*COLUMNS_OF[run.kind], "id", "height", "width"])
    answered = rows.filter(compute.is_null(rows["skipped"]))
    left_out = rows.filter(compute.is_valid(rows["skipped"]))
    if not len(answered):
        return None
    return Study(
        run=run,
        derived=derived,
        summary=summary(rows),
        classes=per_class(rows),
        cases=_cases(answered, "attacked_" if attacked else ""),
        margins=np.zeros(0) if attacked else _margins(answered),
        skipped=list(zip(left_out["id"].to_pylist(), left_out["skipped"].to_pylist(), strict=True)),
        sizes=_sizes(answered),
        missing=len(run.missing()),
        fooled=len(certified_fooled(rows)) if attacked else 0,
    )


def _named(names: Any, label: int) -> str:
    known = isinstance(names, list) and 0 <= label < len(names)
    return str(names[label]) if known else f"class {label}"


def _cases(rows: pa.Table, which: str) -> dict[str, tuple[Proportion, Proportion]]:
    found = np.array(rows[f"{which}case"].to_pylist(), dtype=object)
    right = rows[f"{which}answer"].to_numpy() == rows["label"].to_numpy()
    counts = {case: int((found == case).sum()) for case in CASES}
    return {
        case: (Proportion(n, len(found)), Proportion(int(right[found == case].sum()), n))
        for case, n in counts.items()
        if n
    }


def _margins(rows: pa.Table) -> NDArray[np.float64]:
    promised = compute.fill_null(compute.coalesce(rows["certified"], rows["detection_certified"]), False)
    margins: NDArray[np.float64] = rows["margin"].to_numpy().astype(np.float64)[promised.to_numpy().astype(bool)]
    return margins[np.isfinite(margins)]


def _sizes(rows: pa.Table) -> dict[Size, int]:
    sizes = Counter(zip(rows["height"].to_pylist(), rows["width"].to_pylist(), strict=True))
    return dict(sizes.most_common())
