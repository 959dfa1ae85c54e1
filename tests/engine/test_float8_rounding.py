"""GPTQ: weights whose rounding errors compensate each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchcleanser.engine.fast.float8.rounding import InputStatistics, gptq_round


def test_gptq_changes_outputs_less_than_rounding_to_the_nearest() -> None:
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(40, 256, generator=draw) + 0.3  # correlated inputs, as a network's do
    calibration, test_inputs = (
        torch.randn(2000, 40, generator=draw) @ mixing + torch.randn(2000, 256, generator=draw) for _ in "ab"
    )
    weight = torch.randn(300, 256, generator=draw)
    statistics = InputStatistics.of(calibration)
    assert statistics.rms == pytest.approx(float(calibration.square().mean().sqrt()), rel=1e-4)
    errors = []
    for hessian in (None, statistics.hessian):
        rounded = gptq_round(weight, torch.float8_e4m3fn, hessian)
        assert rounded.dtype == torch.float8_e4m3fn
        assert (rounded.float() - weight).abs().max() < 0.5  # each is still near what it was
        errors.append(float((test_inputs @ (rounded.float() - weight).T).square().mean().sqrt()))
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("hessian", [torch.zeros(64, 64), torch.full((64, 64), torch.nan), -torch.eye(64)])
def test_a_useless_hessian_means_rounding_to_the_nearest(hessian: Tensor) -> None:
    weight = 300 * torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    rounded = gptq_round(weight, torch.float8_e4m3fn, hessian).float()
    assert torch.equal(rounded, weight.clamp(-448, 448).to(torch.float8_e4m3fn).float())
