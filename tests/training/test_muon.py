"""timm's Muon, where timm has one."""

from __future__ import annotations

import pytest
from torch import nn

from patchcleanser.errors import TrainingError
from patchcleanser.training import Recipe, training_run


@pytest.mark.parametrize("error", [ValueError("Optimizer muon not found"), AssertionError()])
def test_a_timm_without_muon_gets_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(training_run, "create_optimizer_v2", older)
    with pytest.raises(TrainingError, match=r"this timm has no muon .* install timm 1\.0\.23 or later"):
        training_run._optimizer(nn.Linear(16, 10), Recipe(epochs=1, batch=8, optimizer="muon", rate=1e-3))
