"""Pieces of one image computed by helpers: the same numbers, also when helpers are lost."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from patchcleanser import CallableClassifier, DoubleMasking, Threat
from patchcleanser.classifiers.batches import Piece
from patchcleanser.classifiers.masked import Launched, Request, Waiting
from patchcleanser.classifiers.precision import WrongFastLabelError
from patchcleanser.classifiers.spread import Errand, Helper, LostError, SpreadMaskedClassifier, run_errand
from patchcleanser.classifiers.ways import UnusableError, Way

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def defense() -> DoubleMasking:
    weights = torch.randn(3, 3 * 8 * 8, generator=torch.Generator().manual_seed(1))
    classifier = CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint="linear")
    return DoubleMasking(classifier, Threat.square(2), masks=4, chunk=8)


def helper(asked: list[Errand], *, dies: bool = False) -> Helper:
    """A process of its own, nearly: it has another defense, and gets only what travels."""
    mine = defense()

    def begin(errand: Errand) -> Callable[[], Tensor]:
        asked.append(errand)

        def answer() -> Tensor:
            if dies:
                raise LostError
            return run_errand(mine.masked, mine.mask_set, errand)

        return answer

    return begin


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("helpers", [1, 3])
def test_helpers_change_no_number_even_if_they_die(helpers: int, dies: bool) -> None:
    alone, spread, asked = defense(), defense(), list[Errand]()
    spread.masked = SpreadMaskedClassifier(spread.masked, [helper(asked, dies=dies) for _ in range(helpers)])
    one, other = (d.examine(IMAGES, [0, 1], maps=True) for d in (alone, spread))
    for here, there in zip(one, other, strict=True):
        for name in ("labels", "margins", "confidences"):
            np.testing.assert_array_equal(getattr(here.table, name), getattr(there.table, name))
        assert here.verdict == there.verdict
        assert here.certificate.certified == there.certificate.certified
    assert len(asked) > 10  # and most of the work was theirs


def test_an_answer_that_nobody_came_for_is_never_another_pieces() -> None:
    spread = defense()
    spread.masked = masked = SpreadMaskedClassifier(spread.masked, [helper([]), helper([])])
    store, calls = SpreadMaskedClassifier._store, 0

    def interrupted(done: Launched, strict: bool, waiting: list[Waiting]) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise WrongFastLabelError
        store(masked, done, strict, waiting)

    masked._store = interrupted  # type: ignore[method-assign]
    with pytest.raises(WrongFastLabelError):
        masked.fill_in([Request(s, s.table.rows(range(16))) for s in next(spread._groups(IMAGES))])
    gc.collect()
    assert masked._asked
    piece = Piece([], np.arange(0), np.arange(0))
    later = [Launched(piece, torch.empty(0), None) for _ in range(10_000)]
    assert not {id(launched) for launched in later} & set(masked._asked)


def test_a_helper_without_a_fast_way_answers_exactly() -> None:
    class Nowhere(Way):
        resolution = 0.0

        def logits(self, inputs: Tensor) -> Tensor:
            raise UnusableError

    mine = defense()
    mine.masked.ways = [Nowhere()]
    errand = Errand([IMAGES[0].numpy()], np.zeros(3, dtype=np.intp), np.arange(3), None)
    fast, unknown, exact = (
        run_errand(mine.masked, mine.mask_set, errand._replace(way=way)) for way in ("Nowhere", "Elsewhere", None)
    )
    assert (fast == exact).all()
    assert (unknown == exact).all()
