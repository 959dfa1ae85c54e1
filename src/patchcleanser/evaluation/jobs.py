"""Job: a classifier, a dataset, a threat, masks and a defense; what decides every row of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import DataError, InputError, PatchCleanserError, ThreatError

LABELS = 3
"""Raised whenever a change of the code may change a label, so that old rows are not mixed with new ones."""

Pair = int | tuple[int, int] | None


@dataclass(frozen=True)
class Job:
    """What to certify. Two jobs with the same identity have the same rows.

    `table=True` computes and keeps every two-mask label; other defenses, smaller patches, maps
    and thresholds then follow without the model.
    """

    classifier: Classifier
    dataset: Dataset
    threat: Threat
    defense: str = "double-masking"
    masks: Pair = None
    stride: Pair = None
    precision: Precision = "exact"
    table: bool = False
    confirm: Confirm = "sampled"
    """Whether certificates by fast labels are confirmed label by label, or by a sample of all labels."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What this defense takes besides: threshold= of Minority Reports, seed= of challenger masking."""

    def __post_init__(self) -> None:
        if self.defense not in DEFENSES:
            raise InputError(f"no defense {self.defense!r}; there are {', '.join(DEFENSES)}")
        self.labels  # noqa: B018  # a job without labels is not made
        if self.table and DEFENSES[self.defense].load().may_alert:
            raise InputError(f"{self.defense} looks at one mask at a time and has no table; leave out the table")
        if not self.has_masks and (self.table or self.masks or self.stride or self.precision != "exact"):
            raise InputError(f"{self.defense} has no masks; leave out masks, stride, table and precision")

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The true labels."""
        if self.dataset.labels is None:
            raise DataError(
                f"{self.dataset.name} has no labels, and nothing can be certified without true labels; "
                "use predict for unlabelled images"
            )
        return self.dataset.labels

    @property
    def has_masks(self) -> bool:
        """Whether the defense hides places by a set of masks."""
        return issubclass(DEFENSES[self.defense].load(), MaskDefense)

    @property
    def masking(self) -> MaskDefense[Any, Any]:
        """The defense, where only one with masks will do."""
        if not isinstance(self.built, MaskDefense):
            raise InputError(f"only defenses with masks can be attacked, and {self.defense} has none")
        return self.built

    @cached_property
    def built(self) -> Defense[Any, Any]:
        """The defense, ready to work."""
        plan: dict[str, Any] = {}
        if self.has_masks:
            plan = {"masks": self.masks, "stride": self.stride, "precision": self.precision}
            plan |= {"confirm": self.confirm} if self.confirm != "sampled" else {}
        try:
            defense: Defense[Any, Any] = DEFENSES[self.defense].load()(
                self.classifier, self.threat, **plan, **self.options
            )
            return defense
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise InputError(f"{self.defense} does not take {', '.join(self.options)}") from error

    def check(self, *, skip: bool = False) -> None:
        """Refuse what can never work, before anything is written: masks that cannot be built, patches that do not fit.

        With `skip`, images that do not fit are left out later, so one that fits is enough.
        """
        failed: PatchCleanserError | None = None
        for index in range(min(TRIED, len(self.dataset))):
            try:
                height, width = self.built.to_threat_grid(self.dataset.image(index)).shape[-2:]
                self.built.check_size((height, width))
                return
            except (DataError, ThreatError) as error:
                failed = failed or error
                if isinstance(error, ThreatError) and not skip:
                    if self.threat.grid == "source":  # another image may be larger
                        raise named_error(error, self.dataset.id(index)) from error
                    break
        if isinstance(failed, ThreatError):
            raise failed

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        return {
            "labels": LABELS,
            "classifier": self.classifier.fingerprint,
            "device": self.classifier.device.type,  # kernels of another kind of device round differently
            "precision": "fast" if self.built.fast else "exact",
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "threat": self.threat.to_json(),
            # 6 is what a defense with masks takes then
            "masks": _listed(self.masks if self.masks or self.stride or not self.has_masks else 6),
            "stride": _listed(self.stride),
            "defense": self.defense,
            "options": dict(self.options),
            "table": self.table,
            **({"confirm": self.confirm} if self.confirm != "sampled" and self.built.fast else {}),
        }


TRIED = 20
"""So many images may be unreadable, or too small, before a job is refused for it."""


def fields_of(facts: Any) -> dict[str, Any]:
    """What a dataclass was made of: all that travels, since what it derived may be otherwise on another machine."""
    return {one.name: getattr(facts, one.name) for one in fields(facts)}


def named_error(error: PatchCleanserError, name: str) -> PatchCleanserError:
    """What is wrong with one image, and what to do about it."""
    said = str(error) if name in str(error) else f"image {name}: {error}"
    return type(error)(f"{said}; leave such images out with --unreadable skip")


def _listed(value: Pair) -> list[int] | None:
    """The same masks are the same job however they were written: 6 is 6x6."""
    if value is None:
        return None
    return list(value) if isinstance(value, tuple) else [value, value]
