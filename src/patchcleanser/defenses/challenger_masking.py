"""Challenger masking: where labels disagree, masks play against each other until one label is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from patchcleanser.core.tables import LabelTable
from patchcleanser.core.threats import Threat
from patchcleanser.core.verdicts import Case, Certificate, Verdict
from patchcleanser.defenses.base import Game, MaskDefense
from patchcleanser.defenses.double_masking import majority_label
from patchcleanser.defenses.two_mask import certification


def challenger_game(one: Sequence[int], seed: int | None = None) -> Generator[tuple[int, int], int, Verdict]:
    """Algorithm 3, one two-mask label at a time: yields (challenger, candidate), is sent the label.

    Without a seed, mask 0 is the first candidate and the lowest-numbered challenger plays
    next, as in the authors' code; a seed gives the paper's random order. At most one game per
    mask is played. The proof that a certified image keeps its label is in two_mask.certification.
    """
    order = list(range(len(one)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    candidate, remaining, played = order[0], order[1:], 0
    while challengers := [mask for mask in remaining if one[mask] != one[candidate]]:
        challenger = challengers[0]
        played += 1
        remaining.remove(challenger)
        if (yield challenger, candidate) == one[challenger]:
            candidate = challenger
    majority = majority_label(one)
    case = Case.AGREED if not played else Case.MAJORITY if one[candidate] == majority else Case.DISAGREER
    return Verdict(
        label=one[candidate],
        case=case,
        one_mask_labels=tuple(one),
        disagreers=tuple(i for i, label in enumerate(one) if label != majority),
        deciding_mask=candidate if case is Case.DISAGREER else None,
        classifications=len(one) + played,
    )


def challenger_masking(one: Sequence[int], pair: Callable[[int, int], int], *, seed: int | None = None) -> Verdict:
    """Algorithm 3: `one[i]` is the label under mask i, `pair(i, j)` under masks i and j.

    >>> challenger_masking([7, 7, 4], lambda i, j: 4).label
    4
    """
    game = challenger_game(one, seed)
    try:
        asked = next(game)
        while True:
            asked = game.send(pair(*asked))
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


class ChallengerMasking(MaskDefense[Verdict, Certificate]):
    """At most twice as many classifications as masks, the same certificate, a little less clean accuracy."""

    def __init__(self, classifier: Any, threat: Threat, *, seed: int | None = None, **options: Any) -> None:
        super().__init__(classifier, threat, **options)
        self.seed = seed

    def _verdict(self, table: LabelTable) -> Game[Verdict]:
        yield table.masks()
        game = challenger_game(table.one(), self.seed)
        index = table.mask_set.unions.index
        try:
            challenger, candidate = next(game)
            while True:
                # All that the candidate may have to meet: batches have a fixed size, and one label costs as much.
                rivals = [mask for mask, label in enumerate(table.one()) if label != table.one()[candidate]]
                yield index[candidate, rivals].astype(np.intp)
                challenger, candidate = game.send(table.pair(challenger, candidate))
        except StopIteration as end:
            verdict: Verdict = end.value
            return replace(verdict, classifications=table.spent)

    def _certificate(self, table: LabelTable, label: int, maps: bool) -> Game[Certificate]:
        return certification(table, label, self.threat, maps=maps)

    def _outcome(self, verdict: Verdict) -> int:
        return verdict.label
