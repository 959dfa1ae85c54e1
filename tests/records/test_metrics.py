"""Statistics against an independent implementation."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from patchcleanser.records.metrics import mcnemar_p_value


@pytest.mark.parametrize("split", [(0, 1), (1, 1), (0, 9), (8, 2), (37, 11), (100, 100), (130, 70), (4000, 3700)])
def test_mcnemars_exact_test_agrees_with_scipys_binomial_test(split: tuple[int, int]) -> None:
    expected = binomtest(min(split), sum(split), 0.5).pvalue
    assert mcnemar_p_value(*split) == pytest.approx(expected, rel=1e-6)
    assert mcnemar_p_value(*reversed(split)) == mcnemar_p_value(*split)


def test_runs_that_never_differ_are_no_evidence() -> None:
    assert mcnemar_p_value(0, 0) == 1
    assert mcnemar_p_value(20_000, 0) == 0  # below the smallest float
