"""Audit: do the rows of a run follow from its model and data, and do its certificates hold under attack?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from patchcleanser.attacks import AdaptiveAttack
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import AnyClassifier, as_classifier
from patchcleanser.data.dataset import Dataset, DatasetView, Subset
from patchcleanser.data.inputs import AnyDataset, as_dataset
from patchcleanser.errors import DataError, InputError, RecordError
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.dataset_jobs import init_fields
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
from patchcleanser.evaluation.row_checks import Difference, RowChecker, contradiction, reference_of
from patchcleanser.evaluation.workloads import LocalRunner, Runner, Workload
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.audits import AUDIT, sign
from patchcleanser.records.run import Row, Run

ATTACK_BATCH = 16
"""Images attacked at once on a CPU; a GPU takes 16 times as many."""


@dataclass
class Audit:
    """What an audit examined, and what it found."""

    rows: int
    derived: list[int] = field(default_factory=list)
    """Indices of the images whose rows were derived again."""
    attacked: list[int] = field(default_factory=list)
    """Indices of the certified images that were attacked."""
    labels: int = 0
    """Classifications by the reference."""
    contradictions: list[dict[str, Any]] = field(default_factory=list)
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    """Images, and differences, whose margin is so small that rounding decides. They are reported but do not fail."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))

    def add_row(self, row: Row, differences: Iterable[Difference], labels: int) -> None:
        """Add what differs in a row that was derived again by this number of classifications."""
        for what, stored, expected, near in differences:
            (self.near_ties if near else self.contradictions).append(contradiction(row, what, stored, expected))
        self.derived.append(row["index"])
        self.labels += labels

    def add(self, part: Audit, folder: Path) -> None:
        """Add the result of one task. Attacked images that fooled the defense are saved in the folder."""
        self.derived += part.derived
        self.attacked += part.attacked
        self.labels += part.labels
        self.near_ties += part.near_ties
        for entry in part.contradictions:
            if "image" in entry:
                path = folder / f"fooled-{entry['index']}.npy"
                with whole_file(path) as unfinished, unfinished.open("wb") as file:
                    np.save(file, entry["image"])
                entry["image"] = str(path)
            self.contradictions.append(entry)


def audited_job(run: Run, classifier: AnyClassifier, dataset: AnyDataset) -> Job:
    """The job of a finished run, with its model and images as Job takes them. RecordError if they are not the run's.

    The run's images are found in the dataset by their ids, so how they were chosen does not matter.
    """
    classifier, dataset = as_classifier(classifier), as_dataset(dataset)
    if run.kind != "certify":
        raise RecordError(f"{run.folder} holds no certificates to audit, but a run of kind {run.kind!r}")
    reference_of(run)
    require_finished(run)
    masks, stride = (tuple(pair) if pair else None for pair in (run.job["masks"], run.job["stride"]))
    job = Job(
        classifier,
        _images_of(run, classifier, dataset),
        run.threat,
        defense=run.job["defense"],
        masks=masks,
        stride=stride,
        precision=run.job["precision"],
        table=run.job["table"],
        options=run.job["options"],
    )
    require_auditable(run, classifier, job.identity)
    return job


def require_finished(run: Run) -> None:
    """RecordError if batches are missing, or the outcome cannot be written."""
    if not run.finished:
        raise RecordError(
            f"{run.folder} is not finished: {len(run.missing())} of {run.batches} batches are missing; "
            "finish it with the command that began it"
        )
    require_inside(run.folder / "audit", run.folder)  # where the outcome is written


def require_auditable(run: Run, classifier: Classifier, identity: Mapping[str, Any]) -> None:
    """RecordError if model or data are not those of the run."""
    for name, fix in (
        ("classifier", "model: give its own with --model, or pass it to audited_job"),
        ("data", "data: give its own with --data, --root, or pass them to audited_job"),
    ):
        if run.job[name] not in (identity[name], name == "classifier" and _without_code(classifier)):
            raise RecordError(
                f"{run.folder} was made with another {fix}; its fingerprint is {run.job[name][:12]}…, "
                f"got {identity[name][:12]}…"
            )


def _without_code(classifier: Classifier) -> str:
    """The fingerprint of a classifier as if no file had built it.

    A run of a module in Python has this one: it hashes the weights, the layers and their settings, but no file. So what
    a `python:` name returns is compared with it as thoroughly as the module itself would be.
    """
    plain = copy(classifier)
    plain.code = ""
    return plain.fingerprint


def picks_of(run: Run, dataset: Dataset | DatasetView) -> list[int]:
    """The numbers of the run's images in a dataset, by their ids."""
    ids = run.read(["id"])["id"].to_pylist()
    at = {dataset.id(n): n for n in range(len(dataset))}
    missing = [name for name in ids if name not in at]
    if missing:
        raise RecordError(f"{run.folder} has {len(missing)} images that {dataset.name} has not, such as {missing[0]}")
    return [at[name] for name in ids]


def _images_of(run: Run, classifier: Classifier, dataset: Dataset) -> Dataset:
    """The run's images, under the dataset's own class numbers or, if the run used these, the classifier's."""
    picks = picks_of(run, dataset)

    def picked(numbered: Dataset) -> Dataset:
        in_order = picks == list(range(len(numbered)))
        return numbered if in_order else Subset(numbered, np.array(picks, dtype=np.intp))

    images = picked(dataset)
    if images.fingerprint != run.job["data"]:
        with suppress(DataError, InputError):
            images = picked(match_labels(dataset, classifier, "name")[0])
    return images


@dataclass(frozen=True)
class AuditTask:
    """One row to derive again, or some rows whose images are attacked at once."""

    number: int
    rows: list[Row]
    attack: bool


@dataclass(frozen=True)
class AuditWorkload(Workload[AuditTask, Audit]):
    """Rows of a run to check."""

    run: Run
    job: Job
    settings: AttackSettings

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    def read(self, task: AuditTask) -> list[Tensor]:
        return [self.job.dataset.image(row["index"]) for row in task.rows]

    @cached_property
    def checker(self) -> RowChecker:
        """Shared by all tasks, because it builds the masks of each image size once."""
        return RowChecker(self.run, self.job)

    def process(self, task: AuditTask, read: list[Tensor]) -> Audit:
        result = Audit(rows=0)
        if task.attack:
            self.attack(task.rows, read, result)
        else:
            for row, image in zip(task.rows, read, strict=True):
                self.checker.check(row, image, result)
        return result

    def attack(self, rows: list[Row], images: list[Tensor], result: Audit) -> None:
        """Attack certified images, knowing the defense. A fooled one is a contradiction, with its patches and pixels.

        Pixels are float32 [C, H, W] on the threat's grid.
        """
        attacks = AdaptiveAttack(self.job.masking, self.settings).challenge(images, [row["label"] for row in rows])
        for row, attack in zip(rows, attacks, strict=True):
            result.attacked.append(row["index"])
            if attack.fooled:
                windows = [list(window.numbers) for window in attack.attacked.windows]
                entry = contradiction(row, "a certified image was fooled", row["label"], attack.verdict.label)
                result.contradictions.append({**entry, "patches": windows, "image": attack.attacked.image.numpy()})


def audit(
    run: Run,
    job: Job | MultiLabelJob,
    *,
    sample: int = 50,
    attack: int = 10,
    settings: AttackSettings | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
    runner: Runner | None = None,
    workload: type[AuditWorkload] | None = None,
) -> Audit:
    """Read all rows, derive `sample` of them again, and attack `attack` certified images.

    Reading raises if rows are not as they were written, or contradict themselves. The seed of the settings decides
    which rows are derived and attacked. `workload` is MultiLabelAudit for images of several labels. `on_progress` gets
    the images done, their total, and a status text.
    """
    runner, settings = runner or LocalRunner(), settings or AttackSettings(iterations=50, locations=2)
    work, rows = (workload or AuditWorkload)(run, job, settings), run.read().to_pylist()  # type: ignore[arg-type]
    identity = runner.begin(work)
    result = Audit(rows=len(rows), notes=_notes(run, identity))
    attack_batch = ATTACK_BATCH * (16 if identity["device"] == "cuda" else 1)
    readable = [row for row in rows if row["skipped"] is None]
    tasks = _tasks(readable, sample, attack, settings.seed, attack_batch)
    parts: dict[int, Audit] = {}
    for task, part in runner.results(work, tasks):
        parts[task.number] = part
        if on_progress is not None:
            done = sum(len(part.derived) + len(part.attacked) for part in parts.values())
            contradictions = sum(len(part.contradictions) for part in parts.values())
            on_progress(done, sum(len(task.rows) for task in tasks), f"{contradictions} contradictions")
    for task in tasks:  # in their order, wherever and whenever they were done
        result.add(parts[task.number], run.folder / "audit")
    return result


def _tasks(rows: list[Row], sample: int, attack: int, seed: int, attack_batch: int) -> list[AuditTask]:
    """Rows to derive, one by one, then certified images to attack, some at once."""
    generator = np.random.default_rng(seed)

    def choose(rows: list[Row], number: int) -> list[Row]:
        return [rows[i] for i in sorted(generator.permutation(len(rows))[:number].tolist())]

    derived = choose(rows, sample)
    targets = choose([row for row in rows if _promises(row)], attack)
    groups = [[row] for row in derived] + [targets[i : i + attack_batch] for i in range(0, len(targets), attack_batch)]
    return [AuditTask(number, group, number >= len(derived)) for number, group in enumerate(groups)]


def _promises(row: Row) -> bool:
    """Whether a row promises anything that an attack can refute."""
    if "certified_true" in row:
        return bool(row["certified_true"][0] > 0)
    return bool(row["row_certified"] or row["detection_certified"])


def _notes(run: Run, identity: dict[str, Any]) -> list[str]:
    notes = [run.unchecked] if run.unchecked else []
    for name in ("device", "labels", "scores"):
        if identity.get(name) != run.job.get(name):
            notes.append(f"{name}: the run says {run.job.get(name)}, this audit {identity.get(name)}")
    if run.job["precision"] == "fast":
        notes.append("the run's labels are fast ones; the audit's are float32")
    return notes


def write_audit(result: Audit, run: Run, settings: AttackSettings, *, sample: int, attack: int) -> Path:
    """Write the outcome of an audit, signed, with everything needed to repeat it, into the run's folder."""
    path = run.folder / AUDIT
    content = {
        "run": str(run.folder),
        "key": run.key,
        **run.integrity,
        "job": run.job,
        "about": run.metadata,
        "sample": sample,
        "attack": attack,
        "settings": vars(settings),
        **result.to_dict(),
    }
    content["signature"] = sign(content)
    with whole_file(path) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
