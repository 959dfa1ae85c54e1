"""`certify --task multilabel`: rows, resumed runs, reports, and refusals, on a tiny function."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from typer.testing import CliRunner

from patchcleanser import Preprocessing, Run, Threat, TorchClassifier, evaluate
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.cli.app import app
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.data.multilabel_sets import MultiLabelDataset
from patchcleanser.errors import CoverError, DataError, InputError, RecordError, ThreatError
from patchcleanser.evaluation.audit import Audit, audit
from patchcleanser.evaluation.multilabel_audit import LabelRowChecker, MultiLabelAudit, audited_labels
from patchcleanser.evaluation.multilabel_jobs import CURVE, MultiLabelAttackJob, MultiLabelJob
from patchcleanser.records.columns import BOUNDS
from patchcleanser.records.derive_multilabel import derived_shares, per_label, recall_at, weak_counts
from patchcleanser.records.metrics import certificates_beaten, precision_and_recall
from patchcleanser.reports import write_multilabel_report

CLASSES = ("top left", "top right", "bottom left", "bottom right")
SIDE = 16


def network() -> nn.Module:
    """A logit for each quarter: how bright it is."""
    head = nn.Conv2d(1, 1, 1)
    head.weight.data, head.bias.data = torch.tensor([[[[8.0]]]]), torch.tensor([-4.2])
    return nn.Sequential(nn.AvgPool3d((3, 8, 8)), head, nn.Flatten()).eval()


def pixels(images: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures whose quarters are bright where the class is there, some of them hardly."""
    random = np.random.default_rng(0)
    targets = random.random((images, 4)) < 0.4
    levels = np.where(targets, 150 + 100 * random.random((images, 4)), 20 + 90 * random.random((images, 4)))
    quarters = levels.reshape(images, 2, 2).repeat(8, axis=1).repeat(8, axis=2)
    return quarters[..., None].repeat(3, axis=3).astype(np.uint8), targets


def dataset(images: int = 12) -> MultiLabelDataset:
    content, targets = pixels(images)
    arrays = ArrayDataset("quarters", content, np.zeros(images, dtype=np.int64), ("any",))
    return MultiLabelDataset(arrays, targets, CLASSES)


def job(**changes: Any) -> MultiLabelJob:
    settings = {"masks": 4, **changes}
    return MultiLabelJob(TorchClassifier(network()), dataset(), Threat.square(3), **settings)


def rows_of(run: Run) -> list[dict[str, Any]]:
    return run.read([name for name in run.schema.names if name != "seconds"]).to_pylist()


def test_rows_hold_what_the_defense_certifies(tmp_path: Path) -> None:
    work = job()
    for row in evaluate(work, tmp_path / "run").read().to_pylist():
        truth = work.dataset.targets[row["index"]]
        (examined,) = work.built.examine(work.dataset.image(row["index"])[None], truth[None])
        certificate = examined.certificate
        assert row["certified_true"][0] == certificate.true_positives
        assert row["certified_false"][0] == certificate.false_positives
        assert row["clean_true"][0] == len(set(examined.verdict.present) & set(certificate.present))
        assert row["undefended_true"][0] == ((examined.undefended >= 0) & truth).sum()
        assert row["classes"] == list(certificate.present)
        assert {c for c in row["classes"] if row["lowest_scores"][c] >= 0} == set(certificate.certified)
        assert len(row["clean_false"]) == 1 + len(CURVE)
        assert row["margin"] == pytest.approx(certificate.margin)
        assert row["classifications"] == 1 + len(work.built.mask_set((SIDE, SIDE)).unions)


def test_curves_of_rows_are_those_of_single_thresholds(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    for number in (12, 24, 30):
        alone = evaluate(job(threshold=CURVE[number]), tmp_path / str(number))
        for bound in BOUNDS:
            both = precision_and_recall(run.read(), bound), precision_and_recall(alone.read(), bound)
            assert [shares[1 + number] for shares in both[0]] == [shares[0] for shares in both[1]]


def test_more_is_promised_the_weaker_the_bound_is(tmp_path: Path) -> None:
    shares = evaluate(job(), tmp_path / "run").summary().shares
    for what in ("precision", "recall"):
        values = [shares[f"{name}_{what}"].percent for name in ("each_class", "certified", "clean")]
        assert values == sorted(values)
        assert shares[f"one_mask_{what}"].percent <= shares[f"certified_{what}"].percent
    assert 0 < shares["certified_recall"].percent < shares["clean_recall"].percent


def test_a_run_that_was_stopped_has_the_same_rows_as_one_that_was_not(tmp_path: Path) -> None:
    once = evaluate(job(), tmp_path / "once", batch=5)
    resumed = evaluate(job(), tmp_path / "resumed", batch=5)
    resumed.shard(1).unlink()
    assert not Run.open(tmp_path / "resumed").finished
    assert rows_of(evaluate(job(), tmp_path / "resumed", batch=5)) == rows_of(once)


@pytest.mark.parametrize("changes", [{"threshold": 0.6}, {"masks": 3}, {"curve": (0.5,)}, {"outputs": (0, 1, 3, 2)}])
def test_another_job_does_not_continue_a_run(changes: dict[str, Any], tmp_path: Path) -> None:
    evaluate(job(), tmp_path / "run")
    with pytest.raises(RecordError, match="another job"):
        evaluate(job(**changes), tmp_path / "run")


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("certified_true", lambda counts: [9, *counts[1:]], "true positives are out of range"),
        ("certified_false", lambda counts: [-1, *counts[1:]], "false positives are out of range"),
        ("clean_scores", lambda scores: [99.0, *scores[1:]], "outside its bounds"),
        ("lowest_scores", lambda scores: scores[:-1], "not one for each class"),
        ("one_mask_true", lambda counts: counts[:-1], "not one for each threshold"),
        ("classes", lambda classes: [*classes, 4], "a true class has no score"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(column: str, change: Any, message: str, tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    rows = run.read().to_pylist()
    rows[0][column] = change(rows[0][column])
    with pytest.raises(RecordError, match=message):
        run.write(0, rows)


def test_images_that_cannot_be_used_are_skipped_with_the_reason(tmp_path: Path) -> None:
    class Broken(ArrayDataset):
        def image(self, index: int) -> Tensor:
            if index == 1:
                raise DataError("this picture is torn")
            return super().image(index)

    content, targets = pixels(3)
    images = Broken("torn", content, np.zeros(3, dtype=np.int64), ("any",))
    work = MultiLabelJob(TorchClassifier(network()), MultiLabelDataset(images, targets, CLASSES), Threat.square(3))
    with pytest.raises(DataError, match="this picture is torn"):
        evaluate(work, tmp_path / "stopped")
    summary = evaluate(work, tmp_path / "run", skip=True).summary()
    assert (summary.images, summary.skipped) == (2, 1)


def test_what_cannot_be_certified_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="come from load_multilabel"):
        MultiLabelJob(TorchClassifier(network()), dataset().images, Threat.square(3))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has 4 classes and 2 outputs count"):
        job(outputs=(0, 1))
    with pytest.raises(ThreatError):
        evaluate(MultiLabelJob(TorchClassifier(network()), dataset(), Threat.square(40)), tmp_path)


def test_classes_are_matched_by_name() -> None:
    classifier = TorchClassifier(network())
    classifier.names = ("bottom right", "sky", "top left", "top_right")
    matched = MultiLabelJob.matched(classifier, dataset(), Threat.square(3))
    assert matched.dataset.classes == ("bottom right", "top left", "top_right")
    assert matched.outputs == (0, 2, 3)
    assert (matched.dataset.targets == dataset().targets[:, [3, 0, 1]]).all()


# What is derived without the model.


def test_classes_are_counted_as_their_scores_say(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    counts = per_label(run, run.read())
    assert [each.images for each in counts] == dataset().targets.sum(axis=0).tolist()
    for name, column in [("undefended", "undefended_true"), ("clean", "clean_true"), ("certified", "each_class_true")]:
        assert sum(getattr(each, name) for each in counts) == sum(row[column][0] for row in rows_of(run))
    assert sum(each.false for each in counts) == sum(row["clean_false"][0] for row in rows_of(run))
    assert sum(each.possible for each in counts) == sum(row["each_class_false"][0] for row in rows_of(run))


def test_recall_at_a_precision_is_the_best_of_thresholds_that_reach_it() -> None:
    counts = {"certified_true": [[10, 9, 6, 3, 0]], "certified_false": [[0, 9, 2, 0, 0]]}  # the run's own comes first
    rows = pa.table({"classes": [list(range(10))], **counts})
    expected = {25: 9, 50: 9, 51: 6, 75: 6, 90: 3, 100: 3}
    assert {level: getattr(recall_at(rows, "certified", level), "count", None) for level in expected} == expected
    nothing = pa.table({"classes": [list(range(10))], "certified_true": [[10, 0]], "certified_false": [[0, 3]]})
    assert recall_at(nothing, "certified", 25) is None


def test_weak_places_of_rows_are_those_of_the_certificate(tmp_path: Path) -> None:
    work = job()
    run = evaluate(work, tmp_path / "run")
    for row in rows_of(run)[:4]:
        image, truth = work.dataset.image(row["index"])[None], work.dataset.targets[[row["index"]]]
        (certificate,) = work.built.certify(image, truth, maps=True)
        (derived,) = weak_counts(row, run.mask_set((SIDE, SIDE)), run.threat).values()
        assert (certificate.weak or {})[3, 3].tolist() == derived.tolist()


def test_certificates_against_smaller_patches_follow_from_the_rows(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    rows = run.read()
    shares = run.summary().shares
    assert derived_shares(run, rows, run.threat) == (shares["certified_precision"], shares["certified_recall"])
    precision, recall = derived_shares(run, rows, Threat.square(1))
    assert recall.count >= shares["certified_recall"].count
    assert precision.percent >= shares["certified_precision"].percent
    with pytest.raises(CoverError):
        derived_shares(run, rows, Threat.square(4))
    with pytest.raises(RecordError, match="lie on the source grid, the threat on the input grid"):
        derived_shares(run, rows, Threat.square(1, grid="input"))


def test_a_report_has_curves_classes_and_pictures(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run")
    page = write_multilabel_report([run], tmp_path / "report").read_text()
    shares = run.summary().shares
    assert f"{shares['certified_recall'].percent:.1f}% recall" in page
    assert all(name in page for name in CLASSES)
    assert page.count("<figure data-image=") == min(8, (dataset().targets.sum(axis=1) > 1).sum())
    assert 'class="weak"' in page
    for name in ("bounds.csv", "classes.csv"):
        assert (tmp_path / "report" / "tables" / name).is_file()
    assert (tmp_path / "report" / "figures" / "curve.svg").is_file()
    table = (tmp_path / "report" / "tables" / "bounds.csv").read_text().splitlines()
    assert len(table) == 1 + len(BOUNDS)  # 3 px is no share of 2%


def test_a_run_of_two_percent_is_reported_for_one_percent_too(tmp_path: Path) -> None:
    run = evaluate(MultiLabelJob(TorchClassifier(network()), dataset(), Threat.share(0.02)), tmp_path / "run")
    write_multilabel_report([run], tmp_path / "report")
    assert "patch of 1%" in (tmp_path / "report" / "tables" / "bounds.csv").read_text()


def test_a_run_without_answers_has_no_report(tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run", batch=4)
    for batch in range(run.batches):
        run.shard(batch).unlink()
    with pytest.raises(RecordError, match="nothing to show"):
        write_multilabel_report([Run.open(tmp_path / "run")], tmp_path / "report")


# The attack.


def attack_job(**changes: Any) -> MultiLabelAttackJob:
    return MultiLabelAttackJob(job(), AttackSettings(**{"iterations": 5, "locations": 1, **changes}))


def test_rows_of_an_attack_hold_each_class_and_no_certificate_is_beaten(tmp_path: Path) -> None:
    run = evaluate(attack_job(), tmp_path / "run", batch=4)
    shares = run.summary().shares
    assert shares["certified_robust"].count == shares["certified_robust"].total >= 12
    assert shares["robust"].total > shares["certified_robust"].total
    assert shares["robust"].count < shares["robust"].total
    assert len(certificates_beaten(run.read())) == 0
    run.shard(1).unlink()
    again = evaluate(attack_job(), tmp_path / "run", batch=4)
    assert again.finished
    with pytest.raises(RecordError, match="another job"):
        evaluate(attack_job(iterations=6), tmp_path / "run")


@pytest.mark.parametrize(
    ("column", "value"), [("defended_wrong", [True] * 3), ("true_positives", [0] * 3), ("false_positives", [4] * 3)]
)
def test_rows_that_beat_a_certificate_are_counted(column: str, value: list[Any], tmp_path: Path) -> None:
    rows = evaluate(attack_job(), tmp_path / "run").read()
    row = next(row for row in rows.to_pylist() if len(row["attacked"]) == 3 and row["promised_true"])
    changed = pa.Table.from_pylist([{**row, column: value}], schema=rows.schema)
    assert len(certificates_beaten(changed)) == 1


def test_an_attack_refuses_what_it_chooses_itself() -> None:
    with pytest.raises(InputError, match="leave out places, target"):
        attack_job(places="searched", target=1)


# The audit.


def audited(run: Run, work: MultiLabelJob, **options: Any) -> Audit:
    settings = {"sample": 4, "attack": 0, "settings": AttackSettings(iterations=5, locations=1), **options}
    return audit(run, work, workload=MultiLabelAudit, **settings)


@pytest.mark.parametrize("options", [{}, {"threshold": 0.6, "outputs": (3, 2, 1, 0)}, {"masks": None, "stride": 5}])
def test_an_audit_derives_every_number_again(options: dict[str, Any], tmp_path: Path) -> None:
    work = job(**options)
    run = evaluate(work, tmp_path / "run")
    again = audited_labels(run, work.classifier, work.dataset)
    result = audited(run, again, sample=4, attack=2)
    assert (len(result.derived), len(result.attacked)) == (4, 2)
    assert not result.contradictions
    assert not result.notes


def test_an_audit_of_a_patch_on_the_input_derives_the_same(tmp_path: Path) -> None:
    preprocessing = Preprocessing(resize=(SIDE, SIDE))
    classifier = TorchClassifier(network(), preprocessing)
    work = MultiLabelJob(classifier, dataset(), Threat.square(3, grid="input"), masks=3)
    assert not audited(evaluate(work, tmp_path / "run"), work).contradictions


@pytest.mark.parametrize(
    ("column", "change", "what"),
    [
        ("certified_true", lambda row: [n + 1 for n in row["one_mask_true"]], "certified counts"),
        ("clean_false", lambda row: [max(0, n - 1) for n in row["clean_false"]], "clean counts"),
        ("highest_scores", lambda row: [s + 0.5 for s in row["highest_scores"]], "highest score of class"),
        ("undefended_scores", lambda row: [s - 0.1 for s in row["undefended_scores"]], "undefended score of class"),
        ("classes", lambda row: row["classes"][:-1], "classes"),
    ],
)
def test_an_audit_contradicts_rows_that_were_changed(column: str, change: Any, what: str, tmp_path: Path) -> None:
    run = evaluate(job(), tmp_path / "run", batch=12)
    rows = run.read().to_pylist()
    number = next(n for n, row in enumerate(rows) if sum(row["clean_false"]) and len(row["classes"]) > 1)
    rows[number][column] = change(rows[number])
    table = pa.Table.from_pylist(rows, schema=run.schema)
    result = Audit(rows=12)
    LabelRowChecker(run, job()).check(table.to_pylist()[number], job().dataset.image(number), result)
    assert result.contradictions
    assert all(what in entry["what"] for entry in result.contradictions if what != "classes")


def test_an_audit_refuses_another_model_and_unfinished_runs(tmp_path: Path) -> None:
    work = job()
    run = evaluate(work, tmp_path / "run", batch=4)
    other = network()
    other[1].bias.data += 1
    with pytest.raises(RecordError, match="another model"):
        audited_labels(run, TorchClassifier(other), work.dataset)
    run.shard(2).unlink()
    with pytest.raises(RecordError, match="is not finished"):
        audited_labels(Run.open(tmp_path / "run"), work.classifier, work.dataset)


# The command.


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parquet files of images with lists of class numbers, and a module that builds the network."""
    content, targets = pixels(6)
    png = []
    for picture in content:
        out = io.BytesIO()
        Image.fromarray(picture).save(out, format="PNG")
        png.append({"bytes": out.getvalue(), "path": None})
    table = pa.table({"image": png, "labels": [np.flatnonzero(row).tolist() for row in targets]})
    names = {
        "info": {
            "features": {"labels": {"feature": {"names": list(CLASSES), "_type": "ClassLabel"}, "_type": "Sequence"}}
        }
    }
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "quarters.parquet"
    )
    (tmp_path / "quarters.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    head = nn.Conv2d(1, 1, 1)\n"
        "    head.weight.data, head.bias.data = torch.tensor([[[[8.0]]]]), torch.tensor([-4.2])\n"
        "    return nn.Sequential(nn.AvgPool3d((3, 8, 8)), head, nn.Flatten()).eval()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "quarters", raising=False)  # that of another test
    return tmp_path


COMMAND = [
    "certify",
    "--task",
    "multilabel",
    "--model",
    "python:quarters.py:make",
    "--data",
    "parquet:quarters.parquet",
]


def test_the_command_certifies_and_says_precision_and_recall(files: Path) -> None:
    result = CliRunner().invoke(app, [*COMMAND, "--patch", "3", "--masks", "4", "--out", "run"])
    assert result.exit_code == 0, result.output
    assert "6 images, 4 classes, threshold 0.5" in result.output
    assert "precision   recall" in result.output
    run = Run.open(files / "run")
    assert run.metadata["classes"] == list(CLASSES)
    again = CliRunner().invoke(app, [*COMMAND, "--patch", "3", "--masks", "4", "--out", "run", "--json"])
    content = json.loads(again.stdout)
    assert content["certified_recall"]["count"] == run.summary().shares["certified_recall"].count
    assert content["digest"] == run.digest
    shown = CliRunner().invoke(app, ["report", "run", "--json"])
    assert json.loads(shown.stdout)["run"]["certified_recall"] == content["certified_recall"]
    assert (files / "run" / "report" / "report.html").is_file()
    audited_run = CliRunner().invoke(app, ["audit", "run", "--sample", "2", "--attack", "1", "--trust-code"])
    assert audited_run.exit_code == 0, audited_run.output
    assert "no contradiction" in audited_run.output


def test_the_command_attacks_single_classes(files: Path) -> None:
    typed = [
        "attack",
        *COMMAND[1:],
        "--patch",
        "3",
        "--masks",
        "4",
        "--out",
        "attacked",
        "--iterations",
        "3",
        "-n",
        "3",
    ]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0, result.output
    assert "certified robust                     100.00%" in result.output
    assert "(must be 0)" in result.output
    again = json.loads(CliRunner().invoke(app, [*typed, "--json"]).stdout)
    assert again["certificates_beaten"] == 0
    refused = CliRunner().invoke(app, ["report", "attacked"])
    assert "has no page" in str(refused.exception)
    assert "does not take --attack" in str(CliRunner().invoke(app, [*typed, "--attack", "square"]).exception)


def test_the_command_says_the_cost_before_it_works(files: Path) -> None:
    result = CliRunner().invoke(app, [*COMMAND, "--patch", "3", "--masks", "4", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "6 images × 137 classifications, 3×3 patch" in result.stdout
    assert not (files / "runs").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--defense", "challenger-masking"], "--task multilabel does not take --defense"),
        (["--precision", "fast", "--table"], "does not take --precision, --table"),
        (["--option", "keep=4"], "takes scores=logits or scores=probabilities, got 'keep=4'"),
        (["--threshold", "1.5"], "thresholds are probabilities above 0 and below 1"),
        (["--lines", "3"], "does not take --lines"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(files: Path, extra: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*COMMAND, *extra])
    assert message in str(result.exception)
