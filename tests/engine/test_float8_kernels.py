"""Triton kernels compute what the layers they replace do: interpreted here, on a GPU in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import torch
from torch.nn import functional
from patchcleanser.engine.fast.float8.kernels import linear_gelu, linear_sum, mix_tokens

draw = torch.Generator().manual_seed(0)


def some(*shape, up=1.0):
    return up * torch.randn(*shape, generator=draw)


def near(outputs, exact):
    # The interpreter loses NaN, and halves what is rounded up to a power of two: tests/gpu checks all of it.
    assert exact.abs().max() < 448
    wanted = exact.to(torch.float8_e4m3fn).float()
    up = (wanted.abs().log2() % 1 == 0) & (exact.abs() < wanted.abs())
    errors = torch.where(up, 0.0, (outputs.float() - wanted).abs())
    assert (errors <= 0.13 * wanted.abs() + 2**-8).all(), "further than one step of FP8"
    assert (errors > 0).float().mean() < 0.02, "too many of them"


rows, weight = (some(*shape, up=8.0).to(torch.float8_e4m3fn) for shape in ((200, 272), (304, 272)))
bias, scale, up = some(304).half(), torch.tensor(1 / 64 / 16), torch.tensor(16.0).half()
exact = functional.gelu(rows.float() @ weight.float().T * scale + bias.float(), approximate="tanh") * 16
near(linear_gelu(rows, weight, bias, scale, up), exact)

x, gamma = some(2, 100, 304).half(), some(304).half()
exact = x.float() + gamma.float() * ((rows.float() @ weight.float().T * scale + bias.float()).view(2, 100, 304))
outputs = linear_sum(rows, weight, bias, scale, gamma, x)
assert outputs.dtype == torch.float16
torch.testing.assert_close(outputs.float(), exact, atol=0.02, rtol=2e-3)

x, mix = some(3, 150, 128).half(), some(150, 150, up=0.1).half()
across, shift = some(128).half(), some(150, 128).half()
x[1, 3, 5] = torch.nan  # of those that lie behind the first image's last token
padded = functional.pad(mix, (0, 106, 0, 106))
exact = x.float() + shift.float() + across.float() * (mix.float() @ x.float())
outputs, float8 = mix_tokens(x, padded, across, shift, torch.tensor(4.0).half())
assert torch.equal(outputs.isnan(), exact.isnan()), "NaN of one image or channel reaches no other"
assert exact.isnan().sum() == 150
torch.testing.assert_close(outputs.float(), exact, atol=0.02, rtol=2e-3, equal_nan=True)
near(float8[:150], exact[0] * 4)
near(float8[300:], exact[2] * 4)
print("as they should be")
"""


def test_kernels_compute_what_the_layers_they_replace_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "as they should be" in done.stdout
