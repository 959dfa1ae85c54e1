"""RunResult: a run with everything that a report shows of it, read from its rows once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.errors import RecordError
from patchcleanser.records.audits import AUDIT, read_audit
from patchcleanser.records.columns import COLUMNS_OF
from patchcleanser.records.derive import Derived
from patchcleanser.records.metrics import Proportion, Summary, certified_fooled, per_class, summary
from patchcleanser.records.run import Run

CASES = {
    "coarse": "coarse round: all agree",
    "agreed": "I: all agree",
    "disagreer": "II: one mask decides",
    "majority": "III: the majority decides",
}


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run with its summaries, equal only to itself; `derived` is None where no two-mask tables were stored."""

    run: Run
    derived: Derived | None
    summary: Summary
    classes: dict[int, dict[str, Proportion]]
    cases: dict[str, tuple[Proportion, Proportion]]
    """Per case (of an attack: under attack): its share of the images, and the share of those answered correctly."""
    margins: NDArray[np.float64]
    """The smallest logit margins of the certified (or detection-certified) images; an attack has none."""
    skipped: list[tuple[str, str]]
    """Id and reason of each image without an answer."""
    sizes: dict[Size, int]
    """Number of images of each size on the threat's grid, the most common first."""
    missing: int
    """Batches that are not done."""
    fooled: int = 0
    """Certified images that an attack fooled: there must be none."""

    @property
    def attacked(self) -> bool:
        """Whether the images were attacked, not only certified."""
        return self.run.kind == "attack"

    @property
    def detects(self) -> bool:
        """Whether the defense only detects, a weaker guarantee that is never counted as certified."""
        return "detection_certified" in self.summary.shares

    @property
    def certified_key(self) -> str:
        """The name of the share that the defense proves."""
        return "detection_certified" if self.detects else "certified"

    @property
    def robust_key(self) -> str:
        """The name of the share that withstood the attack; for detection, an alert is no failure."""
        return "never_wrong_silently" if self.detects else "robust"

    @property
    def size(self) -> Size:
        """The most common size."""
        return next(iter(self.sizes))

    @property
    def has_masks(self) -> bool:
        """Whether the defense masks the image; some baselines do not."""
        return bool(self.run.job.get("masks") or self.run.job.get("stride"))

    @cached_property
    def masks(self) -> MaskSet:
        """The masks of images of the most common size."""
        return self.run.mask_set(self.size)

    def class_name(self, label: int) -> str:
        """The dataset's name of a true class, or its number."""
        return _class_name(self.metadata("classes"), label)

    def answer_name(self, label: int) -> str:
        """The model's name of its answer, or the dataset's if the model has none."""
        return _class_name(self.metadata("model_classes") or self.metadata("classes"), label)

    def metadata(self, name: str) -> Any:
        return self.run.metadata.get(name)

    def options(self, command: str) -> dict[str, Any]:
        """The options with which this command made the run; none if it was made otherwise."""
        stored = self.metadata("options")
        options = stored.get(command) if isinstance(stored, dict) else None
        return options if isinstance(options, dict) else {}

    @property
    def per_image(self) -> tuple[float, float]:
        """Classifications and seconds per image."""
        images = max(1, self.summary.images)
        return self.summary.classifications / images, self.summary.seconds / images


@dataclass(frozen=True)
class AuditOutcome:
    """What an audit of a run found."""

    words: str
    """The outcome, or why it counts for nothing."""
    contradictions: int = 0
    counts: bool = True


def audit_outcome(run: Run) -> AuditOutcome | None:
    """What an audit of the run found; None if there was none."""
    if not (run.folder / AUDIT).is_file():
        return None
    try:
        audit = read_audit(run)
    except RecordError as error:
        return AuditOutcome(str(error), counts=False)
    contradictions, rows = len(audit["contradictions"]), counted(len(audit["derived"]), "row")
    outcome = counted(contradictions, "contradiction") if contradictions else "no contradiction"
    fooled = sum("patches" in entry for entry in audit["contradictions"])
    attacked = f"{counted(len(audit['attacked']), 'certified image')} attacked, {fooled or 'none'} fooled"
    return AuditOutcome(f"{rows} computed again, {attacked}, {outcome}", contradictions)


def read_result(run: Run, derived: Derived | None) -> RunResult | None:
    """Read everything that a report shows of a run; None if no image has an answer yet."""
    attacked = run.kind == "attack"
    rows = run.read([*COLUMNS_OF[run.kind], "id", "height", "width"])
    answered = rows.filter(compute.is_null(rows["skipped"]))
    skipped = rows.filter(compute.is_valid(rows["skipped"]))
    if not len(answered):
        return None
    return RunResult(
        run=run,
        derived=derived,
        summary=summary(rows),
        classes=per_class(rows),
        cases=_cases(answered, "attacked_" if attacked else ""),
        margins=np.zeros(0) if attacked else _margins(answered),
        skipped=list(zip(skipped["id"].to_pylist(), skipped["skipped"].to_pylist(), strict=True)),
        sizes=dict(
            Counter(zip(answered["height"].to_pylist(), answered["width"].to_pylist(), strict=True)).most_common()
        ),
        missing=len(run.missing()),
        fooled=len(certified_fooled(rows)) if attacked else 0,
    )


def _class_name(names: Any, label: int) -> str:
    has_name = isinstance(names, list) and 0 <= label < len(names)
    return str(names[label]) if has_name else f"class {label}"


def _cases(rows: pa.Table, prefix: str) -> dict[str, tuple[Proportion, Proportion]]:
    cases = np.array(rows[f"{prefix}case"].to_pylist(), dtype=object)
    right = rows[f"{prefix}answer"].to_numpy() == rows["label"].to_numpy()
    counts = {case: int((cases == case).sum()) for case in CASES}
    return {
        case: (Proportion(n, len(cases)), Proportion(int(right[cases == case].sum()), n))
        for case, n in counts.items()
        if n
    }


def _margins(rows: pa.Table) -> NDArray[np.float64]:
    certified = compute.fill_null(compute.coalesce(rows["certified"], rows["detection_certified"]), False)
    margins: NDArray[np.float64] = rows["margin"].to_numpy().astype(np.float64)[certified.to_numpy().astype(bool)]
    return margins[np.isfinite(margins)]
