"""What a run of a detector says of other patches: every mask's promise is in its rows, so no detector is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from patchcleanser.core.detections import Boxes, pixel_window
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.hiding import PLACES, ObjectCertificate, Place, certify_object
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.records.run import Row, Run

ANY_SIZE = Threat.any_rectangle(share=1.0)
"""A patch of any size. Over an object nothing can be promised; beside it half-planes can hide the patch."""

NEEDED = ["skipped", "height", "width", "classes", "boxes", "promises", "undefended", "defended"]
"""The columns that objects are made of."""


@dataclass(frozen=True, eq=False)
class RecordedObject:
    """An object of a row: its class, its box, and what each mask promises."""

    label: int
    box: Boxes
    promises: NDArray[np.float64]
    masks: MaskSet
    undefended: float
    defended: float

    @property
    def window(self) -> Window:
        """The pixels of the object."""
        return pixel_window(self.box, self.masks.image)

    def certificate(self, threat: Threat) -> ObjectCertificate:
        """The certificate against a threat, by the masks of the run."""
        return certify_object(self.masks, threat, self.window, self.label, self.promises)


def recorded_objects(row: Row, masks: MaskSet) -> list[RecordedObject]:
    """The objects of one answered row."""
    boxes = np.array(row["boxes"], dtype=np.float64).reshape(-1, 4)
    promises = np.array(row["promises"], dtype=np.float64).reshape(len(boxes), len(masks))
    pairs = zip(row["classes"], boxes, promises, row["undefended"], row["defended"], strict=True)
    return [RecordedObject(label, box, shares, masks, alone, defended) for label, box, shares, alone, defended in pairs]


def all_objects(run: Run, rows: pa.Table) -> Iterator[RecordedObject]:
    """Every object of these rows of a run."""
    mask_set = lru_cache(maxsize=256)(run.mask_set)
    for row in rows.select(NEEDED).to_pylist():
        if row["skipped"] is None and row["classes"]:
            size: Size = (row["height"], row["width"])
            yield from recorded_objects(row, mask_set(size))


def derived_threats(run: Run) -> list[Threat]:
    """The run's threat; a smaller share of the image where it is 2% or more; any size where there are half-planes."""
    shape = str(run.threat.shape)
    share = float(shape[:-1]) if shape.endswith("%") and ":" not in shape else 0.0
    smaller = [Threat.share(0.01)] if share >= 2 else []
    any_size = [ANY_SIZE] if run.job["lines"] and run.threat != ANY_SIZE else []
    return [*smaller, run.threat, *any_size]


def derived_promises(run: Run, rows: pa.Table, threats: list[Threat]) -> dict[Threat, dict[Place, NDArray[np.float64]]]:
    """For each threat and class of placements the promised share of each object; NaN without a placement."""
    values: dict[Threat, dict[Place, list[float]]] = {threat: {place: [] for place in PLACES} for threat in threats}
    for each in all_objects(run, rows):
        for threat, by_place in values.items():
            certificate = each.certificate(threat)
            for place, shares in by_place.items():
                share = getattr(certificate, place)
                shares.append(math.nan if share is None else share)
    return {threat: {p: np.array(v) for p, v in by_place.items()} for threat, by_place in values.items()}
