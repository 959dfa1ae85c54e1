"""Muon for all matrices of one shape at once is timm's Muon."""

from __future__ import annotations

import copy
import sys

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.optim.muon import Muon
from torch import nn

from patchcleanser.errors import TrainingError
from patchcleanser.training import steps
from patchcleanser.training.muon import TogetherMuon
from patchcleanser.training.recipes import Recipe


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    images, labels = torch.randn(8, 3, 32, 32, generator=draw), torch.arange(8)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "nesterov"), [("vit_tiny_patch16_224", True), ("vit_tiny_patch16_224", False), ("resmlp_12_224", True)]
)
def test_it_takes_the_same_steps_as_timms(name: str, nesterov: bool) -> None:
    torch.manual_seed(0)
    first = timm.create_model(name, pretrained=False, num_classes=10, img_size=32)
    nn.init.normal_(first.get_classifier().weight, std=0.1)  # of zeros, most gradients are zeros too
    start, second = copy.deepcopy(first), copy.deepcopy(first)
    plain, other = (
        create_optimizer_v2(m, opt="muon", lr=1e-3, weight_decay=0.05, momentum=0.9, nesterov=nesterov)
        for m in (first, second)
    )
    together = TogetherMuon(other.param_groups, **other.defaults)
    trained(first, plain, 3)
    trained(second, together, 3)
    for (what, wanted), found, before in zip(
        first.named_parameters(), second.parameters(), start.parameters(), strict=True
    ):
        moved = (wanted - before).norm()
        assert (found - wanted).norm() <= 0.02 * moved, what  # bfloat16 is rounded in another order
    kept = [plain.state[p].get("momentum_buffer") for p in first.parameters()]
    for buffer, p in zip(kept, second.parameters(), strict=True):
        if buffer is not None:
            torch.testing.assert_close(together.state[p]["momentum_buffer"], buffer, rtol=0.05, atol=1e-3)
    assert sum(buffer is not None for buffer in kept) > 30


def test_it_goes_on_from_what_timms_had_kept() -> None:
    torch.manual_seed(0)
    first = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=32)
    plain = create_optimizer_v2(first, opt="muon", lr=1e-3, momentum=0.9)
    trained(first, plain, 2)
    second = copy.deepcopy(first)
    other = create_optimizer_v2(second, opt="muon", lr=1e-3, momentum=0.9)
    together = TogetherMuon(other.param_groups, **other.defaults)
    together.load_state_dict(copy.deepcopy(plain.state_dict()))
    before = copy.deepcopy(first)
    trained(first, plain, 1)
    trained(second, together, 1)
    for wanted, found, start in zip(first.parameters(), second.parameters(), before.parameters(), strict=True):
        assert (found - wanted).norm() <= 0.02 * (wanted - start).norm()


def test_groups_that_are_not_muons_are_left_to_timm() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.Linear(16, 10))
    second = copy.deepcopy(first)
    options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    plain, together = (
        kind([{"params": list(module.parameters()), "use_muon": False}], **options)
        for kind, module in ((Muon, first), (TogetherMuon, second))
    )
    trained(first, plain, 2)
    trained(second, together, 2)
    for wanted, found in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


MUON = Recipe(epochs=1, batch=8, optimizer="muon", rate=1e-3)


def test_a_muon_of_timms_whose_parts_are_elsewhere_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "patchcleanser.training.muon", None)
    assert type(steps._optimizer(nn.Linear(16, 10), MUON)) is Muon


def test_a_first_muon_of_timms_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(16, 10)
    made = create_optimizer_v2(module, opt="muon", lr=1e-3)
    assert isinstance(steps._optimizer(module, MUON), TogetherMuon)
    del made.defaults["scale_eps"]
    monkeypatch.setattr(steps, "create_optimizer_v2", lambda *given, **options: made)
    assert steps._optimizer(module, MUON) is made


@pytest.mark.parametrize("error", [ValueError("Optimizer muon not found"), AssertionError()])
def test_a_timm_without_muon_gets_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(steps, "create_optimizer_v2", older)
    with pytest.raises(TrainingError, match=r"this timm has no muon .* install timm 1\.0\.23 or later"):
        steps._optimizer(nn.Linear(16, 10), MUON)
