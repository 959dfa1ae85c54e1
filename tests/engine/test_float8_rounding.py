"""Weights whose roundings make up for each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchcleanser.engine.fast.float8.rounding import Seen, rounded


def test_roundings_that_make_up_for_each_other_change_outputs_less() -> None:
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(40, 256, generator=draw) + 0.3  # inputs that go together, as a network's do
    few, others = (
        torch.randn(2000, 40, generator=draw) @ mixing + torch.randn(2000, 256, generator=draw) for _ in "ab"
    )
    weight = torch.randn(300, 256, generator=draw)
    seen = Seen.of(few)
    assert seen.size == pytest.approx(float(few.square().mean().sqrt()), rel=1e-4)
    apart = []
    for together in (None, seen.together):
        short = rounded(weight, torch.float8_e4m3fn, together)
        assert short.dtype == torch.float8_e4m3fn
        assert (short.float() - weight).abs().max() < 0.5  # each is still near what it was
        apart.append(float((others @ (short.float() - weight).T).square().mean().sqrt()))
    assert apart[1] < 0.4 * apart[0]


@pytest.mark.parametrize("together", [torch.zeros(64, 64), torch.full((64, 64), torch.nan), -torch.eye(64)])
def test_inputs_that_say_nothing_leave_each_weight_rounded_for_itself(together: Tensor) -> None:
    weight = 300 * torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    found = rounded(weight, torch.float8_e4m3fn, together).float()
    assert torch.equal(found, weight.clamp(-448, 448).to(torch.float8_e4m3fn).float())
