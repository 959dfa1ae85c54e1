"""The labels of one image under unions of masks, filled in as they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.masks import MaskSet

UNMASKED = -1
"""The index that stands for the image without any mask."""

UNCERTAIN = 2**31 - 1
"""Stands in for a label that rounding may change from one batch to the next; no class has this number."""

Indices = NDArray[np.intp]


class LabelTable:
    """Labels, margins and confidences of one image, by union of two masks.

    Entry u belongs to union u of the mask set, the last entry (UNMASKED) to the unmasked image. Entries are unknown
    (label -1) until computed, by a live classifier or from a stored run. `coarse` is the table of a few larger masks
    that are tried first, if there are such.
    """

    def __init__(self, mask_set: MaskSet, coarse: LabelTable | None = None) -> None:
        self.mask_set, self.coarse = mask_set, coarse
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
        self.rounding = 0.0
        """How far rounding may move a margin from one batch to the next; 0 where equal pixels get equal bits."""
        self.passes: int | None = None
        """Inputs that the network was given, where one input gives many labels; None where each label takes one."""

    def anew(self) -> LabelTable:
        """An empty table for the same image, with the counts of audits."""
        table = LabelTable(self.mask_set, self.coarse and self.coarse.anew())
        table.audited, table.caught = self.audited, self.caught
        return table

    def total(self, count: str) -> int:
        """A count of this table and of the coarse one."""
        return int(getattr(self, count)) + (self.coarse.total(count) if self.coarse else 0)

    @property
    def size(self) -> int:
        """Number of labels that a certificate may rest on: of all unions, and of each coarse mask."""
        return len(self.mask_set.unions) + (len(self.coarse.mask_set) if self.coarse else 0)

    @property
    def spent(self) -> int:
        """Number of inputs classified: that of the labels known, each computed once, with those of the coarse table."""
        if self.passes is not None:
            return self.passes
        return int((self.labels >= 0).sum()) + (self.coarse.spent if self.coarse else 0)

    @property
    def margin(self) -> float:
        """The smallest margin among the known labels, with those of the coarse table; infinite without any."""
        margins = self.margins[self.labels >= 0]
        smallest = float(np.nanmin(margins)) if len(margins) else np.inf
        return min(smallest, self.coarse.margin) if self.coarse else smallest

    def missing(self, unions: Indices) -> Indices:
        """Those of the unions whose labels are not known yet, each once."""
        return np.unique(unions[self.labels[unions] < 0]) if len(unions) else unions

    @property
    def certain_labels(self) -> NDArray[np.int32]:
        """The labels by union, UNCERTAIN where rounding may change them."""
        labels = self.labels[:-1]
        return np.where((labels >= 0) & (self.margins[:-1] < self.rounding), UNCERTAIN, labels).astype(np.int32)

    def one_mask_labels(self) -> list[int]:
        """The one-mask labels."""
        return [int(label) for label in self.labels[: len(self.mask_set)]]

    def row_labels(self, mask: int) -> list[int]:
        """The two-mask labels of one first mask with each other mask."""
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
