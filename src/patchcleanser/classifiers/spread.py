"""One heavy image on several devices: its pieces are handed to helpers, and answered as if computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.batches import Piece, Subject
from patchcleanser.classifiers.learning import Launched
from patchcleanser.classifiers.masked import MaskedClassifier, Waiting
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.tables import Indices, LabelTable
from patchcleanser.core.windows import Size


class Errand(NamedTuple):
    """A piece as it travels: the images it is about, and which of their unions of masks are wanted."""

    images: list[NDArray[np.float32]]
    which: NDArray[np.intp]
    unions: Indices
    way: str | None
    """The kind of faster way; None is the exact one."""


Helper = Callable[[Errand], Callable[[], Tensor]]
"""Begins an errand somewhere else, and gives the function that waits for its logits.
That one raises LostError if there will be none."""


class LostError(Exception):
    """A helper died on an errand."""


class SpreadMaskedClassifier(MaskedClassifier):
    """Pieces are cut where they would be cut here and answers are looked at in the same order, so helpers
    with the same kind of device change no number. What checks the classifier is done here.
    """

    def __init__(self, like: MaskedClassifier, helpers: Sequence[Helper]) -> None:
        precision = "fast" if like.fast else "exact"
        super().__init__(like.classifier, grid=like.grid, chunk=like.chunk, precision=precision)  # type: ignore[arg-type]
        self.most_rows = like.most_rows
        self.ahead = 2 * len(helpers)  # each has the next errand while it is on one
        # Whoever hands out the pieces takes his share.
        self._turns = cycle([*helpers, None])
        # With the pieces themselves: one that nobody came for must not answer a later one at the same address.
        self._asked: dict[int, tuple[Launched, Callable[[], Tensor]]] = {}

    def _many(self, piece: Piece, start: int) -> int:
        """Few labels at a time, so that every helper gets some."""
        return self.labels_at_once(piece.subjects[piece.which[start]])

    def _launch(self, piece: Piece, clean: bool) -> Launched:
        helper = None if self._to_probe else next(self._turns)
        if helper is None:
            return super()._launch(piece, clean)
        used, local = np.unique(piece.which, return_inverse=True)
        step = self._step_for(piece, clean)
        if not all(self._compared(self._input(piece.subjects[s].pixels)) for s in used):
            step = None
        self._stored += 1
        images = [piece.subjects[s].pixels.cpu().numpy() for s in used]
        launched = Launched(piece, torch.empty(0), step)
        way = None if step is None else type(self._steps[step].way).__name__
        self._asked[id(launched)] = launched, helper(Errand(images, local, piece.unions, way))
        return launched

    def _store(self, done: Launched, strict: bool, waiting: list[list[Waiting]]) -> None:
        asked = self._asked.pop(id(done), None)
        if asked is not None:
            try:
                logits = asked[1]().to(self.classifier.device)
            except LostError:
                logits = self._either(done.piece, None if done.step is None else self._steps[done.step].way)
            done = done._replace(logits=logits)
        super()._store(done, strict, waiting)


def run_errand(masked: MaskedClassifier, mask_set: Callable[[Size], MaskSet], errand: Errand) -> Tensor:
    """The logits that another process asked for, on the CPU."""
    subjects = []
    for pixels in errand.images:
        table = LabelTable(mask_set((pixels.shape[1], pixels.shape[2])))
        subjects.append(Subject(torch.tensor(pixels, device=masked.classifier.device), table))
    # Another kind of GPU may have other ways; exact logits pass for fast ones in every check.
    way = next((way for way in masked.ways if type(way).__name__ == errand.way), None)
    with torch.inference_mode():
        return masked._either(Piece(subjects, errand.which, errand.unions), way).cpu()
