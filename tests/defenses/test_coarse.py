"""A coarse round of a few larger masks: fewer labels, the same promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchcleanser import CallableClassifier, ChallengerMasking, DoubleMasking, Job, Run, Threat, evaluate
from patchcleanser.core.results import Case
from patchcleanser.data import ArrayDataset, chosen
from patchcleanser.errors import InputError, MaskError, RecordError
from patchcleanser.records.derive import derive, row_certified, verdicts

WEIGHTS = torch.randn(4, 3 * 12 * 12, generator=torch.Generator().manual_seed(3))
THREAT = Threat.square(2)
KINDS = {"double-masking": DoubleMasking, "challenger-masking": ChallengerMasking}


def linear() -> CallableClassifier:
    return CallableClassifier(lambda x: x.flatten(1) @ WEIGHTS.T, array="torch", fingerprint="linear")


def dataset(number: int = 40) -> ArrayDataset:
    """Noise, brighter where its class has positive weights: some images are certified, some change their label."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, number)
    hints = (WEIGHTS.reshape(4, 3, 12, 12) > 0).permute(0, 2, 3, 1).numpy()[labels]
    strength = draw.integers(0, 120, (number, 1, 1, 1))
    pixels = (draw.integers(0, 136, (number, 12, 12, 3)) + strength * hints).astype(np.uint8)
    return ArrayDataset("noise", pixels, labels.astype(np.int64), list("abcd"))


def images() -> list[torch.Tensor]:
    return [dataset().image(n) for n in range(len(dataset()))]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = Job(linear(), dataset(), THREAT, masks=4, table=True, options={"coarse": 2})
    return evaluate(job, tmp_path_factory.mktemp("coarse"), batch=16)


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_coarse_labels_answer_where_they_agree_and_the_fine_masks_elsewhere(kind: type[DoubleMasking]) -> None:
    plain = kind(linear(), THREAT, masks=4).predict(images())
    coarse_only = kind(linear(), THREAT, masks=2).predict(images())
    verdicts = kind(linear(), THREAT, masks=4, coarse=2).predict(images())
    for verdict, fine, coarse in zip(verdicts, plain, coarse_only, strict=True):
        if coarse.case is Case.AGREED:
            assert (verdict.case, verdict.label, verdict.classifications) == (Case.COARSE, coarse.label, 4)
            assert verdict.one_mask_labels == coarse.one_mask_labels
        else:
            assert (verdict.case, verdict.label) == (fine.case, fine.label)
            assert verdict.classifications == fine.classifications + 4
    assert {verdict.case for verdict in verdicts} >= {Case.COARSE, Case.AGREED, Case.MAJORITY}


def test_a_certificate_is_the_fine_one_and_the_coarse_labels(stored: Run) -> None:
    labels = dataset().labels
    fine = DoubleMasking(linear(), THREAT, masks=4).certify(images(), labels)
    defense = DoubleMasking(linear(), THREAT, masks=4, coarse=2)
    coarse = DoubleMasking(linear(), THREAT, masks=2)
    certificates = defense.certify(images(), labels)
    mapped = defense.certify(images(), labels, maps=True)
    right = [[label == y for label in v.one_mask_labels] for v, y in zip(coarse.predict(images()), labels, strict=True)]
    cover = coarse.mask_set((12, 12)).cover(THREAT)
    for both, alone, good, full in zip(certificates, fine, right, mapped, strict=True):
        assert both.certified == (alone.certified and all(good))
        assert both.row_certified == (alone.row_certified and cover.hole(np.array(good)) is None)
        assert both.row_certified == all(safe.all() for safe in (full.positions or {}).values())
    count = sum(c.certified for c in certificates)
    assert 5 <= count < sum(c.certified for c in fine)
    rows = stored.read(["certified", "row_certified"]).to_pylist()
    assert [(c.certified, c.row_certified) for c in certificates] == [tuple(row.values()) for row in rows]


def test_a_stored_run_gives_the_answers_and_costs_of_a_coarse_round(stored: Run) -> None:
    labels = dataset().labels
    for name, kind in KINDS.items():
        live = kind(linear(), THREAT, masks=4, coarse=2).predict(images())
        share, cost = verdicts(stored, name, coarse=True)
        assert share.count == sum(v.label == y for v, y in zip(live, labels, strict=True))
        each = sum(v.classifications for v in live) / len(live)
        assert cost == pytest.approx(each) if kind is DoubleMasking else cost <= each < 1.3 * cost
    assert verdicts(stored, "double-masking")[1] > verdicts(stored, "double-masking", coarse=True)[1]


def test_smaller_patches_and_weak_places_of_a_stored_run_count_the_coarse_labels(stored: Run) -> None:
    derived = derive(stored)
    assert derived is not None
    by_name = {name: share.count for name, (share, _) in derived.answers.items()}
    assert by_name.keys() == {*KINDS, *(f"{name} after a coarse round" for name in KINDS)}
    assert row_certified(stored, THREAT).count == stored.summary().shares["row_certified"].count
    assert row_certified(stored, Threat.square(1)).count >= row_certified(stored, THREAT).count
    certificates = DoubleMasking(linear(), THREAT, masks=4, coarse=2).certify(images(), dataset().labels, maps=True)
    weak = np.mean([~(c.positions or {})[2, 2] for c in certificates], axis=0)
    np.testing.assert_allclose(derived.weakness, weak)


def test_two_patches_take_unions_of_coarse_masks(tmp_path: Path) -> None:
    threat = Threat.square(1, count=2)
    defense = DoubleMasking(linear(), threat, masks=3, coarse=2)
    (verdict, *_) = defense.predict(images()[:5])
    assert len(verdict.one_mask_labels) in (10, 45)  # 4 or 9 masks, and their unions
    job = Job(linear(), chosen(dataset(), 12, subset="first"), threat, masks=3, table=True, options={"coarse": 2})
    run = evaluate(job, tmp_path / "two", batch=6)
    derived = derive(run)
    assert derived is not None
    certificates = defense.certify(images()[:12], dataset().labels[:12], maps=True)
    weak = np.mean([~(c.positions or {})[1, 1] for c in certificates], axis=0)
    np.testing.assert_allclose(derived.weakness, weak)


@pytest.mark.parametrize("wrong", [1, -2, 2.5, "3", True])
def test_a_wrong_number_of_coarse_masks_is_refused(wrong: Any) -> None:
    with pytest.raises(MaskError, match="coarse is the number of larger masks per axis that are tried first: 0 for"):
        DoubleMasking(linear(), THREAT, coarse=wrong)


def test_coarse_masks_are_fewer_than_the_masks_after_them() -> None:
    DoubleMasking(linear(), THREAT, masks=(1, 4), coarse=3)
    for masks in (2, 3):
        with pytest.raises(MaskError, match=f"fewer per axis than the {masks}×{masks} masks after them, got 3"):
            DoubleMasking(linear(), THREAT, masks=masks, coarse=3)


def test_minority_reports_has_no_coarse_round(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="minority-reports does not take coarse"):
        evaluate(Job(linear(), dataset(), THREAT, defense="minority-reports", options={"coarse": 2}), tmp_path / "run")


def test_rows_that_contradict_their_coarse_labels_are_not_written(stored: Run, tmp_path: Path) -> None:
    rows = stored.read_batch(0).to_pylist()
    copy = Run.begin(tmp_path / "copy", stored.job, images=stored.images, batch=stored.batch, metadata={})
    copy.write(0, rows)
    certified = next(row for row in rows if row["certified"])
    certified["coarse_labels"] = [(certified["label"] + 1) % 4] * 4
    with pytest.raises(RecordError, match="certified with a wrong coarse label"):
        copy.write(0, rows)
