"""The labels of one image under unions of masks, filled in as they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.masks import MaskSet

UNMASKED = -1
"""The index that stands for the image without any mask."""

Indices = NDArray[np.intp]


class LabelTable:
    """Labels, margins and confidences of one image, by union of two masks.

    Entry u belongs to union u of the mask set, the last entry (UNMASKED) to the unmasked image. Entries are unknown
    (label -1) until computed, by a live classifier or from a stored run.
    """

    def __init__(self, mask_set: MaskSet) -> None:
        self.mask_set = mask_set
        size = len(mask_set.unions) + 1
        self.labels = np.full(size, -1, dtype=np.int32)
        self.margins = np.full(size, np.nan, dtype=np.float32)
        self.confidences = np.full(size, np.nan, dtype=np.float32)
        self.answered = False
        """Whether any label came from finite logits."""
        self.rechecked = 0
        """Fast labels that were computed again in float32, and those of them that were wrong."""
        self.flipped = 0
        self.audited = 0
        """Labels that were not uncertain, computed both ways, also those of a table that was begun anew."""
        self.unconfirmed = 0
        """Labels of lower precision that were not computed in float32 as well."""
        self.caught = 0
        """Audited labels that were wrong; this is then the table that was begun anew."""

    def anew(self) -> LabelTable:
        """An empty table for the same image, with the counts of audits."""
        table = LabelTable(self.mask_set)
        table.audited, table.caught = self.audited, self.caught
        return table

    @property
    def spent(self) -> int:
        """Number of labels known, each computed once."""
        return int((self.labels >= 0).sum())

    @property
    def margin(self) -> float:
        """The smallest margin among the known labels."""
        return float(np.nanmin(self.margins))

    def missing(self, unions: Indices) -> Indices:
        """Those of the unions whose labels are not known yet, each once."""
        return np.unique(unions[self.labels[unions] < 0]) if len(unions) else unions

    def one_mask_labels(self) -> list[int]:
        """The one-mask labels."""
        return [int(label) for label in self.labels[: len(self.mask_set)]]

    def row_labels(self, mask: int) -> list[int]:
        """The two-mask labels of one first mask with every second one."""
        return [int(label) for label in self.labels[self.mask_set.unions.index[mask]]]

    def pair_label(self, first: int, second: int) -> int:
        """The two-mask label of two masks."""
        return int(self.labels[self.mask_set.unions.index[first, second]])

    def masks(self) -> Indices:
        """The unions that are single masks."""
        return np.arange(len(self.mask_set))

    def rows(self, masks: Sequence[int]) -> Indices:
        """All unions in the rows of these first masks."""
        return np.unique(self.mask_set.unions.index[list(masks)]).astype(np.intp)
