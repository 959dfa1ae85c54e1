"""A slice of the campaign of docs/guide/attack.md: certified images of the sample, attacked adaptively."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchcleanser import Threat, load_classifier, load_dataset
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.data import chosen
from patchcleanser.evaluation import AttackJob, Job, evaluate
from patchcleanser.records.metrics import certified_fooled


@pytest.mark.slow
@pytest.mark.parametrize("side", [5, 2])
@pytest.mark.parametrize("defense", ["double-masking", "challenger-masking", "minority-reports"])
def test_no_certified_image_of_the_sample_is_fooled(defense: str, side: int, tmp_path: Path) -> None:
    images = chosen(load_dataset("sample"), 50)
    job = Job(load_classifier("zoo:tiny", device="cpu"), images, Threat.square(side), defense, masks=3)
    rows = evaluate(AttackJob(job, "adaptive", AttackSettings(iterations=10, locations=1)), tmp_path, batch=10).read()
    promise = "detection_certified" if defense == "minority-reports" else "row_certified"
    assert sum(rows[promise].to_pylist()) >= 10
    assert len(certified_fooled(rows)) == 0
    undefended_right = sum(rows["undefended"].to_numpy() == rows["label"].to_numpy())
    assert 50 - sum(rows["undefended_fooled"].to_pylist()) < undefended_right  # the attack has teeth
