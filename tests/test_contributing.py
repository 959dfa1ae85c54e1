"""What CONTRIBUTING.md shows works: a file and an entry are enough."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import Job, Threat, TorchClassifier, evaluate
from patchcleanser.attacks import ATTACKS
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.core.entries import Entry
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import RecordError
from patchcleanser.evaluation import AttackJob
from patchcleanser.evaluation.audit import audit, audited_job

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Colour(nn.Module):
    """Logits are the mean of each colour channel, enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * images.mean((2, 3))


class PixelLogits(nn.Module):
    """Every pixel is a position, whose value picks a column of logits [classes, values]."""

    field, jump = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("logits", torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))

    def local(self, images: Tensor) -> Tensor:
        return self.logits[:, images[:, 0].round().long()].transpose(0, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.local(images).mean((2, 3))


@pytest.fixture
def colours() -> ArrayDataset:
    images = np.random.default_rng(3).integers(90, 110, (4, 12, 12, 3)).astype(np.uint8)
    labels = np.arange(4, dtype=np.int64) % 3
    for n, label in enumerate(labels):
        images[n, :, :, label] += 60
    return ArrayDataset("colours", images, labels, ("red", "green", "blue"))


def module(block: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that a block of CONTRIBUTING.md makes, as if it lay in the package."""
    loaded = ModuleType(name)
    exec(block, vars(loaded))
    monkeypatch.setitem(sys.modules, name, loaded)
    return loaded


def add(class_name: str, entries: dict[str, Entry], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add the file and the entry that CONTRIBUTING.md shows, and nothing else."""
    (entry_block,) = (block for block in BLOCKS if f":{class_name}" in block)
    ((name, entry),) = eval(f"{{{entry_block}}}", {"Entry": Entry}).items()
    (block,) = (block for block in BLOCKS if f"class {class_name}" in block)
    monkeypatch.setitem(entries, name, entry)
    return getattr(module(block, entry.home.partition(":")[0], monkeypatch), class_name)


def test_a_mask_defense_certifies_and_is_attacked_and_an_audit_without_a_reference_refuses_it(
    colours: ArrayDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = add("Unanimous", DEFENSES, monkeypatch)
    model, threat = TorchClassifier(Colour().eval()), Threat.square(3)
    job = Job(model, colours, threat, defense="unanimous", masks=3)
    run = evaluate(job, tmp_path / "certified")
    assert run.read()["detection_certified"].to_pylist() == [True] * 4
    with pytest.raises(RecordError, match="unanimous, which cannot be audited"):
        audit(run, audited_job(run, model, colours))
    for attack in ("apgd", "adaptive"):
        budget = AttackSettings(iterations=3, locations=2)
        attacked = evaluate(AttackJob(job, attack, budget), tmp_path / attack)
        assert attacked.read()["fooled"].to_pylist() == [False] * 4
    image = torch.from_numpy(colours.images[0].copy()).permute(2, 0, 1).float() / 255
    image[:, :6] = image[[1, 0, 2], :6]  # half red, half green
    (verdict,) = kind(model, threat, masks=3).predict([image])
    assert verdict.alert


def test_a_local_defense_predicts_and_certifies(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in BLOCKS if "class MostPositions" in block)
    kind = module(block, "patchcleanser.defenses.most_positions", monkeypatch).MostPositions
    defense = kind(TorchClassifier(PixelLogits().eval(), classes=2), Threat.square(1))
    images = torch.tensor([[0.0, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]])[:, None, None]
    assert [verdict.label for verdict in defense.predict(images)] == [0, 1, 0]
    assert [certificate.certified for certificate in defense.certify(images, [0, 1, 0])] == [False, False, True]


def test_an_attack_runs_and_finds_what_noise_can_find(
    colours: ArrayDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = add("PatchNoise", ATTACKS, monkeypatch)
    model, threat = TorchClassifier(Colour().eval()), Threat.square(3)
    run = evaluate(AttackJob(Job(model, colours, threat, masks=3), "noise", AttackSettings(iterations=3)), tmp_path)
    assert run.read()["undefended_fooled"].to_pylist() == [False] * 4
    grey = torch.full((3, 12, 12), 0.5)
    grey[0] += 0.001
    assert kind(model, threat, AttackSettings(iterations=20)).attack(grey, 0).fooled
