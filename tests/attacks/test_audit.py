"""An audit finds nothing in an honest run, and everything that was tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from patchcleanser import Job, MaskSet, Run, Threat, TorchClassifier, evaluate, load_classifier
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.data.dataset import ArrayDataset, chosen
from patchcleanser.errors import RecordError
from patchcleanser.evaluation import audit as audit_module
from patchcleanser.evaluation.audit import Audit, audit, audited_job, write_audit
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.reference import (
    ReferenceClassifier,
    hidden_pixels,
    hiding_sets,
    reference_label,
    slow_challenger_masking,
    slow_double_masking,
)
from patchcleanser.records.audits import read_audit, sign
from patchcleanser.records.run import Row
from patchcleanser.records.shards import checksum, write_shard
from patchcleanser.reports.rederive import audited, claim_of, problems_of

QUICK = AttackSettings(iterations=3, locations=1)


@pytest.fixture
def honest(colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path) -> Callable[..., tuple[Run, Job]]:
    def make(**options: Any) -> tuple[Run, Job]:
        threat, masks = options.pop("threat", Threat.square(3)), options.pop("masks", 2)
        job = Job(colour, pictures, threat, masks=masks, **options)
        return evaluate(job, tmp_path / "run", batch=4), job

    return make


def tamper(run: Run, index: int, change: Callable[[Row], None]) -> None:
    """Change a row as a forger does: with a checksum that is computed anew."""
    batch = index // run.batch
    rows = run.read_batch(batch).to_pylist()
    change(rows[index % run.batch])
    table = pa.Table.from_pylist(rows, schema=run.schema)
    header = run.header(batch)
    write_shard(run.shard(batch), table, header, checksum(table, header))


def everything(run: Run, job: Job) -> Audit:
    return audit(run, audited_job(run, job.classifier, job.dataset), sample=10, attack=10, settings=QUICK)


@pytest.mark.parametrize(
    "options",
    [
        {"table": True},
        {"defense": "challenger-masking"},
        {"defense": "challenger-masking", "options": {"seed": 4}},
        {"defense": "minority-reports", "options": {"threshold": 0.4}},
        {"masks": 3, "options": {"coarse": 2}},
        {"defense": "challenger-masking", "masks": 3, "options": {"coarse": 2}},
        {"threat": Threat.square(2, count=2)},
        {"threat": Threat.any_rectangle(6)},
        {"threat": Threat.square(3, grid="input")},
    ],
    ids=str,
)
def test_an_honest_run_has_no_contradiction(honest: Any, options: dict[str, Any]) -> None:
    run, job = honest(**options)
    outcome = everything(run, job)
    assert outcome.contradictions == []
    assert len(outcome.derived) == 10
    assert len(outcome.attacked) >= 2
    assert outcome.labels > 10


def flip(name: str) -> Callable[[Row], None]:
    return lambda row: row.update({name: not row[name]})


def other(name: str) -> Callable[[Row], None]:
    return lambda row: row.update({name: (row[name] + 1) % 3})


def second(name: str, at: int) -> Callable[[Row], None]:
    return lambda row: row[name].__setitem__(at, (row[name][at] + 1) % 3)


@pytest.mark.parametrize("index", [0, 1, 9])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (flip("certified"), "certified"),
        (flip("row_certified"), "row"),
        (other("answer"), "answer"),
        (other("undefended"), "undefended"),
        (second("table", 5), "two-mask label"),
        (second("one_mask_labels", 2), "one-mask label 2"),
    ],
)
def test_one_changed_value_is_found(honest: Any, index: int, change: Callable[[Row], None], word: str) -> None:
    """Where the row contradicts itself it is refused; else the audit finds it."""
    run, job = honest(table=True)
    tamper(run, index, change)
    outcome, refused = Audit(rows=0), ""
    try:
        outcome = everything(run, job)
    except RecordError as error:
        refused = str(error)
    assert f"contradicts itself, row {index}: " in refused or outcome.contradictions
    assert {c["index"] for c in outcome.contradictions} <= {index}
    assert refused or any(word in c["what"] for c in outcome.contradictions)


def test_a_changed_coarse_label_is_found(honest: Any) -> None:
    run, job = honest(masks=3, options={"coarse": 2})
    (uncertified, *_) = [row["index"] for row in run.read().to_pylist() if not row["certified"]]
    tamper(run, uncertified, second("coarse_labels", 3))  # of a certified one the row would contradict itself
    (contradiction,) = everything(run, job).contradictions
    assert (contradiction["index"], contradiction["what"]) == (uncertified, "coarse label 3")


def test_a_whole_forged_certificate_is_found_and_fooled(honest: Any) -> None:
    run, job = honest()
    (weak, *_) = [row["index"] for row in run.read().to_pylist() if not row["row_certified"]]
    label = int(job.dataset.labels[weak])

    def forge(row: Row) -> None:
        row.update(certified=True, row_certified=True, failing_pair=None, weakest=None, answer=label)
        row["one_mask_labels"] = [label] * len(row["one_mask_labels"])

    tamper(run, weak, forge)
    same = audited_job(run, job.classifier, job.dataset)
    outcome = audit(run, same, sample=0, attack=10, settings=AttackSettings(iterations=15, locations=2))
    (fooled,) = outcome.contradictions
    assert fooled["what"] == "a certified image was fooled"
    assert fooled["index"] == weak
    image = torch.from_numpy(np.load(fooled["image"]))
    assert job.built.predict([image])[0].label == fooled["found"] != label


def test_the_sample_is_seeded(honest: Any) -> None:
    run, job = honest()
    same = audited_job(run, job.classifier, job.dataset)
    picks = [
        audit(run, same, sample=3, attack=0, settings=AttackSettings(iterations=1, seed=seed)).derived
        for seed in (0, 0, 1)
    ]
    assert picks[0] == picks[1] != picks[2]


def test_near_ties_are_reported_and_do_not_fail(honest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = honest()
    monkeypatch.setattr("patchcleanser.evaluation.reference.NEAR", 100.0)  # every label is a near-tie now
    outcome = everything(run, job)
    assert outcome.contradictions == []
    assert {tie["index"] for tie in outcome.near_ties} == set(range(10))
    row = next(row for row in run.read().to_pylist() if not row["row_certified"])  # or it would contradict itself
    ((hidden, _),) = audit_module.RowChecker(run, job).masks((12, 12))
    second_label = (
        ReferenceClassifier(job.classifier, job.dataset.image(row["index"]), hidden, grid="source").under(1, 1).second
    )
    tamper(run, row["index"], lambda row: row["one_mask_labels"].__setitem__(1, second_label))
    outcome = everything(run, job)
    assert any(t["what"] == "one-mask label 1" and t["stored"] == second_label for t in outcome.near_ties)
    assert row["one_mask_labels"][1] != second_label


def test_other_weights_or_other_images_are_refused(honest: Any, pictures: ArrayDataset) -> None:
    run, job = honest()
    with torch.no_grad():
        job.classifier.module.scale.mul_(1.01)
    with pytest.raises(RecordError, match="was made with another model: give its own with --model"):
        audited_job(run, job.classifier, job.dataset)
    with torch.no_grad():
        job.classifier.module.scale.fill_(20.0)
    audited_job(run, job.classifier, job.dataset)
    changed = ArrayDataset("spots", pictures.images ^ 1, pictures.labels, pictures.classes)
    with pytest.raises(RecordError, match="was made with another data: give its own with --data, --root"):
        audited_job(run, job.classifier, changed)
    fewer = pictures.subset(np.arange(5))
    with pytest.raises(RecordError, match="5 images that spots has not, such as 5"):
        audited_job(run, job.classifier, fewer)


def test_the_images_of_a_subset_are_found_by_name(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path
) -> None:
    run = evaluate(Job(colour, chosen(pictures, 4, seed=5), Threat.square(3), masks=2), tmp_path)
    job = audited_job(run, colour, pictures)
    assert len(job.dataset) == 4
    run.shard(0).unlink()
    with pytest.raises(RecordError, match="is not finished: 1 of 1 batches are missing"):
        audited_job(run, colour, pictures)


@pytest.mark.parametrize("threat", [Threat.square(3), Threat.any_rectangle(6), Threat.square(2, count=2)], ids=str)
def test_the_reference_finds_the_holes_that_the_exact_checker_finds(threat: Threat) -> None:
    size = (9, 10)
    complete = MaskSet.build(threat, image=size, masks=3)
    for masks in (complete, MaskSet(size, complete.masks[1:]), MaskSet(size, complete.masks[:-1])):
        sets = hiding_sets([hidden_pixels(mask, size) for mask in masks.masks], threat, size)
        assert (frozenset() in sets) == (not masks.covers(threat))


def test_masks_that_do_not_cover_are_a_contradiction(honest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = honest()
    short = MaskSet.build(Threat.square(1), image=(12, 12), masks=2)
    monkeypatch.setattr(Run, "mask_set", lambda self, size: short)
    outcome = audit(run, audited_job(run, job.classifier, job.dataset), sample=10, attack=0, settings=QUICK)
    assert any(c["what"] == "the masks do not cover the threat" for c in outcome.contradictions)


def test_the_reference_algorithms_are_the_papers() -> None:
    assert slow_double_masking([3, 1, 1, 3], lambda i, j: 0, {}) == 3  # a tie goes to the largest label
    assert slow_double_masking([7, 7, 4], lambda i, j: 4, {}) == 4
    assert slow_double_masking([7, 7, 4], lambda i, j: 7, {}) == 7
    assert slow_challenger_masking([7, 7, 4], lambda i, j: 4, {}) == 4
    assert slow_challenger_masking([7, 7, 4], lambda i, j: 7, {}) == 7


def test_the_reference_fills_masks_before_preparing_on_the_source_grid(curved: TorchClassifier) -> None:
    image = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0))
    hidden = np.zeros((9, 9), dtype=bool)
    hidden[2:5, 3:6] = True
    masked = image.clone()
    masked[:, 2:5, 3:6] = 0.5
    expected = curved.logits(curved.prepare(masked[None]))[0]
    label = reference_label(curved, image, hidden, prepared=False)
    assert label.label == int(expected.argmax())
    top = expected.topk(2).values.tolist()
    assert label.margin == pytest.approx(top[0] - top[1], abs=1e-5)


def test_labels_matched_by_name_are_found_again(
    colour: TorchClassifier, pictures: ArrayDataset, tmp_path: Path
) -> None:
    colour.names = ("green", "red", "blue")
    matched, _ = match_labels(pictures, colour)
    run = evaluate(Job(colour, matched, Threat.square(3), masks=2), tmp_path)
    outcome = audited_job(run, colour, pictures).dataset
    assert outcome.labels is not None
    assert outcome.labels.tolist() == [1, 0, 2] * 3 + [1]


def test_an_audit_is_signed_and_a_claim_names_its_signature(honest: Any, tmp_path: Path) -> None:
    run, job = honest()
    path = write_audit(everything(run, job), run, QUICK, sample=10, attack=10)
    record = read_audit(run)
    claim = replace(claim_of(run, method="A", data="B", measured_by="C"), run="run")
    assert (record["key"], record["digest"]) == (run.key, run.digest)
    assert claim.audit_key == record["signature"] == sign(record)
    assert (claim.rederived, claim.attacked, claim.fooled) == (10, len(record["attacked"]), 0)
    assert list(problems_of(claim, tmp_path)) == []
    for name, change in (("audit_key", "0" * 64), ("rederived", 11), ("attacked", 0), ("fooled", 1), ("attack", "x")):
        (problem,) = problems_of(replace(claim, **{name: change}), tmp_path)
        assert problem.startswith(f"{name} is ")
    path.write_text(path.read_text(encoding="utf-8").replace('"sample": 10', '"sample": 90'), encoding="utf-8")
    (problem,) = problems_of(claim, tmp_path)
    assert "does not match its signature" in problem


def test_an_audit_of_other_rows_or_with_contradictions_supports_no_claim(honest: Any) -> None:
    run, job = honest()
    outcome = everything(run, job)
    write_audit(replace(outcome, contradictions=[{"index": 0}]), run, QUICK, sample=10, attack=10)
    with pytest.raises(RecordError, match="supports no claim"):
        audited(run)
    write_audit(outcome, run, QUICK, sample=10, attack=10)
    tamper(run, 0, lambda row: row.update(seconds=9.0))
    with pytest.raises(RecordError, match="of other rows"):
        audited(Run.open(run.folder))
    shutil.rmtree(run.folder / "audit")
    with pytest.raises(RecordError, match="was not audited; run: patchcleanser audit"):
        audited(run)


RED = """
import torch

class Red(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, -scale]))

    def forward(self, images):
        return images.mean((1, 2, 3))[:, None] * self.scale + torch.tensor([0.0, 1.0])

def make(scale=1.0):
    return Red(scale).eval()
"""
PAIRS = [(torch.full((3, 8, 8), 0.9), 0), (torch.full((3, 8, 8), 0.1), 1)]


def test_a_run_of_a_module_and_pairs_is_audited_by_them_and_by_the_file_that_makes_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "red_module.py").write_text(RED)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("red_module").make()
    run = evaluate(Job(module, PAIRS, "2", masks=2), tmp_path / "run")
    for model in (module, f"python:{tmp_path}/red_module.py:make"):
        outcome = audit(run, audited_job(run, model, PAIRS), sample=2, attack=1, settings=QUICK)
        assert (len(outcome.derived), outcome.contradictions) == (2, [])
    for scale in ("0.5", "2"):
        with pytest.raises(RecordError, match="another model"):
            audited_job(run, f"python:{tmp_path}/red_module.py:make?scale={scale}", PAIRS)


def test_a_run_of_a_file_is_not_one_of_the_same_module_without_it(tmp_path: Path) -> None:
    (tmp_path / "red_file.py").write_text(RED)
    from_file = load_classifier(f"python:{tmp_path}/red_file.py:make", device="cpu")
    run = evaluate(Job(from_file, PAIRS, "2", masks=2), tmp_path / "run")
    audited_job(run, from_file, PAIRS)
    assert isinstance(from_file, TorchClassifier)
    with pytest.raises(RecordError, match="another model"):
        audited_job(run, TorchClassifier(from_file.module), PAIRS)
