"""Pieces of one image computed by helpers: the same numbers, also when helpers are lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from patchcleanser import CallableClassifier, DoubleMasking, Threat
from patchcleanser.classifiers.spread import Errand, Helper, LostError, SpreadMaskedClassifier, run_errand

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
