"""Kernels of our own say what the layers they replace say: Triton interprets them here, a GPU in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import torch
from torch.nn import functional
from patchcleanser.classifiers.kernels import linear_gelu, mix_tokens

draw = torch.Generator().manual_seed(0)


def some(*shape, up=1.0):
    return up * torch.randn(*shape, generator=draw)


def near(found, exact):
    # An interpreter makes a number of what is none, and halves what is rounded up to a power of two: tests/gpu looks
    # at all of it.
    assert exact.abs().max() < 448
    wanted = exact.to(torch.float8_e4m3fn).float()
    up = (wanted.abs().log2() % 1 == 0) & (exact.abs() < wanted.abs())
    apart = torch.where(up, 0.0, (found.float() - wanted).abs())
    assert (apart <= 0.13 * wanted.abs() + 2**-8).all(), "further than one step of eight bits"
    assert (apart > 0).float().mean() < 0.02, "too many of them"


rows, weight = (some(*shape, up=8.0).to(torch.float8_e4m3fn) for shape in ((200, 272), (304, 272)))
bias, scale, up = some(304).half(), torch.tensor(1 / 64 / 16), torch.tensor(16.0).half()
exact = functional.gelu(rows.float() @ weight.float().T * scale + bias.float(), approximate="tanh") * 16
near(linear_gelu(rows, weight, bias, scale, up), exact)

x, more, times = some(3, 49, 80).half(), some(3, 49, 80).half(), some(80).half()
mix, across, shift = some(49, 56).half(), some(80).half(), some(49, 80).half()
y = (x.float() + more.float() * times.float()).half().float()
exact = x.float() + more.float() * times.float() + shift.float() + across.float() * (mix[:, :49].float() @ y)
found, short = mix_tokens(x, more, times, mix, across, shift, torch.tensor(4.0).half())
torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=2e-3)
near(short, exact.view(-1, 80) * 4)
print("as they should be")
"""


def test_kernels_compute_what_the_layers_they_replace_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "as they should be" in done.stdout
