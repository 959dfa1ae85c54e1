"""Runs of attacks: rows that can be trusted, stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchcleanser import CallableClassifier, Job, Run, Threat, TorchClassifier, evaluate
from patchcleanser.attacks import ATTACKS
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.errors import InputError, RecordError
from patchcleanser.evaluation import AttackJob
from patchcleanser.evaluation import attack_jobs as module
from patchcleanser.evaluation.attack_jobs import attack_shares
from patchcleanser.records.columns import ATTACK_SCHEMA
from patchcleanser.records.metrics import certified_fooled
from patchcleanser.records.run import find_runs

QUICK = AttackSettings(iterations=8, locations=2)


def job(colour: Any, pictures: ArrayDataset, attack: str = "apgd", **options: Any) -> AttackJob:
    settings = options.pop("settings", QUICK)
    return AttackJob(Job(colour, pictures, Threat.square(3), masks=3, **options), attack, settings)


@pytest.mark.parametrize("defense", ["double-masking", "challenger-masking", "minority-reports"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_rows_say_what_both_classifiers_answer_and_no_certified_image_is_fooled(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path, attack: str, defense: str
) -> None:
    what = job(colour, pictures, attack, defense=defense)
    run = evaluate(what, tmp_path, batch=4)
    rows = run.read()
    assert run.finished
    assert rows.schema.names == ATTACK_SCHEMA.names
    assert len(certified_fooled(rows)) == 0
    shares = attack_shares(rows)
    assert {share.total for share in shares.values()} == {10}
    promise, held = (
        ("detection certified", "never wrong silently")
        if defense == "minority-reports"
        else ("row certified", "robust")
    )
    assert 0 < shares[promise].count <= shares[held].count
    for row in rows.to_pylist():  # the kept picture is what was judged
        with Image.open(tmp_path / "gallery" / f"{row['index']}-attacked.png") as picture:
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        (verdict,) = what.job.built.predict([pixels])
        assert verdict.label == row["attacked_answer"]
        assert int(colour.logits(pixels[None]).argmax()) == row["attacked_undefended"]


def test_the_adaptive_attack_fools_more_than_the_plain_one(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path
) -> None:
    robust = {
        name: attack_shares(evaluate(job(colour, pictures, name), tmp_path / name).read())["robust"].count
        for name in ("pgd", "adaptive")
    }
    assert robust["adaptive"] <= robust["pgd"]


def test_a_stopped_attack_goes_on_to_the_same_rows(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = job(colour, pictures)
    unbroken = evaluate(what, tmp_path / "whole", batch=3)
    real, calls = module.attack_rows, []

    def dies(*words: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*words)

    monkeypatch.setattr(module, "attack_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate(what, tmp_path / "stopped", batch=3)
    assert len(Run.open(tmp_path / "stopped").read()) == 6
    run = evaluate(what, tmp_path / "stopped")
    assert len(calls) == 5  # two done, one that died, two more
    same = [table.read().drop_columns(["seconds"]).to_pylist() for table in (unbroken, run)]
    assert same[0] == same[1]


def test_another_budget_is_another_job(colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path) -> None:
    evaluate(job(colour, pictures), tmp_path)
    with pytest.raises(RecordError, match="another job; it differs in --iterations "):
        evaluate(job(colour, pictures, settings=AttackSettings(iterations=9, locations=2)), tmp_path)


def test_attack_runs_are_not_taken_for_certificates(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path
) -> None:
    evaluate(job(colour, pictures, settings=AttackSettings(iterations=1)), tmp_path / "attack")
    evaluate(Job(colour, pictures, Threat.square(3), masks=2), tmp_path / "certify")
    assert {run.folder.name: run.kind for run in find_runs([tmp_path])[0]} == {"attack": "attack", "certify": "certify"}


def test_images_of_the_target_class_are_left_out(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path
) -> None:
    run = evaluate(job(colour, pictures, settings=AttackSettings(iterations=2, target=1)), tmp_path)
    skipped = [row for row in run.read().to_pylist() if row["skipped"] is not None]
    assert {row["label"] for row in skipped} == {1}
    assert attack_shares(run.read())["robust"].total == 10 - len(skipped)


def test_only_a_few_pictures_are_kept_but_every_one_that_fooled_the_defense(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVED_IMAGES", 2)
    run = evaluate(job(colour, pictures, "adaptive"), tmp_path)
    rows = run.read().to_pylist()
    wrong = {row["index"] for row in rows if row["attacked_answer"] != row["label"]}
    assert wrong
    saved = {int(path.stem.split("-")[0]) for path in (tmp_path / "gallery").glob("*-attacked.png")}
    assert saved == wrong | {0, 1}


def test_unknown_or_impossible_attacks_are_refused(colour: TorchClassifier, pictures: ArrayDataset) -> None:
    with pytest.raises(InputError, match="no attack 'magic'; there are pgd, apgd, square, adaptive"):
        job(colour, pictures, "magic")
    with pytest.raises(InputError, match="chooses its places itself"):
        job(colour, pictures, "adaptive", settings=AttackSettings(places="searched"))
    function = CallableClassifier(lambda x: x.mean((2, 3)), fingerprint="f")
    with pytest.raises(InputError, match="without gradients use --attack square"):
        job(function, pictures, "apgd")
