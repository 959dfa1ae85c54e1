"""Classifiers that are told which pixels are hidden are attacked and audited as what they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Job, Threat, TorchClassifier, evaluate
from patchcleanser.attacks import AdaptiveAttack, PatchAPGD
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.evaluation.audit import audit, audited_job


class Visible(nn.Module):
    """The mean colour of visible pixels only; the last channel says which are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, inputs: Tensor) -> Tensor:
        visible = 1 - inputs[:, -1:]
        return self.scale * (inputs[:, :-1] * visible).sum((2, 3)) / visible.sum((2, 3)).clamp_min(1)


class Aware(TorchClassifier):
    mask_aware = True


def test_mask_aware_classifiers_can_be_attacked_and_audited(pictures: ArrayDataset, tmp_path: Path) -> None:
    model, threat, settings = Aware(Visible().eval()), Threat.square(3), AttackSettings(iterations=8, locations=2)
    image, label = pictures.image(1), int(pictures.labels[1])
    assert PatchAPGD(model, threat, settings).attack(image, label).fooled
    defense = DoubleMasking(model, threat, masks=3)
    attacked = AdaptiveAttack(defense, settings).attack(image, label)
    assert attacked.fooled
    assert not attacked.certified
    job = Job(model, pictures, threat, masks=3, table=True)
    run = evaluate(job, tmp_path)
    result = audit(run, audited_job(run, model, pictures), sample=10, attack=10, settings=settings)
    assert result.contradictions == []
    assert result.attacked
